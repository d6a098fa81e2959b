"""The application that `serve run` and `serve deploy` import: `serve.app:build`."""

from typing import Any

from ray import serve as ray_serve
from ray.serve import Application

from configs.engine import ServeConfig
from serve.api.auth import load_api_keys
from serve.deployment import LLMServer
from serve.hosting import EnginePlan
from serve.ray_host import placement_bundles, preflight, ray_device


def build(args: dict[str, Any]) -> Application:
    """An application from the YAML's `args:` (fields of ServeConfig).

    Raises ConfigError, before any device is taken, for settings that cannot work: unknown keys, a folder that is not a
    checkpoint, dimensions that do not divide, a key file without keys, more devices than the cluster has.
    """
    config = ServeConfig.from_args(args)
    EnginePlan.make(config.engine)
    load_api_keys(config.api_key_file, "")
    device = ray_device(config.engine)
    options = config.deployment
    preflight(config, device)
    deployment = ray_serve.deployment(
        name="LLMServer",
        num_replicas=options.num_replicas,
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=options.max_queued_requests,
        health_check_period_s=options.health_check_period_s,
        health_check_timeout_s=options.health_check_timeout_s,
        graceful_shutdown_timeout_s=options.graceful_shutdown_timeout_s,
        ray_actor_options={"num_cpus": options.cpus_per_replica},
        placement_group_bundles=placement_bundles(config, device),
        placement_group_strategy=options.placement_group_strategy,
        max_constructor_retry_count=1,
    )(LLMServer)
    return deployment.bind(config.model_dump_json())

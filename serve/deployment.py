"""The Serve deployment: a replica that owns one engine and speaks OpenAI's API over HTTP and over its handle."""

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator
from functools import partial

from ray import serve as ray_serve
from ray.util import get_current_placement_group

from configs.base import ConfigError
from configs.engine import ServeConfig
from serve.api.admission import Admission
from serve.api.auth import API_KEYS_VARIABLE, load_api_keys
from serve.api.caller import LEASE_FIELD, Caller, Leases
from serve.api.routes import create_app
from serve.api.sampling import checkpoint_defaults
from serve.api.serving import OpenAIServing
from serve.api.shapes import Json
from serve.api.structure import warm_up
from serve.chat_template import load_chat_format
from serve.driver.messages import StartupProgress
from serve.engine import AsyncEngine
from serve.hosting import EnginePlan
from serve.parsers.detect import detect_output_format
from serve.ray_host import RayHost, ray_device
from serve.tokenizer import Tokenizer

logger = logging.getLogger("ray.serve")

# After the engine's death: long enough for errors to reach the clients, short of Serve's next health check.
_LAST_ANSWERS_S = 0.3

_current: "LLMServer | None" = None


def _serving() -> OpenAIServing:
    if _current is None:
        raise RuntimeError("the replica has not started")
    return _current.serving


@ray_serve.ingress(create_app(_serving))
class LLMServer:
    """One replica = one engine. Its methods serve the DeploymentHandle; HTTP comes in through the FastAPI ingress."""

    async def _start(self, config: str) -> None:
        """`config` is a ServeConfig as JSON. Returns when the workers are ready."""
        global _current
        begin = time.perf_counter()
        self._config = ServeConfig.model_validate_json(config)
        plan = EnginePlan.make(self._config.engine)
        tokenizer = Tokenizer(self._config.engine.model)
        group = get_current_placement_group()
        if group is None:
            raise ConfigError("LLMServer must run in a placement group: deploy it through serve.app:build")
        host = partial(RayHost, group=group, device=ray_device(self._config.engine))
        self._shown_percent = -1
        warm = asyncio.create_task(asyncio.to_thread(warm_up))
        self._engine = await AsyncEngine.start(plan, host, self._show_progress)
        await warm
        folder = self._config.engine.model
        chat = load_chat_format(folder, tokenizer.special_tokens)
        output = detect_output_format(folder, chat, self._config.tool_call_parser, self._config.reasoning_parser)
        logger.info("tool calls are read as %s, reasoning as %s", output.tools, "<think>" if output.reasoning else None)
        self.serving = OpenAIServing(
            self._engine,
            tokenizer,
            chat,
            self._config.model_name,
            checkpoint_defaults(folder),
            output,
            load_api_keys(self._config.api_key_file, os.environ.get(API_KEYS_VARIABLE, "")),
            Admission(self._config.max_sequences, self._config.admission.max_waiting_tokens),
            self._config.request_timeout_s,
            self._config.health_stall_s,
            self._config.sse_keep_alive_s,
            tuple(self._config.cors_allow_origins),
        )
        self._leases = Leases()
        self._on_death = asyncio.create_task(self._exit_when_dead())
        _current = self
        self._log_start(time.perf_counter() - begin)

    __init__ = _start  # Serve awaits a constructor that is a coroutine

    async def chat(self, body: Json) -> Json:
        """A chat completion: OpenAI's request as a dict -> its answer."""
        return await self.serving.chat(body, self._caller(body))

    async def completions(self, body: Json) -> Json:
        """A text completion: OpenAI's request as a dict -> its answer."""
        return await self.serving.completions(body, self._caller(body))

    async def chat_stream(self, body: Json) -> AsyncGenerator[Json, None]:
        """The chunks of a chat completion (`handle.options(stream=True)`)."""
        async for chunk in self.serving.chat_stream(body, self._caller(body)):
            yield chunk

    async def completions_stream(self, body: Json) -> AsyncGenerator[Json, None]:
        """The chunks of a text completion (`handle.options(stream=True)`)."""
        async for chunk in self.serving.completions_stream(body, self._caller(body)):
            yield chunk

    async def responses(self, body: Json) -> Json:
        """OpenAI's request to /v1/responses as a dict -> a Response object."""
        return await self.serving.responses.create(body, self._caller(body))

    async def responses_stream(self, body: Json) -> AsyncGenerator[Json, None]:
        """The events of a Response (`handle.options(stream=True)`)."""
        async for event in self.serving.responses.stream(body, self._caller(body)):
            yield event

    async def models(self) -> Json:
        """The list of models, which has one."""
        return self.serving.models()

    async def renew_lease(self, name: str) -> None:
        """A client that gave calls this lease still waits for them; else they are aborted after LEASE_S seconds."""
        self._leases.renew(name)

    async def drain(self, timeout_s: float) -> bool:
        """Before the end: refuses new requests with a 503, and waits for those in progress. Whether all have ended."""
        return await self.serving.runner.drain(timeout_s)

    def _caller(self, body: Json) -> Caller:
        lease = body.get(LEASE_FIELD)
        return Caller(lease=self._leases.get(lease) if isinstance(lease, str) else None)

    async def check_health(self) -> None:
        """Serve's health check: an engine that died makes the replica be replaced. Never waits for a step."""
        if self._engine.dead is not None:
            raise RuntimeError(self._engine.dead)

    async def __del__(self) -> None:
        """Called by Serve once the replica has drained."""
        self._on_death.cancel()
        await self._engine.stop()

    async def _exit_when_dead(self) -> None:
        """A dead engine cannot be repaired in place: leave, so that Serve starts another replica at once."""
        await self._engine.died.wait()
        logger.error("the engine died and this replica ends: %s", self._engine.dead)
        await asyncio.sleep(_LAST_ANSWERS_S)
        await self._engine.stop()
        os._exit(1)

    def _show_progress(self, progress: StartupProgress) -> None:
        percent = 100 * progress.done // max(progress.total, 1)
        if percent >= self._shown_percent + 10 or (percent == 100 != self._shown_percent):
            self._shown_percent = percent
            logger.info("loading weights: %d %% of %.0f MiB", percent, progress.total / 2**20)

    def _log_start(self, seconds: float) -> None:
        ready = self._engine.started
        logger.info(
            "%s is ready after %.1f s (%s): KV cache of %d pages = %d tokens, %.0f MiB a rank; context %d",
            self._config.model_name,
            seconds,
            ", ".join(f"{phase} {took:.1f} s" for phase, took in self._engine.start_seconds.items()),
            ready.num_pages,
            ready.num_pages * ready.page_size,
            ready.num_pages * ready.page_bytes / 2**20,
            self._engine.max_model_len,
        )

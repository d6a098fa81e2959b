"""A deployment of your own in front of the engine, in one application: no HTTP between them, one placement, one deploy.

serve run examples.composition:app model=examples/tiny-model
curl '127.0.0.1:8000/?reference=Genesis%201:1'
"""

from typing import Any

from ray import serve as ray_serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request

from serve.app import build
from serve.client import Client


@ray_serve.deployment
class Verses:
    """Looks up verses by their references, several at a time."""

    def __init__(self, llm: DeploymentHandle | str) -> None:
        self._llm = Client(llm)

    async def __call__(self, request: Request) -> dict[str, str]:
        return {reference: await self.look_up(reference) for reference in request.query_params.getlist("reference")}

    async def look_up(self, reference: str) -> str:
        """Raises ApiError as the engine's API does."""
        answer = await self._llm.achat([{"role": "user", "content": reference}], temperature=0, max_tokens=64)
        return answer["choices"][0]["message"]["content"] or ""


def app(args: dict[str, Any]) -> Application:
    """`args`: model, the folder of a checkpoint."""
    engine = {"engine": {"model": args["model"], "device": "cpu"}, "deployment": {"cpus_per_worker": 0.5}}
    return Verses.options(ray_actor_options={"num_cpus": 0.1}).bind(build(engine))

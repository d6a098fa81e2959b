"""A scheduler with a fake worker: `step` runs a plan, `plan` alone leaves it in flight."""

from typing import Any

from serve.driver.messages import AddRequest, RequestDelta
from serve.driver.pages import PageManager
from serve.driver.scheduler import Scheduler
from tests.fake_workers import VOCAB, FakeWorker
from workers.step import SamplingParams, StepOutput, StepPlan

MAX_MODEL_LEN = 1000


class Engine:
    def __init__(self, num_pages: int = 64, max_num_seqs: int = 4, max_rows: int = 256, **settings: Any) -> None:
        self.pages = PageManager(num_pages)
        self.max_model_len = settings.setdefault("max_model_len", MAX_MODEL_LEN)
        self.scheduler = Scheduler(self.pages, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_rows, **settings)
        self.worker = FakeWorker(num_pages, max_num_seqs, max_rows, self.max_model_len)
        self.outputs: list[StepOutput] = []
        self.tokens: dict[str, list[int]] = {}

    def add(
        self,
        request_id: str,
        prompt: list[int],
        *,
        priority: int = 0,
        salt: str = "",
        stop=(),
        tenant: str = "",
        **params,
    ) -> AddRequest:
        params = {"temperature": 0, "max_tokens": 500} | params
        request = AddRequest(request_id, prompt, SamplingParams(**params), priority, salt, tuple(stop), tenant)
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self.outputs.append(self.worker.execute(plan))
        return plan

    def receive(self) -> list[RequestDelta]:
        deltas = self.scheduler.update(self.outputs.pop(0))
        for delta in deltas:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        return deltas

    def step(self) -> tuple[StepPlan, list[RequestDelta]]:
        plan = self.plan()
        assert plan is not None
        return plan, self.receive()

    def drain(self, depth: int = 1) -> list[RequestDelta]:
        """Runs to the end, `depth` plans in flight; returns the last deltas of all requests."""
        last = []
        while True:
            while len(self.outputs) < depth and self.plan() is not None:
                pass
            if not self.outputs:
                return last
            last += [delta for delta in self.receive() if delta.finish_reason]

    def check_rest(self) -> None:
        self.scheduler.check_integrity()
        self.pages.check_integrity()


def prompt_of(length: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % VOCAB for i in range(length)]

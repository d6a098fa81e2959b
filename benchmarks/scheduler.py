"""What a step costs the driver: plan, encode, take in the output, encode the deltas.

    python benchmarks/scheduler.py

Run from the root of the repository. The number of waiting sequences must not matter.
"""

import statistics
import sys
import time
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from serve.driver.messages import AddRequest, EngineOutputs
from serve.driver.pages import PageManager, pages_for
from serve.driver.scheduler import Scheduler
from workers.step import SamplingParams, StepOutput, StepPlan

PROMPT_TOKENS = 128
STEPS = 400


def answer(plan: StepPlan) -> StepOutput:
    num_sampled = len(plan.decode) + sum(chunk.sample for chunk in plan.chunks)
    return StepOutput(plan.step, [[7]] * num_sampled, [[]] * num_sampled, [], 0.0)


def run_step(scheduler: Scheduler, encoder: msgspec.msgpack.Encoder) -> tuple[float, int]:
    """Seconds of the driver's share in one step, and the bytes broadcast."""
    start = time.perf_counter()
    plan = scheduler.schedule()
    assert plan is not None
    message = encoder.encode(plan)
    planned = time.perf_counter()
    output = answer(plan)
    answered = time.perf_counter()
    encoder.encode(EngineOutputs(scheduler.update(output), scheduler.stats()))
    return time.perf_counter() - answered + planned - start, len(message)


def loaded_scheduler(running: int, waiting: int) -> Scheduler:
    """`running` sequences decode in as many slots, `waiting` ones wait for a slot."""
    num_pages = running * pages_for(PROMPT_TOKENS + STEPS + 64)
    scheduler = Scheduler(
        PageManager(num_pages), max_num_seqs=running, max_num_batched_tokens=8192, max_model_len=1 << 20
    )
    params = SamplingParams(max_tokens=1 << 19)
    for index in range(running + waiting):
        prompt = [(index * 31 + position) % 50_000 for position in range(PROMPT_TOKENS)]
        scheduler.add(AddRequest(str(index), prompt, params))
    while scheduler.stats().generated_tokens < running * 2:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(answer(plan))
    return scheduler


def measure(running: int, waiting: int) -> tuple[float, float, int]:
    """Median and 99th percentile of a step in microseconds, and the median bytes of a plan."""
    scheduler = loaded_scheduler(running, waiting)
    encoder = msgspec.msgpack.Encoder()
    steps = [run_step(scheduler, encoder) for _ in range(STEPS)]
    seconds = sorted(step[0] for step in steps)
    return (
        statistics.median(seconds) * 1e6,
        seconds[int(STEPS * 0.99)] * 1e6,
        int(statistics.median(step[1] for step in steps)),
    )


def main() -> None:
    medians = {}
    print(f"{'running':>8} {'waiting':>8} {'us/step p50':>12} {'p99':>8} {'plan bytes':>11}")
    for running, waiting in ((1, 0), (512, 0), (512, 100_000)):
        p50, p99, size = measure(running, waiting)
        medians[running, waiting] = p50
        print(f"{running:>8} {waiting:>8} {p50:>12.1f} {p99:>8.1f} {size:>11}")
    print(f"512 running, 100k waiting / 0 waiting: {medians[512, 100_000] / medians[512, 0]:.2f}x")


if __name__ == "__main__":
    main()

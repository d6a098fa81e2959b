"""Which decode steps are captured and when, and what is replayed: over a stand-in for CUDA."""

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.engine import EngineConfig
from tests import REPOSITORY
from workers.graphs import DecodeGraphs, DecodeHalves, GraphKey, ladder, length_ladder
from workers.result import StepResult
from workers.sampler import Needs, Verdict

CPU = torch.device("cpu")
PADDING = 99
NO_MASKS = pytest.fail  # where there are no grammars nobody writes masks
GREEDY, DEFAULT = Needs(0), Needs.DRAWS | Needs.REJECTION


class Steps:
    """Stands for the halves of a decode step, and for graphs: a replay computes again from the same slot ids."""

    def __init__(self) -> None:
        self.runs: list[tuple[int, int, int, Needs, int]] = []
        self.replays: list[list[int]] = []
        self.second_halves = 0  # replayed apart
        self.capturing: Any = None
        self.masks: list[Any] = []  # that the second halves were given

    def forward(self, slot_ids: torch.Tensor, verify: int, bound: int) -> tuple[Any, Any]:
        if self.capturing is not None:
            self.capturing.slot_ids, self.capturing.half = slot_ids, "both"
        return (slot_ids, verify, bound), slot_ids

    def conclude(self, batch: Any, hidden: Any, draft: int, needs: Needs, masks: Any) -> StepResult:
        slot_ids, verify, bound = batch
        self.runs.append((len(slot_ids), verify, draft, needs, bound))
        self.masks.append(masks)
        if self.capturing is not None and not hasattr(self.capturing, "half"):
            self.capturing.slot_ids, self.capturing.half = slot_ids, "second"
        counts = torch.ones_like(slot_ids)
        drafts = slot_ids[:, None] if Needs.GRAMMAR in needs else None
        return StepResult(Verdict(slot_ids[:, None], counts), None, drafts)

    def halves(self) -> DecodeHalves:
        return DecodeHalves(self.forward, self.conclude, lambda count, rows: (count, rows))


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    steps = Steps()

    class Graph:
        slot_ids: torch.Tensor
        half: str

        def replay(self) -> None:
            if self.half == "both":
                steps.replays.append(self.slot_ids.tolist())
            else:
                steps.second_halves += 1

    @contextlib.contextmanager
    def capture(graph: Graph, **options: Any) -> Iterator[None]:
        assert options["capture_error_mode"] == "thread_local"
        steps.capturing = graph
        yield
        steps.capturing = None

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return steps


def make(steps: Steps, drafts: int = 0, dense: int | None = None, **settings: Any) -> DecodeGraphs:
    config = EngineConfig(
        model=REPOSITORY / "examples" / "tiny-model", max_num_seqs=6, num_draft_tokens=drafts, **settings
    )
    return DecodeGraphs(steps.halves(), config, PADDING, 4096, dense, CPU)


def test_ladders() -> None:
    assert ladder(1) == [1] and ladder(6) == [1, 2, 3, 4, 6]
    sizes = ladder(64)
    assert sizes[0] == 1 and sizes[-1] == 64 and sizes == sorted(set(sizes)) and len(sizes) < 20
    assert ladder(63)[-1] == 63
    assert length_ladder(4096, None) == [4096] == length_ladder(4096, 4096)
    assert length_ladder(40000, 2048) == [2048, 8192, 32768, 40000]


def test_what_usual_requests_need_is_captured_at_start_largest_first(steps: Steps) -> None:
    make(steps, drafts=2)
    runs = steps.runs[::2]  # each is run once before it is captured
    assert runs == steps.runs[1::2]
    assert [run[0] for run in runs] == [size for size in (6, 4, 3, 2, 1) for _ in range(4)]
    kinds = {(verify, draft, needs) for _, verify, draft, needs, _ in runs}
    assert kinds == {(0, 0, GREEDY), (0, 0, Needs.DRAWS), (2, 2, GREEDY), (2, 2, DEFAULT)}


def test_an_engine_with_a_seed_rejects_nothing(steps: Steps) -> None:
    make(steps, drafts=1, seed=3)
    assert {needs for *_, needs, _ in steps.runs} == {GREEDY, Needs.DRAWS}


def test_a_batch_takes_the_next_size_and_is_filled_up(steps: Steps) -> None:
    graphs = make(steps)
    captured = len(steps.runs)
    for slots, size in (([4], 1), ([4, 2], 2), ([5, 4, 3, 2, 1], 6), ([0], 1)):
        result = graphs.launch(GraphKey(0, 0, GREEDY), slots, 100, NO_MASKS)
        assert steps.replays[-1] == slots + [PADDING] * (size - len(slots))
        assert result.verdict.tokens.flatten().tolist() == slots and len(result.verdict.counts) == len(slots)
    graphs.launch(GraphKey(0, 0, DEFAULT), [1], 100, NO_MASKS)  # without drafts there is nothing to reject
    assert len(steps.runs) == captured


def test_what_only_some_need_is_captured_when_it_first_comes(steps: Steps) -> None:
    graphs = make(steps, dense=1024)
    captured = len(steps.runs)
    for _ in range(3):
        graphs.launch(GraphKey(0, 0, Needs.SCORES), [1, 2, 3], 1024, NO_MASKS)
    assert steps.runs[captured:] == [(3, 0, 0, Needs.SCORES, 1024)] * 2
    graphs.launch(GraphKey(0, 0, GREEDY), [1], 1025, NO_MASKS)  # past what is attended to densely
    assert steps.runs[captured + 2 :] == [(1, 0, 0, GREEDY, 4096)] * 2
    assert steps.replays[-1] == [1]


def test_masks_are_written_between_the_halves_of_a_step(steps: Steps) -> None:
    graphs = make(steps, drafts=2)
    captured = len(steps.runs)
    key = GraphKey(2, 2, GREEDY | Needs.GRAMMAR)
    for count in range(1, 3):
        written = []
        result = graphs.launch(key, [3, 2, 1, 0, 4], 100, lambda size, w=written: w.append((size, steps.second_halves)))
        assert written == [(6, count - 1)]  # the whole size of the graph, before its second half
        assert steps.replays[-1] == [3, 2, 1, 0, 4, PADDING] and steps.second_halves == count
        assert result.drafts is not None and result.drafts.flatten().tolist() == [3, 2, 1, 0, 4]
    assert steps.runs[captured:] == [(6, 2, 2, key.needs, 4096)] * 2
    assert steps.masks[captured:] == [(6, 3)] * 2

"""CUDA graphs of whole decode steps: rows, model, verification, drafting and the slots' new state in one launch.

A graph is captured for a number of sequences from a ladder; a batch takes the next larger one and fills up with the
tables' padding slot. All graphs share one memory pool. What greedy requests and those of default parameters need is
captured at start, largest first; what others need (top_p, logprobs, penalties, ...) when it first comes.
"""

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from configs.engine import EngineConfig
from workers.result import StepResult
from workers.sampler import Needs, TokenScores, Verdict
from workers.step import SamplingParams
from workers.tables import StepBatch

logger = logging.getLogger(__name__)


class GraphKey(NamedTuple):
    """What a captured step was captured for, beside sizes."""

    verify: int
    draft: int
    needs: Needs


class DecodeHalves(NamedTuple):
    """A decode step in two: `forward(slot_ids, verify, max_length)`, then `conclude(*its result, draft, needs, masks)`;
    `masks(count, rows)` is where conclude finds what grammars allow (None on ranks that do not sample)."""

    forward: Callable[[torch.Tensor, int, int], tuple[StepBatch, torch.Tensor]]
    conclude: Callable[[StepBatch, torch.Tensor, int, Needs, torch.Tensor | None], StepResult]
    masks: Callable[[int, int], torch.Tensor] | None


class _Captured(NamedTuple):
    """One graph, or two between which the host writes masks."""

    graphs: list[torch.cuda.CUDAGraph]
    result: StepResult


class DecodeGraphs:
    """Decode steps captured and replayed.

    Every rank captures and replays in the same order: collectives inside graphs, and those of warm-up runs, meet.
    """

    def __init__(
        self,
        halves: DecodeHalves,
        config: EngineConfig,
        padding: int,
        max_length: int,
        dense_context: int | None,
        device: torch.device,
    ) -> None:
        """`padding`: a slot that may be decoded at any time without harm; `dense_context`: up to which length attention
        reads everything."""
        self._halves = halves
        self._padding = padding
        self._sizes = ladder(config.max_num_seqs)
        self._bounds = length_ladder(max_length, dense_context)
        self._slot_ids = torch.full((config.max_num_seqs,), padding, dtype=torch.int64, device=device)
        self._current: list[int] = []
        self._graphs: dict[tuple[GraphKey, int, int], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        begin = time.perf_counter()
        usual = (Needs(0), Needs.of(SamplingParams(), repeatable=config.seed is not None))
        keys = {_plain(GraphKey(k, k, needs)) for k in (0, config.num_draft_tokens) for needs in usual}
        for size in reversed(self._sizes):
            for key in sorted(keys, reverse=True):
                self._capture(key, size, self._bounds[0])
        logger.info("captured %d decode graphs in %.1f s", len(self._graphs), time.perf_counter() - begin)

    def launch(
        self, key: GraphKey, slots: list[int], max_length: int, write_masks: Callable[[int], object]
    ) -> StepResult:
        """Decodes these slots, none of which may exceed max_length with what the step adds. Where there are grammars,
        `write_masks(count)` is called once the first half runs. The result is valid until the next launch."""
        key = _plain(key)
        size = next(size for size in self._sizes if size >= len(slots))
        bound = next((bound for bound in self._bounds if bound >= max_length), self._bounds[-1])
        captured = self._graphs.get((key, size, bound))
        if captured is None:
            captured = self._capture(key, size, bound)
        self._set_slots(slots + [self._padding] * (size - len(slots)))
        captured.graphs[0].replay()
        for graph in captured.graphs[1:]:
            write_masks(size)
            graph.replay()
        return _first(captured.result, len(slots))

    def _set_slots(self, slots: list[int]) -> None:
        if slots != self._current[: len(slots)]:
            self._slot_ids[: len(slots)].copy_(torch.tensor(slots).pin_memory(), non_blocking=True)
            self._current = slots

    def _capture(self, key: GraphKey, size: int, bound: int) -> _Captured:
        """Runs the step on padding alone, so that kernels are compiled and caches filled, then captures it."""
        slot_ids, halves = self._slot_ids[:size], self._halves
        has_grammars = Needs.GRAMMAR in key.needs
        masks = halves.masks(size, 1 + key.verify) if has_grammars and halves.masks is not None else None
        self._set_slots([self._padding] * size)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            halves.conclude(*halves.forward(slot_ids, key.verify, bound), key.draft, key.needs, masks)
        torch.cuda.current_stream().wait_stream(self._stream)
        graphs = [torch.cuda.CUDAGraph()]
        with self._capturing(graphs[0]):
            rows = halves.forward(slot_ids, key.verify, bound)
            if not has_grammars:
                result = halves.conclude(*rows, key.draft, key.needs, None)
        if has_grammars:
            graphs.append(torch.cuda.CUDAGraph())
            with self._capturing(graphs[1]):
                result = halves.conclude(*rows, key.draft, key.needs, masks)
        captured = self._graphs[key, size, bound] = _Captured(graphs, result)
        return captured

    def _capturing(self, graph: torch.cuda.CUDAGraph) -> torch.cuda.graph:
        # Other threads may call CUDA meanwhile: NCCL's watchdog asks whether earlier collectives have ended.
        return torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")


def _plain(key: GraphKey) -> GraphKey:
    """Without drafts nothing is rejected."""
    return key if key.verify or key.draft else key._replace(needs=key.needs & ~Needs.REJECTION)


def _first(result: StepResult, count: int) -> StepResult:
    """Without what was computed for padding."""
    verdict, scores, drafts = result
    return StepResult(
        Verdict(verdict.tokens[:count], verdict.counts[:count]),
        TokenScores(*(t[:count] for t in scores)) if scores is not None else None,
        drafts[:count] if drafts is not None else None,
    )


def ladder(most: int) -> list[int]:
    """Numbers of sequences to capture, the last one `most`: steps of an eighth or so, so that little is padded."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size += 1 if size < 4 else max(4, 1 << (size.bit_length() - 3))
        size -= size % 4 if size > 4 else 0
    return [*sizes, most]


def length_ladder(most: int, dense_context: int | None) -> list[int]:
    """Bounds on lengths to capture for. One is enough where kernels read lengths on the device; a sparse model has one
    for what it attends to densely, and more because scores of all positions take room."""
    if dense_context is None or dense_context >= most:
        return [most]
    bounds = [dense_context]
    while 4 * bounds[-1] < most:
        bounds.append(4 * bounds[-1])
    return [*bounds, most]

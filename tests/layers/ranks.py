"""Runs checkpoints on one rank in this process, or on two ranks in two processes kept for the whole session."""

import multiprocessing
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs.engine import EngineConfig, ParallelConfig
from configs.hf import load_model_config
from layers.attention.backend import AttentionBatch, PagedRows
from layers.moe.router import Router, Routing
from layers.parallel import TensorParallel
from workers.parallel import init_tensor_parallel
from workers.runner import ModelRunner
from workers.step import Admission, PrefillChunk, SamplingParams, StepPlan

MAX_LEN = 512
CPU = torch.device("cpu")


class Rank:
    """A loaded checkpoint on one rank; all methods must be called alike on every rank."""

    def __init__(self, folder: Path, tp: TensorParallel, dtype: str) -> None:
        parallel = ParallelConfig(tp_size=tp.size, ep_size=tp.ep_size)
        config = EngineConfig(model=folder, parallel=parallel, dtype=dtype, kv_cache_bytes=32 << 20, max_num_seqs=4)
        self.runner = ModelRunner(config, load_model_config(folder), MAX_LEN, tp, CPU, lambda done, total: None)
        self.runner.start_cache(self.runner.num_pages)
        self.pages = list(range(3, 3 + MAX_LEN // 64))[::-1]  # not in order, as after some use
        self.step = 0

    def logits(self, ids: list[int], chunk: int) -> np.ndarray:
        """Teacher-forced logits [len, vocab], prefilled `chunk` positions at a time through the runner."""
        admission = self._admission(len(ids), SamplingParams(temperature=0, prompt_logits=True, max_tokens=1))
        rows = []
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            out = self._run([admission] if start == 0 else [], [], [PrefillChunk(1, start, part, False)])
            (scores,) = out.prompt_scores
            assert scores.start == start
            rows.append(np.frombuffer(scores.logits, "<f4").reshape(len(part), -1))
        return np.concatenate(rows)

    @torch.inference_mode()
    def decoded_logits(self, ids: list[int]) -> np.ndarray:
        """The same, every position as a decode row (absorbed attention over the cache)."""
        table = torch.tensor([self.pages], dtype=torch.int32)
        rows = []
        for position, token in enumerate(ids):
            slot = torch.tensor([self.pages[position // 64] * 64 + position % 64])
            seen = PagedRows(table, torch.tensor([position + 1], dtype=torch.int32), 1, position + 1)
            batch = AttentionBatch(slot, (seen,))
            hidden = self.runner.model(torch.tensor([token]), torch.tensor([position]), self.runner.caches, batch)
            rows.append(self.runner.model.logits(hidden))
        return torch.cat(rows).numpy()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens after the prompt: one prefill, then decode steps, through the runner."""
        admission = self._admission(len(prompt), SamplingParams(temperature=0, max_tokens=count))
        tokens = self._run([admission], [], [PrefillChunk(1, 0, prompt, True)]).tokens[0]
        while len(tokens) < count:
            tokens = tokens + self._run([], [1], []).tokens[0]
        return tokens

    def routings(self, ids: list[int]) -> dict[int, Routing]:
        """What every router of the model chose over one prefill of `ids`, by layer."""
        seen: dict[int, Routing] = {}
        hooks = []
        for index, layer in enumerate(self.runner.model.layers):
            for module in layer.modules():
                if isinstance(module, Router):
                    hooks.append(module.register_forward_hook(lambda m, a, out, i=index: seen.__setitem__(i, out)))
        self.logits(ids, len(ids))
        for hook in hooks:
            hook.remove()
        return seen

    def _admission(self, num_prompt: int, params: SamplingParams) -> Admission:
        return Admission(1, 0, params, num_prompt, 0, self.pages, [], [])

    def _run(self, admitted: list[Admission], decode: list[int], chunks: list[PrefillChunk]) -> Any:
        self.step += 1
        freed = [admission.slot for admission in admitted]  # the slot's last sequence leaves as the next one comes
        return self.runner.execute(StepPlan(self.step, freed, admitted, [], decode, chunks))


class TwoRanks:
    """Two processes that each hold rank r of two, and run the same call on a checkpoint."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        rendezvous = f"file://{self._folder.name}/rendezvous"
        self._pipes, self._processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank_main, args=(rank, rendezvous, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, folder: Path, ep_size: int, dtype: str, method: str, *args: Any) -> Any:
        """`Rank(folder).method(*args)` on both ranks; rank 0's result."""
        for pipe in self._pipes:
            pipe.send((folder, ep_size, dtype, method, args))
        results = [pipe.recv() for pipe in self._pipes]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results[0]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def _rank_main(rank: int, rendezvous: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    joined = init_tensor_parallel(ParallelConfig(tp_size=2), rank, rendezvous, CPU, timeout_s=120)
    loaded: tuple[Any, Rank] | None = None
    while (request := pipe.recv()) is not None:
        folder, ep_size, dtype, method, args = request
        try:
            if loaded is None or loaded[0] != (folder, ep_size, dtype):
                tp = TensorParallel(joined.rank, joined.size, ep_size, joined.group)
                loaded = ((folder, ep_size, dtype), Rank(folder, tp, dtype))
            pipe.send(getattr(loaded[1], method)(*args))
        except Exception as error:
            pipe.send(error)

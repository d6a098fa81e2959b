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
from layers.attention.backend import AttentionBatch, PagedRows, Selection
from layers.moe.router import Router
from layers.moe.routing import Routing
from layers.parallel import TensorParallel
from workers.parallel import init_tensor_parallel
from workers.runner import ModelRunner
from workers.step import Admission, PrefillChunk, SamplingParams, StepPlan

MAX_LEN = 512
CPU = torch.device("cpu")


class Rank:
    """A loaded checkpoint on one rank; all methods must be called alike on every rank."""

    def __init__(self, folder: Path, tp: TensorParallel, dtype: str, **settings: Any) -> None:
        parallel = ParallelConfig(tp_size=tp.size, ep_size=tp.ep_size)
        config = EngineConfig(
            model=folder, parallel=parallel, dtype=dtype, kv_cache_bytes=32 << 20, max_num_seqs=4, **settings
        )
        self.drafts = config.num_draft_tokens
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
            chunk_plan = PrefillChunk(1, start, part, False, ids[start + len(part) :][: self.drafts])
            out = self._run([admission] if start == 0 else [], [], [chunk_plan])
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
        tokens = self._run([admission], [], [PrefillChunk(1, 0, prompt, True)], draft=self.drafts).tokens[0]
        while len(tokens) < count:
            tokens = tokens + self._run([], [1], [], self.drafts, self.drafts).tokens[0]
        return tokens[:count]

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

    def selections(self, ids: list[int]) -> dict[int, torch.Tensor]:
        """The positions that every indexer of the model selected over one prefill of `ids`, by layer: [len, k],
        ascending, -1 = none."""
        seen: dict[int, torch.Tensor] = {}
        page_of = {page: i for i, page in enumerate(self.pages)}

        def record(layer: int, chosen: Selection) -> None:
            (slots,) = chosen
            assert slots is not None
            positions = [[page_of[s // 64] * 64 + s % 64 if s >= 0 else -1 for s in row] for row in slots.tolist()]
            seen[layer] = torch.tensor(positions)

        hooks = []
        for index, layer in enumerate(self.runner.model.layers):
            if (indexer := layer.self_attn.indexer) is not None:
                hooks.append(indexer.register_forward_hook(lambda m, a, out, i=index: record(i, out)))
        self.logits(ids, len(ids))
        for hook in hooks:
            hook.remove()
        return seen

    @torch.inference_mode()
    def mtp_outputs(self, ids: list[int], chunk: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Teacher-forced (hidden states, logits) of every MTP module, row t from hidden state t and token t + 1 + k;
        the model's rows and the modules' are computed `chunk` positions at a time."""
        tables, model = self.runner.tables, self.runner.model
        tables.apply(StepPlan(0, [], [self._admission(len(ids), SamplingParams())], [], [], []))
        module_caches = self.runner.caches[len(self.runner.model_config.layers) :]
        states: list[list[torch.Tensor]] = [[] for _ in range(1 + len(model.mtp))]
        for start in range(0, len(ids), chunk):
            plan = StepPlan(0, [], [], [], [], [PrefillChunk(1, start, ids[start : start + chunk], False)])
            batch = tables.batch(plan)
            states[0].append(model(batch.token_ids, batch.positions, self.runner.caches, batch.attention))
            rotation = model.rotary(batch.positions)
            for k, (module, cache) in enumerate(zip(model.mtp, module_caches, strict=True)):
                tokens = torch.tensor((ids[start + 1 + k :] + [0] * (1 + k))[: len(batch.token_ids)])
                x = module.join(tokens, states[k][-1])
                states[k + 1].append(module(x, rotation, cache, batch.attention)[0])
        hidden = [torch.cat(parts)[: len(ids) - 1 - k] for k, parts in enumerate(states[1:])]
        return [(h.numpy(), module.logits(h).numpy()) for h, module in zip(hidden, model.mtp, strict=True)]

    def mtp_entries(self, module: int, count: int) -> torch.Tensor:
        """What an MTP module's cache holds of the first `count` positions of the sequence: [count, cache_dim]."""
        cache = self.runner.caches[len(self.runner.model_config.layers) + module].latents.flatten(0, 1)
        slots = [self.pages[position // 64] * 64 + position % 64 for position in range(count)]
        return cache[slots].clone()

    def chain(self, ids: list[int], chunk: int, share_selection: bool) -> list[int]:
        """The token after `ids`, prefilled `chunk` positions at a time, and the drafts after it."""
        assert self.runner.drafter is not None
        self.runner.drafter.share_selection = share_selection
        admission = self._admission(len(ids), SamplingParams(temperature=0, max_tokens=9))
        tokens: list[int] = []
        for start in range(0, len(ids), chunk):
            part, ahead = ids[start : start + chunk], ids[start + chunk :][: self.drafts]
            plan = [PrefillChunk(1, start, part, not ahead, ahead)]
            out = self._run([admission] if start == 0 else [], [], plan, draft=0 if ahead else self.drafts)
            tokens = out.tokens[0] if out.tokens else []
        return tokens + self.runner.tables.drafts[1].tolist()

    def _admission(self, num_prompt: int, params: SamplingParams) -> Admission:
        return Admission(1, 0, params, num_prompt, 0, self.pages, [], [])

    def _run(
        self, admitted: list[Admission], decode: list[int], chunks: list[PrefillChunk], verify: int = 0, draft: int = 0
    ) -> Any:
        self.step += 1
        freed = [admission.slot for admission in admitted]  # the slot's last sequence leaves as the next one comes
        return self.runner.execute(StepPlan(self.step, freed, admitted, [], decode, chunks, verify, draft))


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

    def call(self, folder: Path, ep_size: int, dtype: str, method: str, *args: Any, **settings: Any) -> Any:
        """`Rank(folder, **settings).method(*args)` on both ranks; rank 0's result."""
        return self.call_all(folder, ep_size, dtype, method, *args, **settings)[0]

    def call_all(self, folder: Path, ep_size: int, dtype: str, method: str, *args: Any, **settings: Any) -> list[Any]:
        """The same; both ranks' results."""
        for pipe in self._pipes:
            pipe.send((folder, ep_size, dtype, method, args, settings))
        results = [pipe.recv() for pipe in self._pipes]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

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
        folder, ep_size, dtype, method, args, settings = request
        try:
            if loaded is None or loaded[0] != (folder, ep_size, dtype, settings):
                tp = TensorParallel(joined.rank, joined.size, ep_size, joined.group)
                loaded = ((folder, ep_size, dtype, settings), Rank(folder, tp, dtype, **settings))
            pipe.send(getattr(loaded[1], method)(*args))
        except Exception as error:
            pipe.send(error)

"""One rank's step: apply the plan, run the model, sample, advance."""

import time
from collections.abc import Callable
from functools import partial

import torch

from configs.engine import PAGE_SIZE, EngineConfig
from configs.model import ModelConfig
from layers.attention.backend import AttentionBatch, PagedRows, PrefillRows
from layers.attention.backends import make_attention_backend
from layers.attention.index_cache import make_index_key_format
from layers.attention.mla import LayerCache
from layers.attention.topk_backends import make_topk_backend
from layers.context import LayerContext, SparseContext
from layers.models.decoder import Decoder, mtp_copies
from layers.moe.backend import make_moe_backend
from layers.ops import make_ops
from layers.parallel import TensorParallel
from workers.cache import CacheLayout, pages_that_fit
from workers.drafter import Drafter
from workers.grammar import Grammars
from workers.grammar_compiler import GrammarCompiler
from workers.graphs import DecodeGraphs, DecodeHalves, GraphKey
from workers.loader import differs, load_weights
from workers.prompt_scores import PromptScorer
from workers.random_weights import fill_randomly
from workers.result import LaunchedStep, OnHost, StepResult
from workers.sampler import Needs, Sampler, Verdict, score_tokens
from workers.step import PromptScores, StepOutput, StepPlan, TokenLogprobs
from workers.tables import SlotTables, StepBatch, overshoot


class ModelRunner:
    """The model's shard with the state that steps need. `start_cache` must be called once before `execute`."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        max_model_len: int,
        tp: TensorParallel,
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.max_model_len = max_model_len
        self.device = device
        self.tp = tp
        self.dtype = compute_dtype(config.dtype, model_config.dtype, device)
        context = LayerContext(
            tp,
            self.dtype,
            device,
            make_attention_backend(
                config.attention_backend,
                model_config.attention,
                model_config.attention.num_heads // tp.size,
                max(config.max_num_batched_tokens, config.max_num_seqs * (1 + config.num_draft_tokens)),
                self.dtype,
                device,
            ),
            make_moe_backend(config.moe_backend, device),
            make_ops(config.kernel_backend, device),
            self._sparse_context(),
        )
        self.backends = f"attention {context.attention.name}, experts {context.moe.name}"
        if context.sparse is not None:
            self.backends += f", top-k {context.sparse.topk.name} ({context.sparse.exchange})"
        self.grammars = self._make_grammars()
        num_mtp = min(config.num_draft_tokens, model_config.mtp.num_modules) if model_config.mtp else 0
        positions = max_model_len + overshoot(config.num_draft_tokens)
        self.model = Decoder(context, model_config, positions, num_mtp, self._own_tensors(num_mtp))
        if config.load_format == "dummy":
            fill_randomly(self.model, tp.rank, progress)
        else:
            load_weights(self.model, config.model, progress)
        keys = context.sparse.keys if context.sparse is not None else None
        self.layout = CacheLayout.of(model_config, num_mtp, self.dtype, keys)
        self.sampler = Sampler(
            config.max_num_seqs,
            model_config.vocab_size,
            device,
            max_drafts=config.num_draft_tokens,
            repeatable=config.seed is not None,
            decides=tp.rank == 0,
        )
        self.num_pages = pages_that_fit(config, self._free_memory(), self.layout.page_bytes, max_model_len)
        self.caches: list[LayerCache] = []
        self.scorer = PromptScorer(model_config.vocab_size)
        self._finished = 0.0  # when the last step was

    def start_cache(self, num_pages: int) -> None:
        """Allocates the pages that all ranks agreed on, and what is kept by slot."""
        config, model = self.config, self.model_config
        self.caches = self.layout.allocate(num_pages, self.device)
        self.tables = SlotTables(
            config.max_num_seqs,
            self.max_model_len,
            config.num_draft_tokens,
            scratch_page=num_pages,
            dense_context=model.indexer.top_k if model.indexer is not None else None,
            device=self.device,
        )
        self.drafter = Drafter(self.model, self.tables, self.sampler, self.tp) if self.model.mtp else None
        self.graphs = self._make_graphs()

    @property
    def synchronous(self) -> bool:
        """Whether a launched step has ended when `launch` returns."""
        return self.device.type == "cpu"

    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one plan and waits for it."""
        return self.finish(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Starts one plan on this rank; on a GPU it has not ended when this returns. Every rank must launch the same
        plans in the same order."""
        begin = time.perf_counter()
        self._admit(plan)
        slots = [*plan.decode, *(chunk.slot for chunk in plan.chunks if chunk.sample)]
        needs = self.sampler.needs(slots)
        scores: list[PromptScores] = []
        if plan.chunks:
            batch = self.tables.batch(plan)
            hidden = self._run(batch)
            result = self.conclude(batch, hidden, plan.draft, needs, self._masks(slots, batch, needs))
            scores = self.scorer.score(plan, batch, hidden, self.model.logits)
            self.tables.end_chunks(plan.chunks)
        elif self.graphs is not None:
            key = GraphKey(plan.verify, plan.draft, needs)
            write = partial(self._write_masks, slots, rows=1 + plan.verify)
            result = self.graphs.launch(key, slots, self.tables.bound(plan), write)
        else:
            batch, hidden = self.forward(self.tables.ids(slots), plan.verify, self.tables.bound(plan))
            result = self.conclude(batch, hidden, plan.draft, needs, self._masks(slots, batch, needs))
        step = LaunchedStep(plan.step, slots, self.tables.launched(plan), OnHost(result, self.device), scores, begin)
        if self.grammars is not None and Needs.GRAMMAR in needs:
            self.grammars.follow(step)
        return step

    def finish(self, step: LaunchedStep) -> StepOutput:
        """Waits for a launched step; steps finish in the order in which they were launched."""
        tokens, counts, token_scores, _ = step.result.wait()
        if self.grammars is not None:
            self.grammars.see(step)
        each = counts.tolist()
        self.tables.settle(step.unsettled, each)
        kept = [row[:count] for row, count in zip(tokens.tolist(), each, strict=True)]
        logprobs: list[list[TokenLogprobs]] = [[] for _ in kept]
        if token_scores is not None:
            logprobs = self.sampler.reports(token_scores, step.slots, each)
        begin, self._finished = max(step.begin, self._finished), time.perf_counter()
        return StepOutput(step.step, kept, logprobs, step.prompt_scores, self._finished - begin)

    def forward(self, slot_ids: torch.Tensor, verify: int, max_length: int) -> tuple[StepBatch, torch.Tensor]:
        """The first half of a step of slots [n] int64 that decode: rows -> model -> hidden states [rows, hidden]. As in
        the second half, nothing depends on what the host knows of the tokens, so that CUDA graphs can hold both."""
        batch = self.tables.decode_batch(slot_ids, verify, max_length)
        return batch, self._run(batch)

    def _run(self, batch: StepBatch) -> torch.Tensor:
        return self.model(batch.token_ids, batch.positions, self.caches, batch.attention)

    def conclude(
        self, batch: StepBatch, hidden: torch.Tensor, draft: int, needs: Needs, masks: torch.Tensor | None
    ) -> StepResult:
        """The second half of a step: verify -> advance -> draft. `masks`: see `Sampler.verify`."""
        result = self._verify(hidden, batch, needs, masks)
        self.tables.advance(batch, *result.verdict)
        if self.drafter is None:
            return result
        own = self.caches[len(self.model_config.layers) :]
        drafts = self.drafter.run(batch, draft, hidden, result.verdict, own, needs)
        return result._replace(drafts=drafts) if Needs.GRAMMAR in needs else result

    def _masks(self, slots: list[int], batch: StepBatch, needs: Needs) -> torch.Tensor | None:
        """What grammars allow, where there are any, once it is known."""
        if Needs.GRAMMAR not in needs:
            return None
        return self._write_masks(slots, len(slots), batch.per_sequence)

    def _write_masks(self, slots: list[int], count: int, rows: int) -> torch.Tensor | None:
        return None if self.grammars is None else self.grammars.write(slots, count, rows)

    def _admit(self, plan: StepPlan) -> None:
        self.tables.apply(plan)
        for slot in plan.freed:
            self.scorer.release(slot)
            if self.grammars is not None:
                self.grammars.release(slot)
        for admission in plan.admitted:
            self.scorer.admit(admission)
            self.sampler.admit(admission)
            if self.grammars is not None:
                self.grammars.admit(admission)

    def _verify(self, hidden: torch.Tensor, batch: StepBatch, needs: Needs, masks: torch.Tensor | None) -> StepResult:
        """Rank 0 decides; the others are told."""
        count, n = batch.sampled_rows.shape
        if not count:
            return StepResult(Verdict(batch.sampled_rows, batch.num_drafts), None)
        logits = self.model.logits(hidden[batch.sampled_rows.flatten()])
        scores = None
        if self.tp.rank == 0:
            logits = logits.view(count, n, -1)
            positions = batch.positions[batch.sampled_rows[:, 0]] + 1
            verdict = self.sampler.verify(
                logits, batch.slot_ids, positions, batch.drafts, batch.num_drafts, needs, masks
            )
            if Needs.SCORES in needs:
                scores = score_tokens(logits, verdict.tokens)
            decided = torch.cat((verdict.tokens, verdict.counts[:, None]), dim=1)
        else:
            decided = torch.empty(count, n + 1, dtype=torch.int64, device=self.device)
        self.tp.broadcast(decided)
        return StepResult(Verdict(decided[:, :n], decided[:, n]), scores)

    def _make_graphs(self) -> DecodeGraphs | None:
        """Captured decode steps, where the device and the backends can."""
        if self.device.type != "cuda" or not self.config.cuda_graphs:
            return None
        dense = self.model_config.indexer.top_k if self.model_config.indexer is not None else None
        masks = None if self.grammars is None else self.grammars.buffer
        halves = DecodeHalves(self.forward, self.conclude, masks)
        return DecodeGraphs(halves, self.config, self.tables.padding, self.tables.max_length, dense, self.device)

    def _make_grammars(self) -> Grammars | None:
        if self.tp.rank != 0:
            return None
        vocab_size = self.model_config.vocab_size
        compiler = GrammarCompiler(self.config.model, vocab_size, self.model_config.eos_token_ids)
        rows = 1 + self.config.num_draft_tokens
        return Grammars(compiler, self.config.max_num_seqs, rows, vocab_size, self.device)

    def _sparse_context(self) -> SparseContext | None:
        if (indexer := self.model_config.indexer) is None:
            return None
        config = self.config
        return SparseContext(
            make_topk_backend(
                config.topk_backend, indexer.top_k, config.topk_tie_break, config.topk_deterministic, self.device
            ),
            config.topk_exchange,
            make_index_key_format(config.index_cache_dtype, indexer.head_dim, self.dtype),
        )

    def _own_tensors(self, num_mtp: int) -> frozenset[str]:
        """Embeddings and heads that the checkpoint holds for MTP modules and that differ from the model's."""
        if self.config.load_format == "dummy":
            return frozenset()
        rows = self.tp.shard(0, self.model_config.vocab_size)
        embedding = "model.embed_tokens.weight"
        head = embedding if self.model_config.tie_word_embeddings else "lm_head.weight"
        return frozenset(
            copy
            for k in range(num_mtp)
            for copy, original in zip(mtp_copies(self.model_config, k), (embedding, head), strict=True)
            if differs(self.config.model, copy, original, rows)
        )

    def _free_memory(self) -> int | None:
        """Bytes the cache may take on a GPU: the fraction of the card, less weights and the peak of a widest step."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        self._rehearse()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        return int(total * self.config.kv_cache_memory_fraction) - peak - others

    @torch.inference_mode()
    def _rehearse(self) -> None:
        """Prefill of as many rows as a step may have, then of ever fewer, into a throw-away cache, and logits of all
        that can be sampled: what it takes at most, and every kernel that depends on the number of rows compiled before
        the first request."""
        rows = widest = min(self.config.max_num_batched_tokens, self.max_model_len)
        caches = self.layout.allocate(-(-widest // PAGE_SIZE), self.device)
        while rows:
            hidden = self._prefill(rows, caches)
            self.model.logits(hidden[: self.config.max_num_seqs * (1 + self.config.num_draft_tokens)])
            rows //= 2

    def _prefill(self, rows: int, caches: list[LayerCache]) -> torch.Tensor:
        """One prompt of `rows` tokens; with sparse attention once more as a chunk of a long one."""
        ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        slots = torch.arange(rows, device=self.device)
        chunk = PrefillRows([0, rows], [0, rows], slots)
        hidden = self.model(ids, slots, caches, AttentionBatch(slots, (), chunk))
        if self.model_config.indexer is not None:
            table = torch.arange(-(-rows // PAGE_SIZE), dtype=torch.int32, device=self.device)[None]
            long = PagedRows(table, (slots + 1).int(), rows, rows, start=0)
            self.model(ids, slots, caches, AttentionBatch(slots, (long,)))
        return hidden


def compute_dtype(setting: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The compute type: `auto` is float32 on a CPU, and on a GPU the checkpoint's (float16 ones run in bfloat16)."""
    if setting == "auto":
        setting = "float32" if device.type == "cpu" or checkpoint == "float32" else "bfloat16"
    return torch.float32 if setting == "float32" else torch.bfloat16

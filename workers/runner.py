"""One rank's step: apply the plan, run the model, sample, advance."""

import time
from collections.abc import Callable

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
from workers.loader import differs, load_weights
from workers.prompt_scores import PromptScorer
from workers.sampler import Sampler, Verdict
from workers.step import StepOutput, StepPlan, TokenLogprobs
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
                config.max_num_batched_tokens,
                device,
            ),
            make_moe_backend(config.moe_backend, device),
            make_ops(config.kernel_backend, device),
            self._sparse_context(),
        )
        self.backends = f"attention {context.attention.name}, experts {context.moe.name}"
        if context.sparse is not None:
            self.backends += f", top-k {context.sparse.topk.name} ({context.sparse.exchange})"
        num_mtp = min(config.num_draft_tokens, model_config.mtp.num_modules) if model_config.mtp else 0
        positions = max_model_len + overshoot(config.num_draft_tokens)
        self.model = Decoder(context, model_config, positions, num_mtp, self._own_tensors(num_mtp))
        load_weights(self.model, config.model, progress)
        keys = context.sparse.keys if context.sparse is not None else None
        self.layout = CacheLayout.of(model_config, num_mtp, self.dtype, keys)
        self.sampler = Sampler(
            config.max_num_seqs,
            model_config.vocab_size,
            device,
            max_drafts=config.num_draft_tokens if tp.rank == 0 else 0,  # the others are told
            repeatable=config.seed is not None,
        )
        self.num_pages = pages_that_fit(config, self._free_memory(), self.layout.page_bytes, max_model_len)
        self.caches: list[LayerCache] = []
        self.scorer = PromptScorer(model_config.vocab_size)

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

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one plan on this rank. Every rank must run the same plans in the same order."""
        begin = time.perf_counter()
        self._admit(plan)
        batch = self.tables.batch(plan)
        hidden = self.model(batch.token_ids, batch.positions, self.caches, batch.attention)
        verdict, logprobs = self._verify(hidden, batch)
        scores = self.scorer.score(plan, batch, hidden, self.model.logits)
        self.tables.advance(plan, batch, *verdict)
        if self.drafter is not None:
            self.drafter.run(plan, batch, hidden, verdict, self.caches[len(self.model_config.layers) :])
        counts = verdict.counts.tolist()
        self.tables.settle(plan, counts)
        tokens = [row[:count] for row, count in zip(verdict.tokens.tolist(), counts, strict=True)]
        return StepOutput(plan.step, tokens, logprobs, scores, time.perf_counter() - begin)

    def _admit(self, plan: StepPlan) -> None:
        self.tables.apply(plan)
        for slot in plan.freed:
            self.scorer.release(slot)
        for admission in plan.admitted:
            self.scorer.admit(admission)
            if self.tp.rank == 0:
                self.sampler.admit(admission)

    def _verify(self, hidden: torch.Tensor, batch: StepBatch) -> tuple[Verdict, list[list[TokenLogprobs]]]:
        """Rank 0 decides; the others are told."""
        count, n = batch.sampled_rows.shape
        decided = torch.zeros(count, n + 1, dtype=torch.int64, device=self.device)
        if not count:
            return Verdict(decided[:, :n], decided[:, n]), []
        logits = self.model.logits(hidden[batch.sampled_rows.flatten()])
        logprobs: list[list[TokenLogprobs]] = []
        if self.tp.rank == 0:
            logits = logits.view(count, n, -1)
            positions = batch.positions[batch.sampled_rows[:, 0]] + 1
            verdict = self.sampler.verify(logits, batch.slots, positions, batch.drafts, batch.num_drafts)
            logprobs = self.sampler.logprobs(logits, batch.slots, verdict)
            decided = torch.cat((verdict.tokens, verdict.counts[:, None]), dim=1)
        self.tp.broadcast(decided)
        return Verdict(decided[:, :n], decided[:, n]), logprobs

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
        self._widest_step()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        others = total - free - torch.cuda.memory_reserved(self.device)
        return int(total * self.config.kv_cache_memory_fraction) - peak - others

    @torch.inference_mode()
    def _widest_step(self) -> None:
        """A prefill of as many rows as a step may have, into a throw-away cache, and logits of all that can be
        sampled; with sparse attention once more as one long chunk."""
        rows = min(self.config.max_num_batched_tokens, self.max_model_len)
        caches = self.layout.allocate(-(-rows // PAGE_SIZE), self.device)
        ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        slots = torch.arange(rows, device=self.device)
        hidden = self.model(ids, slots, caches, AttentionBatch(slots, (), PrefillRows([0, rows], [0, rows], slots)))
        self.model.logits(hidden[: self.config.max_num_seqs * (1 + self.config.num_draft_tokens)])
        if self.model_config.indexer is not None:
            table = torch.arange(-(-rows // PAGE_SIZE), dtype=torch.int32, device=self.device)[None]
            chunk = PagedRows(table, (slots + 1).int(), rows, rows, start=0)
            self.model(ids, slots, caches, AttentionBatch(slots, (chunk,)))


def compute_dtype(setting: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The compute type: `auto` is float32 on a CPU, and on a GPU the checkpoint's (float16 ones run in bfloat16)."""
    if setting == "auto":
        setting = "float32" if device.type == "cpu" or checkpoint == "float32" else "bfloat16"
    return torch.float32 if setting == "float32" else torch.bfloat16

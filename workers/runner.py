"""One rank's step: apply the plan, run the model, sample, advance."""

import time
from collections.abc import Callable

import torch

from configs.engine import EngineConfig
from configs.model import ModelConfig
from layers.attention.backend import AttentionBatch, PrefillRows, make_attention_backend
from layers.context import LayerContext
from layers.models.decoder import Decoder
from layers.moe.backend import make_moe_backend
from layers.parallel import TensorParallel
from workers import cache
from workers.loader import load_weights
from workers.prompt_scores import PromptScorer
from workers.sampler import Sampler
from workers.step import StepOutput, StepPlan, TokenLogprobs
from workers.tables import SlotTables, StepBatch


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
            make_attention_backend(config.attention_backend),
            make_moe_backend(config.moe_backend),
        )
        self.backends = f"attention {context.attention.name}, experts {context.moe.name}"
        self.model = Decoder(context, model_config, max_model_len)
        load_weights(self.model, config.model, progress)
        self.page_bytes = cache.page_bytes(model_config, self.dtype)
        self.num_pages = cache.pages_that_fit(config, self._free_memory(), self.page_bytes, max_model_len)
        self.caches: list[torch.Tensor] = []
        self.tables = SlotTables(config.max_num_seqs, max_model_len, device)
        self.sampler = Sampler(config.max_num_seqs, model_config.vocab_size, device)
        self.scorer = PromptScorer(model_config.vocab_size)

    def start_cache(self, num_pages: int) -> None:
        """Allocates the pages that all ranks agreed on."""
        self.caches = cache.allocate(self.model_config, num_pages, self.dtype, self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        """Runs one plan on this rank. Every rank must run the same plans in the same order."""
        begin = time.perf_counter()
        self._admit(plan)
        batch = self.tables.batch(plan)
        hidden = self.model(batch.token_ids, batch.positions, self.caches, batch.attention)
        tokens, logprobs = self._sample(hidden, batch)
        scores = self.scorer.score(plan, batch, hidden, self.model.logits)
        self.tables.advance(plan, batch, tokens)
        values = tokens.tolist()
        return StepOutput(plan.step, [[t] for t in values], logprobs, scores, time.perf_counter() - begin)

    def _admit(self, plan: StepPlan) -> None:
        self.tables.apply(plan)
        for slot in plan.freed:
            self.scorer.release(slot)
        for admission in plan.admitted:
            self.scorer.admit(admission)
            if self.tp.rank == 0:
                self.sampler.admit(admission)

    def _sample(self, hidden: torch.Tensor, batch: StepBatch) -> tuple[torch.Tensor, list[list[TokenLogprobs]]]:
        """Rank 0 decides; the others are told."""
        if not batch.sampled_rows:
            return torch.empty(0, dtype=torch.int64, device=self.device), []
        rows = torch.tensor(batch.sampled_rows, device=self.device)
        logits = self.model.logits(hidden[rows])
        if self.tp.rank == 0:
            tokens, logprobs = self.sampler.sample(logits, batch.sampled_slots, batch.positions[rows] + 1)
        else:
            tokens, logprobs = torch.empty(len(batch.sampled_rows), dtype=torch.int64, device=self.device), []
        return self.tp.broadcast(tokens), logprobs

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
        """A prefill of as many rows as a step may have, into a throw-away cache."""
        rows = min(self.config.max_num_batched_tokens, self.max_model_len)
        pages = -(-rows // cache.PAGE_SIZE)
        caches = cache.allocate(self.model_config, pages, self.dtype, self.device)
        ids = torch.zeros(rows, dtype=torch.int64, device=self.device)
        slots = torch.arange(rows, device=self.device)
        batch = AttentionBatch(slots, 0, None, PrefillRows([0, rows], [0, rows], slots))
        hidden = self.model(ids, slots, caches, batch)
        self.model.logits(hidden[: self.config.max_num_seqs])


def compute_dtype(setting: str, checkpoint: str, device: torch.device) -> torch.dtype:
    """The compute type: `auto` is float32 on a CPU, and on a GPU the checkpoint's (float16 ones run in bfloat16)."""
    if setting == "auto":
        setting = "float32" if device.type == "cpu" or checkpoint == "float32" else "bfloat16"
    return torch.float32 if setting == "float32" else torch.bfloat16

"""The least time that a step can take on a card, by bytes moved and by arithmetic, from a model's config.json.

    python benchmarks/roofline.py v2-lite --batch 1 64 --context 1024 [--drafts 0 1] [--prefill] [--tp 1] [--json FILE]

Weights and cache are bfloat16 (router float32); a part takes the longer of bytes / bandwidth and operations / peak, and
parts follow one another. Experts: of E, b rows that each choose k at random touch E (1 - (1 - k / E)^b). What a step
leaves in caches, activations and collectives is not counted. Ranks share heads, widths, vocabulary and experts evenly:
a rank reads as much whether experts are split by width or, with ep_size, by number. It is not known where the
selections of a sequence's rows overlap: they count as apart, though never as more than the whole context.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from presets import PRESETS

from configs.base import ConfigError
from configs.hf import load_model_config
from configs.model import LayerSpec, ModelConfig

BYTES = 2


class Card(NamedTuple):
    """What a GPU can do at best."""

    bandwidth: float = 4.8e12  # bytes a second: H200, data sheet
    flops: float = 989e12  # bfloat16, dense: H200, data sheet


class Step(NamedTuple):
    """`batch` sequences of `context` positions, each with `rows` rows; paged rows attend to latents (absorbed), a
    prefill's to expanded keys and values."""

    batch: int
    context: int
    rows: int = 1
    is_prefill: bool = False

    @property
    def total(self) -> int:
        return self.batch * self.rows

    def pairs(self, limit: float) -> float:
        """Rows x positions that each attends to: all it sees, but at most `limit`. A prefill's row i sees i."""
        if not self.is_prefill:
            return self.total * min(self.context, limit)
        full = min(self.context, limit)
        return self.batch * (full * (full + 1) / 2 + (self.context - full) * full)


class Part(NamedTuple):
    """Bytes read and operations done by one part of a step."""

    name: str
    bytes: float
    flops: float

    def seconds(self, card: Card) -> float:
        return max(self.bytes / card.bandwidth, self.flops / card.flops)


def matmul(name: str, weights: float, rows: float, width: int = BYTES) -> Part:
    """A matrix of so many weights, read once, over rows."""
    return Part(name, weights * width, 2 * weights * rows)


def step_parts(config: ModelConfig, step: Step, drafts: int = 0, tp: int = 1) -> list[Part]:
    """A step of this rank: the model over all rows, the head over those that are sampled, then what drafts take.

    SystemExit with a sentence for a step that cannot be.
    """
    _check(config, step, drafts, tp)
    vocab = config.vocab_size * config.hidden_size / tp
    parts = [part for layer in config.layers for part in _layer_parts(config, layer, step, tp)]
    parts.append(matmul("head", vocab, step.batch if step.is_prefill else step.total))
    return parts + [Part("MTP", part.bytes, part.flops) for part in _draft_parts(config, step, drafts, tp)]


def _check(config: ModelConfig, step: Step, drafts: int, tp: int) -> None:
    for name, value, least in (
        ("batch", step.batch, 1),
        ("context", step.context, 1),
        ("drafts", drafts, 0),
        ("tp", tp, 1),
    ):
        if value < least:
            raise SystemExit(f"--{name} {value}: give {least} or more")
    try:
        config.check_drafts(drafts)
        try:
            config.check_parallel(tp, 1)
        except ConfigError:
            if config.moe is None:
                raise
            config.check_parallel(tp, tp)  # experts that cannot be split may be dealt out
    except ConfigError as error:
        raise SystemExit(str(error)) from None


def _draft_parts(config: ModelConfig, step: Step, drafts: int, tp: int) -> Iterator[Part]:
    """What `workers/drafter.py` has to do. Every module joins all rows once; the last one then only stores them, and
    runs its layer over one row a sequence for each draft. Where there are several modules, the ones before it run
    theirs over all rows, and each drafts one token."""
    if not drafts or config.mtp is None:
        return
    mtp, hidden, ends = config.mtp, config.hidden_size, step._replace(rows=1, is_prefill=False)
    for module in range(mtp.num_modules):
        is_last = module == mtp.num_modules - 1
        yield matmul("", 2 * hidden**2, step.total)
        if is_last:
            if step.total > step.batch:
                # The weights are those that the sequences' own rows read, if there is a draft to make with it.
                for part in _entry_parts(config, mtp.layer, step):
                    yield part._replace(bytes=0 if module < drafts else part.bytes)
            if module < drafts:
                yield from _layer_parts(config, mtp.layer, ends, tp)
        else:
            yield from _layer_parts(config, mtp.layer, step, tp)
    again = mtp.layer
    if mtp.share_selection and again.attention == "dsa_full":
        again = LayerSpec(attention="dsa_shared", feed_forward=again.feed_forward)
    for _ in range(drafts - mtp.num_modules):  # a single module goes on from where it is
        yield matmul("", 2 * hidden**2, ends.total)
        yield from _layer_parts(config, again, ends, tp)
    for _ in range(drafts):
        yield matmul("", config.vocab_size * hidden / tp, ends.total)


def _entry_parts(config: ModelConfig, layer: LayerSpec, step: Step) -> Iterator[Part]:
    """What makes the rows' cache entries."""
    yield matmul("projections", config.hidden_size * config.attention.cache_dim, step.total)
    if layer.attention == "dsa_full":
        yield _key_projection(config, step)


def _key_projection(config: ModelConfig, step: Step) -> Part:
    assert config.indexer is not None
    return matmul("indexer", config.hidden_size * config.indexer.head_dim, step.total)


def _layer_parts(config: ModelConfig, layer: LayerSpec, step: Step, tp: int) -> Iterator[Part]:
    yield from _attention_parts(config, layer, step, tp)
    hidden, rows = config.hidden_size, step.total
    if layer.feed_forward == "dense" or config.moe is None:
        yield matmul("dense MLP", 3 * hidden * config.intermediate_size / tp, rows)
        return
    router, expert = config.moe.router, 3 * hidden * config.moe.intermediate_size
    yield matmul("router", hidden * router.num_experts, rows, width=4)
    touched = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** rows)
    yield Part("experts", touched * expert / tp * BYTES, 2 * rows * router.top_k * expert / tp)
    yield matmul("shared experts", 3 * hidden * config.moe.shared_intermediate_size / tp, rows)


def _attention_parts(config: ModelConfig, layer: LayerSpec, step: Step, tp: int) -> Iterator[Part]:
    mla, hidden, rows = config.attention, config.hidden_size, step.total
    heads = mla.num_heads / tp
    query = mla.q_lora_rank or hidden
    down = hidden * ((mla.q_lora_rank or 0) + mla.cache_dim)
    up = heads * (query * mla.qk_head_dim + mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim))
    yield matmul("projections", down + up + heads * mla.v_head_dim * hidden, rows)
    limit = float("inf")
    if layer.attention != "mla" and config.indexer is not None:
        limit = config.indexer.top_k
    is_sparse = step.context > limit
    if layer.attention == "dsa_full":
        yield _key_projection(config, step)
        if is_sparse:
            yield from _score_parts(config, step)
    if step.is_prefill and not is_sparse:
        yield Part("attention", 0, 2 * step.pairs(limit) * heads * (mla.qk_head_dim + mla.v_head_dim))
        return
    # Each position is read once for all rows of its sequence, and one that no row selected is not read.
    read = step.batch * min(step.context, step.rows * min(step.context, limit))
    width = mla.cache_dim + mla.kv_lora_rank
    yield Part("attention", read * mla.cache_dim * BYTES, 2 * step.pairs(limit) * heads * width)


def _score_parts(config: ModelConfig, step: Step) -> Iterator[Part]:
    """Scores of the rows that see more than the indexer selects; the others take all they see. Every rank scores."""
    indexer, rows, scored = config.indexer, step.total, step.pairs(float("inf"))
    assert indexer is not None
    if step.is_prefill:
        rows -= step.batch * indexer.top_k
        scored -= step.batch * indexer.top_k * (indexer.top_k + 1) / 2
    query = config.attention.q_lora_rank or config.hidden_size
    channels = indexer.num_heads * indexer.head_dim
    yield matmul("indexer", query * channels + config.hidden_size * indexer.num_heads, rows)
    yield Part("indexer", step.batch * step.context * indexer.head_dim * BYTES, 2 * scored * channels)


def floor_seconds(parts: list[Part], card: Card) -> float:
    return sum(part.seconds(card) for part in parts)


def config_of(name: str) -> ModelConfig:
    """Of a preset, or of a checkpoint's folder. SystemExit with a sentence if it is neither."""
    if name not in PRESETS:
        if not (Path(name) / "config.json").is_file():
            raise SystemExit(f"{name} is neither a folder with a config.json nor one of {', '.join(PRESETS)}")
        try:
            return load_model_config(Path(name))
        except ConfigError as error:
            raise SystemExit(str(error)) from None
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(PRESETS[name]))
        return load_model_config(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"a checkpoint's folder, or {', '.join(PRESETS)}")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[1024])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0])
    parser.add_argument("--prefill", action="store_true", help="whole prompts of --context tokens in place of decoding")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--bandwidth", type=float, default=Card().bandwidth / 1e12, help="TB/s")
    parser.add_argument("--flops", type=float, default=Card().flops / 1e12, help="TFLOP/s in bfloat16")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    config, card = config_of(args.model), Card(args.bandwidth * 1e12, args.flops * 1e12)
    figures = []
    for batch in args.batch:
        for context in args.context:
            for drafts in args.drafts:
                rows = context if args.prefill else 1 + drafts
                parts = step_parts(config, Step(batch, context, rows, args.prefill), drafts, args.tp)
                figures.append(_figure(batch, context, drafts, parts, card))
    names = list(dict.fromkeys(name for figure in figures for name in figure["parts"]))
    print("batch | context | drafts | floor, ms | GB | TFLOP | " + " | ".join(f"{name}, ms" for name in names))
    print(" | ".join(["---"] * (6 + len(names))))
    for f in figures:
        cells = [f["batch"], f["context"], f["drafts"], f"{f['ms']:.3f}", f"{f['gb']:.2f}", f"{f['tflop']:.3f}"]
        print(" | ".join(map(str, [*cells, *(f"{f['parts'].get(name, 0):.3f}" for name in names)])))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2))


def _figure(batch: int, context: int, drafts: int, parts: list[Part], card: Card) -> dict:
    by_name: dict[str, float] = {}
    for part in parts:
        by_name[part.name] = by_name.get(part.name, 0) + part.seconds(card) * 1e3
    return {
        "batch": batch,
        "context": context,
        "drafts": drafts,
        "ms": floor_seconds(parts, card) * 1e3,
        "gb": sum(part.bytes for part in parts) / 1e9,
        "tflop": sum(part.flops for part in parts) / 1e12,
        "parts": by_name,
    }


if __name__ == "__main__":
    main()

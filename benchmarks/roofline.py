"""The least time that a step can take on a card, by bytes moved and by arithmetic, from a model's config.json.

    python benchmarks/roofline.py v2-lite --batch 1 64 --context 1024 [--drafts 0 1] [--prefill] [--tp 1] [--json FILE]

Weights and cache are bfloat16 (router float32); a part takes the longer of bytes / bandwidth and operations / peak, and
parts follow one another. Experts: of E, b rows that each choose k at random touch E (1 - (1 - k / E)^b). What a step
leaves in caches, activations and collectives is not counted. Ranks share heads, widths, vocabulary and experts evenly.
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
    """A step of this rank: the model over all rows, the head over those that are sampled, and `drafts` passes of the
    MTP module, the first over all rows, the others over one a sequence."""
    vocab = config.vocab_size * config.hidden_size / tp
    sampled = step.batch if step.is_prefill else step.total
    parts = [part for layer in config.layers for part in _layer_parts(config, layer, step, tp)]
    parts.append(matmul("head", vocab, sampled))
    if drafts and config.mtp is None:
        raise SystemExit("this model has no MTP module: use --drafts 0")
    for i in range(drafts if config.mtp is not None else 0):
        assert config.mtp is not None
        again = step if i == 0 else Step(step.batch, step.context)
        join = matmul("", 2 * config.hidden_size**2, again.total)
        layer = [join, *_layer_parts(config, config.mtp.layer, again, tp), matmul("", vocab, step.batch)]
        parts += [Part("MTP", part.bytes, part.flops) for part in layer]
    return parts


def _layer_parts(config: ModelConfig, layer: LayerSpec, step: Step, tp: int) -> Iterator[Part]:
    mla, hidden, rows = config.attention, config.hidden_size, step.total
    heads = mla.num_heads / tp
    query = mla.q_lora_rank or hidden
    down = hidden * ((mla.q_lora_rank or 0) + mla.cache_dim)
    up = heads * (query * mla.qk_head_dim + mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim))
    yield matmul("projections", down + up + heads * mla.v_head_dim * hidden, rows)
    seen = float(step.context)
    if layer.attention != "mla" and config.indexer is not None:
        indexer = config.indexer
        if layer.attention == "dsa_full":
            channels = indexer.num_heads * indexer.head_dim
            yield matmul("indexer", query * channels + hidden * (indexer.head_dim + indexer.num_heads), rows)
            keys = step.batch * step.context * indexer.head_dim
            pairs = rows * step.context * (0.5 if step.is_prefill else 1)
            yield Part("indexer", keys * BYTES, 2 * pairs * channels)
        seen = min(seen, indexer.top_k)
    if step.is_prefill and seen == step.context:
        pairs = rows * step.context / 2
        yield Part("attention", 0, 2 * pairs * heads * (mla.qk_head_dim + mla.v_head_dim))
    else:
        # Rows of a sequence that attend to everything share what is read; a selection is each row's own.
        readers = step.batch if seen == step.context else rows
        width = mla.cache_dim + mla.kv_lora_rank
        yield Part("attention", readers * seen * mla.cache_dim * BYTES, 2 * rows * seen * heads * width)
    if layer.feed_forward == "dense" or config.moe is None:
        yield matmul("dense MLP", 3 * hidden * config.intermediate_size / tp, rows)
        return
    router, expert = config.moe.router, 3 * hidden * config.moe.intermediate_size
    yield matmul("router", hidden * router.num_experts, rows, width=4)
    touched = router.num_experts * (1 - (1 - router.top_k / router.num_experts) ** rows)
    yield Part("experts", touched * expert / tp * BYTES, 2 * rows * router.top_k * expert / tp)
    yield matmul("shared experts", 3 * hidden * config.moe.shared_intermediate_size / tp, rows)


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

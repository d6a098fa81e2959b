"""Tiny random checkpoints with the outputs that transformers computes for them.

`tests/data` holds a few (see `tests/data/subset.py`). The full set is used too where it exists: in the folder that
SHOAL_ORACLES names, or in `../shared/oracles` beside the repository.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import REPOSITORY

SHIPPED = REPOSITORY / "tests" / "data"


@dataclass(frozen=True)
class RouterChoice:
    """What one MoE layer's router chose for every position; S = positions, k = experts per token."""

    experts: torch.Tensor  # [S, k] int32, ascending
    weights: torch.Tensor  # [S, k] fp32, parallel to experts


@dataclass(frozen=True)
class IndexerChoice:
    """What one layer's indexer selected for every position; S = positions, k = index_topk."""

    positions: torch.Tensor  # [S, k] int32, ascending, -1 = none
    gaps: torch.Tensor  # [S] fp32, k-th less (k+1)-th score: where it is tiny, another position is no error


@dataclass(frozen=True)
class MTPOutput:
    """What one MTP module gives, teacher-forced: row t sees hidden state t and token t + 1 + module."""

    logits: torch.Tensor  # [S - 1 - module, V] fp32
    hidden: torch.Tensor | None  # [S - 1 - module, H] fp32, normed; not given for every prompt


@dataclass(frozen=True)
class PromptReference:
    """One prompt and its greedy continuation in float32; S = both together, V = vocabulary."""

    prompt: list[int]
    greedy: list[int]
    margins: list[float]  # of each greedy token: its logit less the runner-up's
    logits: torch.Tensor  # [S, V] fp32, teacher-forced
    logits_bf16: torch.Tensor | None  # [S, V] fp32 values of a bfloat16 run; not given for every prompt
    routers: dict[int, RouterChoice]  # by layer
    indexers: dict[int, IndexerChoice]  # by layer
    mtp: list[MTPOutput]  # by module
    chain: list[int]  # the token after all of `ids`, then drafts made with module 0 alone; empty without modules

    @property
    def ids(self) -> list[int]:
        """Prompt and continuation: the S tokens of `logits`' rows."""
        return self.prompt + self.greedy

    def num_decided(self, tolerance: float) -> int:
        """Greedy tokens before the first whose margin is within `tolerance`, where either of two is right."""
        return next((i for i, margin in enumerate(self.margins) if margin <= tolerance), len(self.margins))


@dataclass(frozen=True)
class Reference:
    """The outputs of one oracle."""

    model_type: str
    prompts: list[PromptReference]


FAMILY = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa")


def oracle_folders(*model_types: str, quantised: bool = False) -> list[Path]:
    """Folders of the oracles of these model types (the whole family when none is given), sorted by name; those whose
    weights are quantised, or the others."""
    full_set = Path(os.environ.get("SHOAL_ORACLES", REPOSITORY.parent / "shared" / "oracles"))
    by_name = {
        path.parent.name: path.parent for root in (SHIPPED, full_set) for path in root.glob("tiny-*/config.json")
    }
    return [folder for _, folder in sorted(by_name.items()) if _is_wanted(folder, model_types or FAMILY, quantised)]


def _is_wanted(folder: Path, model_types: tuple[str, ...], quantised: bool) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return ("quantization_config" in config) == quantised and config["model_type"] in model_types


def load_reference(folder: Path) -> Reference:
    """Reads reference.json and reference.safetensors of an oracle."""
    facts = json.loads((folder / "reference.json").read_text())
    tensors = load_file(folder / "reference.safetensors")
    prompts = [_prompt_reference(entry, f"p{i}.", tensors) for i, entry in enumerate(facts["prompts"])]
    return Reference(model_type=facts["model_type"], prompts=prompts)


def _prompt_reference(entry: dict, prefix: str, tensors: dict[str, torch.Tensor]) -> PromptReference:
    mtp = []
    while (logits := tensors.get(f"{prefix}mtp{len(mtp)}.logits")) is not None:
        mtp.append(MTPOutput(logits, tensors.get(f"{prefix}mtp{len(mtp)}.hidden")))
    return PromptReference(
        prompt=entry["prompt"],
        greedy=entry["greedy_fp32"],
        margins=entry["margins"],
        logits=tensors[f"{prefix}logits"],
        logits_bf16=tensors.get(f"{prefix}logits_bf16"),
        routers={
            layer: RouterChoice(tensors[f"{prefix}router.{layer}.idx"], tensors[f"{prefix}router.{layer}.w"])
            for layer in _layers(tensors, f"{prefix}router.", ".idx")
        },
        indexers={
            layer: IndexerChoice(tensors[f"{prefix}topk.{layer}"], tensors[f"{prefix}topk_gap.{layer}"])
            for layer in _layers(tensors, f"{prefix}topk.", "")
        },
        mtp=mtp,
        chain=tensors[f"{prefix}mtp_chain"].tolist() if mtp else [],
    )


def _layers(tensors: dict[str, torch.Tensor], start: str, end: str) -> list[int]:
    """The layers that have a tensor of this name."""
    return sorted(
        int(name.removeprefix(start).removesuffix(end))
        for name in tensors
        if name.startswith(start) and name.endswith(end)
    )

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
class PromptReference:
    """One prompt and its greedy continuation in float32; S = both together, V = vocabulary."""

    prompt: list[int]
    greedy: list[int]
    margins: list[float]  # of each greedy token: its logit less the runner-up's
    logits: torch.Tensor  # [S, V] fp32, teacher-forced
    logits_bf16: torch.Tensor | None  # [S, V] fp32 values of a bfloat16 run; not given for every prompt
    routers: dict[int, RouterChoice]  # by layer

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


def oracle_folders(*model_types: str) -> list[Path]:
    """Folders of the unquantised oracles of these model types (all when none is given), sorted by name."""
    full_set = Path(os.environ.get("SHOAL_ORACLES", REPOSITORY.parent / "shared" / "oracles"))
    by_name = {
        path.parent.name: path.parent for root in (SHIPPED, full_set) for path in root.glob("tiny-*/config.json")
    }
    return [folder for _, folder in sorted(by_name.items()) if _is_wanted(folder, model_types)]


def _is_wanted(folder: Path, model_types: tuple[str, ...]) -> bool:
    config = json.loads((folder / "config.json").read_text())
    return "quantization_config" not in config and (not model_types or config["model_type"] in model_types)


def load_reference(folder: Path) -> Reference:
    """Reads reference.json and reference.safetensors of an oracle."""
    facts = json.loads((folder / "reference.json").read_text())
    tensors = load_file(folder / "reference.safetensors")
    prompts = [_prompt_reference(entry, f"p{i}.", tensors) for i, entry in enumerate(facts["prompts"])]
    return Reference(model_type=facts["model_type"], prompts=prompts)


def _prompt_reference(entry: dict, prefix: str, tensors: dict[str, torch.Tensor]) -> PromptReference:
    router, chosen = f"{prefix}router.", ".idx"
    layers = sorted(
        int(name.removeprefix(router).removesuffix(chosen))
        for name in tensors
        if name.startswith(router) and name.endswith(chosen)
    )
    return PromptReference(
        prompt=entry["prompt"],
        greedy=entry["greedy_fp32"],
        margins=entry["margins"],
        logits=tensors[f"{prefix}logits"],
        logits_bf16=tensors.get(f"{prefix}logits_bf16"),
        routers={
            layer: RouterChoice(experts=tensors[f"{router}{layer}.idx"], weights=tensors[f"{router}{layer}.w"])
            for layer in layers
        },
    )

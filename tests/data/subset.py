"""Copies oracles into this folder, as small as the tests that must run anywhere allow.

    python tests/data/subset.py ORACLES [NAME ...]

An oracle is a folder `tiny-<name>` with a random checkpoint laid out as the released ones are, and the outputs that
transformers computes for it (`reference.json`, `reference.safetensors`; `tests/oracles.py` says what is in them).
Hidden states are left out, and for most the longest prompt and the bf16 logits. `deepseek_v32-small-fp8` (made with
seed 3) is `deepseek_v32-yarn-fp8` with 2 layers, 4 experts in 2 groups (1 and 2 of them chosen) and 160 tokens.
"""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

# How many prompts are kept of each, and what else is left out.
NAMES = {
    "deepseek_v2-group": (2, (".hidden.", ".logits_bf16")),
    "deepseek_v3-yarn": (2, (".hidden.", "mtp0.hidden")),
    "deepseek_v32-small-fp8": (3, (".hidden.", ".logits_bf16")),
    "glm4_moe_lite-noqlora": (2, (".hidden.", ".logits_bf16")),
}


def copy_oracle(source: Path, target: Path, num_prompts: int, dropped: tuple[str, ...]) -> int:
    """Copies one oracle with its first prompts, without the dropped tensors; returns the bytes written."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if not path.name.startswith("reference."):
            shutil.copyfile(path, target / path.name)
    facts = json.loads((source / "reference.json").read_text())
    facts["prompts"] = facts["prompts"][:num_prompts]
    (target / "reference.json").write_text(json.dumps(facts))
    tensors = load_file(source / "reference.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if int(name[1 : name.index(".")]) < num_prompts and not any(part in name for part in dropped)
    }
    save_file(kept, target / "reference.safetensors")
    return sum(path.stat().st_size for path in target.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracles", type=Path, help="folder that holds the tiny-* folders")
    parser.add_argument("names", nargs="*", default=list(NAMES), help=f"default: {' '.join(NAMES)}")
    args = parser.parse_args()
    for name in args.names:
        size = copy_oracle(args.oracles / f"tiny-{name}", Path(__file__).parent / f"tiny-{name}", *NAMES[name])
        print(f"tiny-{name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

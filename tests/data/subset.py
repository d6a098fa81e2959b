"""Copies oracles into this folder, as small as the tests that must run anywhere allow.

    python tests/data/subset.py ORACLES [NAME ...]

An oracle is a folder `tiny-<name>` with a random bf16 checkpoint laid out as the released ones are, and the outputs
that transformers computes for it (`reference.json`, `reference.safetensors`; `tests/oracles.py` says what is in them).
Everything is kept but the tensors of which no test here asks: hidden states and the MTP module's outputs.
"""

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

NAMES = ("deepseek_v2-group", "deepseek_v3-yarn", "glm4_moe_lite-noqlora")
DROPPED = (".hidden.", ".mtp")


def copy_oracle(source: Path, target: Path) -> int:
    """Copies one oracle without the dropped tensors; returns the bytes written."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.name != "reference.safetensors":
            shutil.copyfile(path, target / path.name)
    tensors = load_file(source / "reference.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not any(part in name for part in DROPPED)}
    save_file(kept, target / "reference.safetensors")
    return sum(path.stat().st_size for path in target.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracles", type=Path, help="folder that holds the tiny-* folders")
    parser.add_argument("names", nargs="*", default=NAMES, help=f"default: {' '.join(NAMES)}")
    args = parser.parse_args()
    for name in args.names:
        size = copy_oracle(args.oracles / f"tiny-{name}", Path(__file__).parent / f"tiny-{name}")
        print(f"tiny-{name}: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

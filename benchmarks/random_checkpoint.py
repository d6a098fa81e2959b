"""Writes a checkpoint of a preset's shape with random weights and a balanced router, for any engine to load.

    python benchmarks/random_checkpoint.py v2-lite FOLDER [--device cpu]

bfloat16 safetensors of up to 4 GB with an index; the weights are those of `load_format: dummy`, every time the same.
The tokenizer is the shipped model's, filled up with made-up tokens to the preset's vocabulary.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from presets import PRESETS
from safetensors.torch import save_file

from configs.hf import load_model_config
from layers.attention.backend import TorchAttention
from layers.attention.index_cache import make_index_key_format
from layers.attention.topk import TorchTopK
from layers.context import LayerContext, SparseContext
from layers.models.decoder import Decoder
from layers.moe.backend import TorchMoE
from layers.ops import TorchOps
from layers.parallel import TensorParallel
from layers.weights import Weight
from workers.random_weights import draw

SHARD_BYTES = 4 << 30
TOKENIZER = Path(__file__).parent.parent / "examples" / "tiny-model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", choices=PRESETS)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where numbers are drawn; the two draw different ones",
    )
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no GPU here: use cpu")
    write_checkpoint(args.preset, args.folder, torch.device(args.device))


def write_checkpoint(preset: str, folder: Path, device: torch.device) -> None:
    """Does nothing if the folder holds this preset already; SystemExit if it holds something else."""
    config = json.dumps(PRESETS[preset], indent=2)
    if (folder / "model.safetensors.index.json").is_file() and (folder / "config.json").read_text() == config:
        print(f"{folder} holds {preset} already")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise SystemExit(f"{folder} is not empty and does not hold a whole {preset}: empty it or give another folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    write_tokenizer(folder, PRESETS[preset]["vocab_size"])
    shapes = tensor_shapes(folder)
    total = sum(2 * shape.numel() for shape in shapes.values())
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    done = size = 0
    for i, (name, shape) in enumerate(shapes.items()):
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        draw(Weight(name, tensor))
        shard[name] = tensor.cpu()
        size += tensor.nbytes
        if size >= SHARD_BYTES or i == len(shapes) - 1:
            file = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
            done += size
            print(f"{file}: {done / 1e9:.1f} of {total / 1e9:.1f} GB", flush=True)
            shard, size = {}, 0
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Every id has a text; none is written for vocabularies smaller than the shipped model's."""
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first = 1 + max([*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])])
    if first > vocab_size:
        return
    vocab |= {f"\u0120token{i}": i for i in range(first, vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(TOKENIZER / "tokenizer_config.json", folder)


def tensor_shapes(folder: Path) -> dict[str, torch.Size]:
    """Name and shape of every tensor of the model, MTP modules included, that a config.json describes."""
    config = load_model_config(folder)
    meta = torch.device("meta")
    sparse = None
    if config.indexer is not None:
        keys = make_index_key_format("auto", config.indexer.head_dim, torch.bfloat16)
        sparse = SparseContext(TorchTopK("small"), "replicated", keys)
    backends = (TorchAttention(), TorchMoE(), TorchOps())
    context = LayerContext(TensorParallel(), torch.bfloat16, meta, *backends, sparse)
    model = Decoder(context, config, 1, config.mtp.num_modules if config.mtp else 0)
    return {weight.name: weight.target.shape for weight in model.weights()}


if __name__ == "__main__":
    main()

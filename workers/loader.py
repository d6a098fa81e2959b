"""Fills a rank's parameters from safetensors files, reading only the slices the rank owns; quantised tensors are
dequantised on the way (`workers.quantised`)."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from configs.base import ConfigError
from configs.hf import read_json
from layers.models.decoder import Decoder
from layers.parallel import Shard
from layers.weights import Weight
from workers.quantised import SUPPORTED, TensorSlice, logical_shape, read_quantised, scale_names, scaled_weight

# Mapped file pages count as resident memory; a file is mapped anew after this many bytes so that loading a shard
# needs no more host memory than the shard itself and about one GiB.
_REMAP_BYTES = 1 << 30
_COMPARED_ROWS = 1024
_SHOWN = 5
_INDEX = "model.safetensors.index.json"
_FOREIGN = (".weight_packed", ".qweight", ".qzeros", ".scales", ".scale")  # other kinds of quantisation


class CheckpointError(ConfigError):
    """The checkpoint does not fit the model its config.json describes."""


def load_weights(model: Decoder, folder: Path, progress: Callable[[int, int], None]) -> None:
    """Reads every tensor (slice) that `model.weights()` names into its target, casting to the target's dtype.

    `progress(done_bytes, total_bytes)` counts bytes of the rank's own parameters. Raises CheckpointError when a file
    or tensor is missing, misshapen or quantised in an unknown way, when a parameter would stay unfilled, or when the
    checkpoint holds a tensor that the model neither uses nor knowingly skips.
    """
    by_name = {weight.name: weight for weight in model.weights()}
    files = _tensor_files(folder)
    _check_names(model, by_name, files, folder)
    _check_filled(model, by_name)
    by_file: dict[Path, list[Weight]] = defaultdict(list)
    for name, weight in by_name.items():
        by_file[files[name]].append(weight)
    total = sum(_bytes(weight.target) for weight in by_name.values())
    done = 0
    for path, weights in by_file.items():
        for weight, tensor in _read(path, weights, files):
            weight.target.copy_(tensor)
            done += _bytes(weight.target)
            progress(done, total)


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor: from the index if there is one, else from the single file's header."""
    index = folder / _INDEX
    if index.is_file():
        files = {name: folder / file for name, file in _weight_map(index).items()}
    else:
        single = folder / "model.safetensors"
        if not single.is_file():
            raise CheckpointError(f"{folder} has neither {_INDEX} nor model.safetensors: are the weights downloaded?")
        with _open(single) as file:
            files = dict.fromkeys(file.keys(), single)
    if absent := sorted({path.name for path in files.values() if not path.is_file()}):
        raise CheckpointError(f"{folder} lacks {_some(absent)}, which {_INDEX} lists: download them")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Tensor name -> file name."""
    try:
        return msgspec.convert(read_json(index).get("weight_map"), dict[str, str])
    except ConfigError as error:
        raise CheckpointError(f"{error}: download it again") from None
    except msgspec.ValidationError:
        raise CheckpointError(f"{index} has no weight_map of tensors to files: download it again") from None


def _check_names(model: Decoder, wanted: dict[str, Weight], files: dict[str, Path], folder: Path) -> None:
    foreign = sorted(name for name in files if name.endswith(_FOREIGN) and model.unused(name) is None)
    if foreign:
        raise CheckpointError(f"{folder} is quantised in a way that is not known here ({_some(foreign)}); {SUPPORTED}")
    if missing := sorted(wanted.keys() - files.keys()):
        raise CheckpointError(f"{folder} has no tensor {_some(missing)}; config.json describes a model that needs it")
    extra = []
    for name in files.keys() - wanted.keys():
        of = scaled_weight(name) or name
        if of not in wanted and model.unused(of) is None:
            extra.append(name)
    if extra:
        some = _some(sorted(extra))
        raise CheckpointError(f"{folder} holds {some}, which the model described by config.json does not use")


def _check_filled(model: Decoder, by_name: dict[str, Weight]) -> None:
    filled: dict[int, int] = defaultdict(int)
    for weight in by_name.values():
        filled[weight.target.untyped_storage().data_ptr()] += weight.target.numel()
    for name, parameter in model.named_parameters():
        if filled[parameter.untyped_storage().data_ptr()] != parameter.numel():
            raise CheckpointError(f"parameter {name} would not be filled from the checkpoint")


def _read(path: Path, weights: list[Weight], files: dict[str, Path]) -> Iterator[tuple[Weight, torch.Tensor]]:
    """Yields each weight with its slice, in the order of the list."""
    pending = iter(weights)
    more = True
    while more:
        more = False
        touched = 0
        with _open(path) as file:
            for weight in pending:
                tensor = _slice(file, weight, path, files)
                touched += _bytes(tensor)
                yield weight, tensor
                if touched > _REMAP_BYTES:
                    more = True
                    break


def _slice(file: safe_open, weight: Weight, path: Path, files: dict[str, Path]) -> torch.Tensor:
    source = _lazy(file, weight.name, path)
    want, shard = list(weight.target.shape), weight.shard
    if shard is not None:
        want[shard.dim] = shard.full
    if (shape := logical_shape(source)) != want:
        raise CheckpointError(f"{path.name}: {weight.name} has shape {shape}; config.json implies {want}")
    scales = scale_names(weight.name, files)
    if scales or not str(source.get_dtype()).startswith(("BF16", "F16", "F32")):

        def get(name: str) -> TensorSlice:
            if files[name] == path:
                return _lazy(file, name, path)
            with _open(files[name]) as other:
                return _lazy(other, name, files[name])

        try:
            return read_quantised(source, scales, get, shard)
        except ValueError as error:
            raise CheckpointError(f"{path.name}: {weight.name} cannot be read: {error}") from None
    if shard is None:
        return source[:]
    span = slice(shard.start, shard.start + shard.length)
    return source[span] if shard.dim == 0 else source[:, span]


def _lazy(file: safe_open, name: str, path: Path) -> TensorSlice:
    """The tensor, to be read by slices."""
    try:
        return file.get_slice(name)
    except SafetensorError:
        raise CheckpointError(f"{path} lacks {name}, which {_INDEX} places there: download both again") from None


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file ({error}): download it again") from None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def differs(folder: Path, first: str, second: str, shard: Shard) -> bool:
    """Whether the checkpoint holds `first`, and its rows of the shard are not those of `second` (plain matrices)."""
    files = _tensor_files(folder)
    if first not in files or second not in files:
        return first in files
    with _open(files[first]) as a, _open(files[second]) as b:
        one, other = a.get_slice(first), b.get_slice(second)
        end = shard.start + shard.length
        for lo in range(shard.start, end, _COMPARED_ROWS):
            hi = min(lo + _COMPARED_ROWS, end)
            if not torch.equal(one[lo:hi], other[lo:hi]):
                return True
    return False

"""Quantised checkpoint tensors, dequantised slice by slice while loading.

A tensor is quantised if the checkpoint holds scales for it, whatever its config.json says of it.

FP8: `<w>.weight` e4m3 with `<w>.weight_scale_inv` float32, one scale for each 128 x 128 block (DeepSeek-V3's layout).
NVFP4: `<w>.weight` packed e2m1, the even element in the low nibble; `.weight_scale` e4m3 for each 16 elements of a row,
and `.weight_scale_2` float32 for the tensor (NVIDIA ModelOpt's layout). Its `.input_scale` concerns activations.
"""

from collections.abc import Callable, Collection
from typing import Protocol

import torch

from layers.parallel import Shard

BLOCK = 128
GROUP = 16
FP8_SCALE = ".weight_scale_inv"
FP4_SCALE, FP4_GLOBAL_SCALE, FP4_INPUT_SCALE = ".weight_scale", ".weight_scale_2", ".input_scale"
SCALES = (FP8_SCALE, FP4_SCALE, FP4_GLOBAL_SCALE, FP4_INPUT_SCALE)
SUPPORTED = "this version loads bf16, fp16, fp32, FP8 in 128 x 128 blocks and NVFP4"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class TensorSlice(Protocol):
    """A tensor in a safetensors file, read by slices."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: object) -> torch.Tensor: ...


def scaled_weight(name: str) -> str | None:
    """The weight that `name` would be a scale of."""
    return next((name.removesuffix(end) + ".weight" for end in SCALES if name.endswith(end)), None)


def scale_names(weight: str, names: Collection[str]) -> list[str]:
    """The scales that a checkpoint with these names holds for a weight, those that dequantising it takes."""
    base = weight.removesuffix(".weight")
    return [base + end for end in (FP8_SCALE, FP4_SCALE, FP4_GLOBAL_SCALE) if base + end in names]


def read_fp8(weight: TensorSlice, scale: TensorSlice, shard: Shard | None) -> torch.Tensor:
    """The shard of a tensor in 128 x 128 blocks, [rows, columns] float32. Raises ValueError if the scale's shape is not
    that of the blocks."""
    shape = weight.get_shape()
    expected = [-(-size // BLOCK) for size in shape]
    if scale.get_shape() != expected:
        raise ValueError(
            f"its scales have shape {scale.get_shape()}; {shape} in {BLOCK} x {BLOCK} blocks has {expected}"
        )
    (row, rows), (column, columns) = _spans(shape, shard)
    values = weight[row : row + rows, column : column + columns].float()
    blocks = scale[row // BLOCK : -(-(row + rows) // BLOCK), column // BLOCK : -(-(column + columns) // BLOCK)]
    # One stripe of blocks at a time, so that no second matrix of the weight's size is made.
    for i, factors in enumerate(blocks.float()):
        top = (row // BLOCK + i) * BLOCK - row
        by_column = factors.repeat_interleave(BLOCK)[column % BLOCK :][:columns]
        values[max(top, 0) : top + BLOCK] *= by_column
    return values


def read_nvfp4(
    weight: TensorSlice, scale: TensorSlice, global_scale: torch.Tensor, shard: Shard | None
) -> torch.Tensor:
    """The shard of a packed tensor, [rows, columns] float32. Raises ValueError if the scales' shape is not that of its
    groups of 16."""
    packed_shape = weight.get_shape()
    shape = [packed_shape[0], packed_shape[1] * 2]
    expected = [shape[0], shape[1] // GROUP]
    if shape[1] % GROUP or scale.get_shape() != expected:
        raise ValueError(f"its scales have shape {scale.get_shape()}; {shape} in groups of {GROUP} has {expected}")
    (row, rows), (column, columns) = _spans(shape, shard)
    first, last = column // GROUP, -(-(column + columns) // GROUP)  # whole groups around the shard
    packed = weight[row : row + rows, first * GROUP // 2 : last * GROUP // 2]
    factors = scale[row : row + rows, first:last].float() * global_scale.float()
    values = unpack_e2m1(packed).unflatten(1, (-1, GROUP)) * factors[..., None]
    return values.flatten(1)[:, column - first * GROUP :][:, :columns]


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """[rows, n] uint8 -> [rows, 2 n] float32: sign, two bits of exponent, one of mantissa; low nibble first."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return table[nibbles.int()]


def logical_shape(weight: TensorSlice) -> list[int]:
    """The shape that a tensor has unpacked."""
    shape = weight.get_shape()
    return [*shape[:-1], shape[-1] * 2] if weight.get_dtype() == "U8" else shape


def read_quantised(
    weight: TensorSlice, scales: list[str], get: Callable[[str], TensorSlice], shard: Shard | None
) -> torch.Tensor:
    """The shard of a weight dequantised with the scales of these names, [rows, columns] float32. Raises ValueError for
    what is neither of the two layouts."""
    kinds = {name[name.rindex(".") :] for name in scales}
    if weight.get_dtype() == "F8_E4M3" and kinds == {FP8_SCALE}:
        return read_fp8(weight, get(scales[0]), shard)
    if weight.get_dtype() == "U8" and kinds == {FP4_SCALE, FP4_GLOBAL_SCALE}:
        by_kind = {name[name.rindex(".") :]: get(name) for name in scales}
        return read_nvfp4(weight, by_kind[FP4_SCALE], by_kind[FP4_GLOBAL_SCALE][...], shard)
    raise ValueError(f"it is {weight.get_dtype()} with {', '.join(sorted(kinds)) or 'no scales'}; {SUPPORTED}")


def _spans(shape: list[int], shard: Shard | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """(start, length) of rows and of columns."""
    spans = [(0, shape[0]), (0, shape[1])]
    if shard is not None:
        spans[shard.dim] = (shard.start, shard.length)
    return spans[0], spans[1]

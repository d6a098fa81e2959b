"""Dequantisation against values worked out element by element, for every shard."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from configs.hf import load_model_config
from layers.models.decoder import Decoder
from layers.parallel import Shard, TensorParallel
from tests.layer_context import layer_context
from tests.oracles import oracle_folders
from workers.loader import differs, load_weights
from workers.quantised import read_quantised, unpack_e2m1

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
W = "a.weight"


def fp8_tensors(rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A quantised matrix, and its values by the definition."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)
    row, column = torch.arange(rows)[:, None] // 128, torch.arange(columns) // 128
    return {W: weight, f"{W}_scale_inv": scale}, weight.float() * scale[row, column]


def fp4_tensors(rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    packed = torch.randint(256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.rand(rows, columns // 16, generator=generator).to(torch.float8_e4m3fn)
    overall = torch.tensor(0.37)
    codes = [[byte >> 4 * half & 15 for byte in row for half in (0, 1)] for row in packed.tolist()]
    values = torch.tensor([[E2M1[code] for code in row] for row in codes])
    factors = scale.float()[:, torch.arange(columns) // 16] * overall
    return {W: packed, f"{W}_scale": scale, f"{W}_scale_2": overall}, values * factors


def test_all_codes_of_e2m1() -> None:
    packed = torch.tensor([[low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)]])
    assert unpack_e2m1(packed.to(torch.uint8)).tolist() == [E2M1]


@pytest.mark.parametrize("make", [fp8_tensors, fp4_tensors])
@pytest.mark.parametrize("dim", [0, 1])
def test_every_shard_is_a_slice_of_the_whole(make: Callable, dim: int, tmp_path: Path) -> None:
    tensors, whole = make(300, 272)
    save_file(tensors, tmp_path / "t.safetensors")
    size = whole.shape[dim]
    spans = [(0, size), (0, 1), (size - 1, 1), (127, 2), (128, 128), (5, 250), (16, 16), (15, 18), (31, 1), (129, 100)]
    with safe_open(tmp_path / "t.safetensors", "pt") as file:
        scales = sorted(set(tensors) - {W})
        assert torch.equal(read_quantised(file.get_slice(W), scales, file.get_slice, None), whole)
        for start, length in spans:
            got = read_quantised(file.get_slice(W), scales, file.get_slice, Shard(dim, start, length, size))
            assert torch.equal(got, whole.narrow(dim, start, length)), f"{start} + {length}"


@pytest.mark.parametrize("make", [fp8_tensors, fp4_tensors])
def test_wrong_scales_are_refused(make: Callable, tmp_path: Path) -> None:
    tensors, _ = make(300, 272)
    first = next(name for name in tensors if name != W)
    save_file(tensors | {first: tensors[first][:-1].contiguous()}, tmp_path / "t.safetensors")
    with safe_open(tmp_path / "t.safetensors", "pt") as file, pytest.raises(ValueError, match="its scales have shape"):
        read_quantised(file.get_slice(W), sorted(set(tensors) - {W}), file.get_slice, None)


@pytest.mark.parametrize("folder", oracle_folders(quantised=True), ids=lambda folder: folder.name)
@pytest.mark.parametrize("size", [1, 2])
def test_quantised_checkpoints_load(folder: Path, size: int) -> None:
    """Parameters of every rank are what the elements of the files say."""
    config = load_model_config(folder)
    names = {name: path for path in folder.glob("model*.safetensors") for name in load_file(path)}

    def tensor(name: str) -> torch.Tensor:
        return safe_open(names[name], "pt").get_tensor(name)

    def value(name: str) -> torch.Tensor:
        weight = tensor(name)
        if f"{name}_scale_inv" in names:
            blocks = tensor(f"{name}_scale_inv")
            return weight.float() * blocks.kron(torch.ones(128, 128))[: weight.shape[0], : weight.shape[1]]
        if f"{name}_scale_2" in names:
            low_first = torch.stack((weight & 15, weight >> 4), -1).flatten(1).long()
            groups = tensor(f"{name}_scale").float() * tensor(f"{name}_scale_2")
            return torch.tensor(E2M1)[low_first] * groups.repeat_interleave(16, dim=1)
        return weight.float()

    quantised = 0
    for rank in range(size):
        model = Decoder(layer_context(TensorParallel(rank, size)), config, 8, 1)
        load_weights(model, folder, lambda done, total: None)
        for weight in model.weights():
            want = value(weight.name)
            if weight.shard is not None:
                want = want.narrow(weight.shard.dim, weight.shard.start, weight.shard.length)
            torch.testing.assert_close(weight.target, want, rtol=1e-6, atol=0)
            quantised += f"{weight.name}_scale_inv" in names or f"{weight.name}_scale_2" in names
    assert quantised > 20


def test_scales_may_lie_in_another_file(tmp_path: Path) -> None:
    tensors, whole = fp8_tensors(64, 64)
    save_file({W: tensors[W]}, tmp_path / "one.safetensors")
    save_file({f"{W}_scale_inv": tensors[f"{W}_scale_inv"]}, tmp_path / "two.safetensors")
    with safe_open(tmp_path / "one.safetensors", "pt") as one, safe_open(tmp_path / "two.safetensors", "pt") as two:
        assert torch.equal(read_quantised(one.get_slice(W), [f"{W}_scale_inv"], two.get_slice, None), whole)


def test_whether_copies_differ(tmp_path: Path) -> None:
    matrix = torch.randn(3000, 4, generator=torch.Generator().manual_seed(0))
    changed = matrix.clone()
    changed[2500, 1] += 1
    save_file({"a": matrix, "same": matrix.clone(), "b": changed}, tmp_path / "model.safetensors")
    whole, before = Shard(0, 0, 3000, 3000), Shard(0, 0, 2500, 3000)
    assert not differs(tmp_path, "same", "a", whole)
    assert differs(tmp_path, "b", "a", whole)
    assert not differs(tmp_path, "b", "a", before)
    assert not differs(tmp_path, "absent", "a", whole)

"""Loading: every rank gets exactly its slices, and a checkpoint that does not fit is refused by name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.hf import load_model_config
from layers.models.decoder import Decoder
from layers.parallel import TensorParallel
from layers.weights import Weight
from tests.layer_context import layer_context
from tests.oracles import SHIPPED
from workers import loader
from workers.loader import CheckpointError, load_weights

V2, V3, GLM = (SHIPPED / f"tiny-{name}" for name in ("deepseek_v2-group", "deepseek_v3-yarn", "glm4_moe_lite-noqlora"))
Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.experts.5.gate_proj.weight"
NORM = "model.norm.weight"


def read_tensors(folder: Path) -> Tensors:
    files = [file for file in folder.glob("*.safetensors") if file.name != "reference.safetensors"]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def build(folder: Path, tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model of a folder's config with NaN parameters, so that what is not loaded shows."""
    model = Decoder(layer_context(tp, dtype), load_model_config(folder), max_positions=8)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    return model


def load(folder: Path, tp: TensorParallel | None = None, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build(folder, tp, dtype)
    load_weights(model, folder, lambda done, total: None)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a single-file copy of a checkpoint after an edit of its tensors and its config."""

    def make(source: Path, edit: Callable[[Tensors], object] = lambda tensors: None, **config: object) -> Path:
        tensors = read_tensors(source)
        edit(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        raw = json.loads((source / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**raw, **config}))
        return tmp_path

    return make


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint."""
    return Path(shutil.copytree(V3, tmp_path / "sharded"))


def refusal(folder: Path) -> str:
    """The message that loading ends with."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    return str(caught.value)


def check_slices(ranks: list[Decoder], tensors: Tensors) -> None:
    """Every tensor that any rank names is whole when the ranks' parts are put together, and without overlap."""
    held: dict[str, list[Weight]] = {}
    for model in ranks:
        for weight in model.weights():
            held.setdefault(weight.name, []).append(weight)
    for name, weights in held.items():
        full = tensors[name].float()
        if weights[0].shard is None:
            assert all(torch.equal(weight.target, full) for weight in weights), name
            continue
        parts = sorted(weights, key=lambda weight: weight.shard.start if weight.shard else 0)
        assert torch.equal(torch.cat([part.target for part in parts], weights[0].shard.dim), full), name


@pytest.mark.parametrize("folder", [V2, V3, GLM], ids=lambda folder: folder.name)
@pytest.mark.parametrize(("tp_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_ranks_hold_exactly_their_slices(folder: Path, tp_size: int, ep_size: int) -> None:
    tensors = read_tensors(folder)
    ranks = [load(folder, TensorParallel(rank, tp_size, ep_size)) for rank in range(tp_size)]
    check_slices(ranks, tensors)
    experts = 8 // ep_size
    for rank, model in enumerate(ranks):
        assert not any(parameter.isnan().any() for parameter in model.parameters())
        names = {weight.name for weight in model.weights()}
        first = rank // (tp_size // ep_size) * experts
        own = {e for e in range(8) if f"model.layers.2.mlp.experts.{e}.up_proj.weight" in names}
        assert own == set(range(first, first + experts))


def test_stacked_parameters_are_in_their_documented_order() -> None:
    tensors = read_tensors(V3)
    parameters = dict(load(V3, TensorParallel(1, 2, 1)).named_parameters())
    gate_up = parameters["layers.1.mlp.gate_up"]
    for half, name in zip(gate_up[5].chunk(2), ("gate", "up"), strict=True):
        assert torch.equal(half, tensors[f"model.layers.1.mlp.experts.5.{name}_proj.weight"][32:].float())
    down = torch.cat([tensors[f"model.layers.0.self_attn.{n}.weight"] for n in ("q_a_proj", "kv_a_proj_with_mqa")])
    assert torch.equal(parameters["layers.0.self_attn.down_proj.weight"], down.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_are_cast_and_the_router_stays_float32(checkpoint: Callable[..., Path], dtype: torch.dtype) -> None:
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    precise = torch.linspace(1, 1.001, 8)

    def edit(tensors: Tensors) -> None:
        tensors.update({bias: precise, GATE: tensors[GATE].half(), NORM: tensors[NORM].float()})

    folder = checkpoint(V3, edit)
    parameters = dict(load(folder, dtype=dtype).named_parameters())
    assert torch.equal(parameters["layers.1.mlp.gate.bias"], precise)
    assert parameters["layers.1.mlp.gate.weight"].dtype == torch.float32
    assert torch.equal(parameters["layers.1.mlp.gate_up"][5, :64], read_tensors(folder)[GATE].to(dtype))


@pytest.mark.parametrize(("rank", "tp_size", "ep_size"), [(0, 1, 1), (1, 2, 1), (1, 2, 2)])
def test_progress_counts_the_ranks_own_bytes(rank: int, tp_size: int, ep_size: int) -> None:
    model = build(V3, TensorParallel(rank, tp_size, ep_size))
    own = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    seen: list[tuple[int, int]] = []
    load_weights(model, V3, lambda done, total: seen.append((done, total)))
    assert {total for _, total in seen} == {own}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (own, own)


def test_remapping_a_file_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_REMAP_BYTES", 10_000)
    check_slices([load(V3)], read_tensors(V3))


def test_tensors_without_use_here_are_skipped(checkpoint: Callable[..., Path]) -> None:
    def edit(tensors: Tensors) -> None:
        assert any(name.startswith("model.layers.3.") for name in tensors)  # the MTP module
        tensors["model.layers.1.self_attn.k_proj.k_scale"] = torch.ones(())
        tensors["model.layers.1.self_attn.v_proj.v_scale"] = torch.ones(())
        tensors["model.layers.3.self_attn.indexer.k_norm.bias"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)

    folder = checkpoint(V3, edit)
    check_slices([load(folder)], read_tensors(folder))


def test_a_tied_head_is_the_embedding_and_its_tensor_may_be_there_or_not(checkpoint: Callable[..., Path]) -> None:
    for drop in (False, True):
        folder = checkpoint(
            GLM, lambda t, drop=drop: t.pop("lm_head.weight") if drop else None, tie_word_embeddings=True
        )
        model = load(folder)
        assert model.lm_head.weight is model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, read_tensors(folder)["model.embed_tokens.weight"].float())


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda t: t.pop(GATE), ["has no tensor", GATE, "config.json"]),
        (lambda t: t.pop(NORM), ["has no tensor", NORM]),
        (lambda t: t.update({"model.layers.0.self_attn.odd.weight": torch.zeros(1)}), ["self_attn.odd", "not use"]),
        (lambda t: t.update({GATE.replace(".5.", ".8."): torch.zeros(1)}), ["experts.8.gate_proj", "not use"]),
        (lambda t: t.update({GATE.replace("s.1", "s.0"): torch.zeros(1)}), ["layers.0.mlp.experts.5", "not use"]),
        (lambda t: t.update({GATE: torch.zeros(63, 128)}), ["model.safetensors", GATE, "[63, 128]", "[64, 128]"]),
        (lambda t: t.update({NORM: torch.zeros(1, 128)}), ["model.safetensors", NORM, "[1, 128]", "[128]"]),
        (lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn)}), [GATE, "F8_E4M3 with no scales", "NVFP4"]),
        (lambda t: t.update({f"{GATE}_scale_inv": torch.ones(1, 1)}), [GATE, "BF16 with .weight_scale_inv", "bf16"]),
        (
            lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn), f"{GATE}_scale_inv": torch.ones(1, 2)}),
            [GATE, "scales have shape [1, 2]", "[64, 128] in 128 x 128 blocks has [1, 1]"],
        ),
        (
            lambda t: t.update({GATE: t[GATE].to(torch.float8_e4m3fn), f"{GATE}_scale": torch.ones(())}),
            [GATE, "F8_E4M3 with .weight_scale;", "FP8 in 128 x 128 blocks"],
        ),
        (lambda t: t.update({GATE.replace(".5.", ".8.") + "_scale_inv": torch.ones(1, 1)}), ["experts.8", "not use"]),
        (lambda t: t.update({f"{GATE}_packed": t.pop(GATE)}), ["quantised in a way", f"{GATE}_packed", "NVFP4"]),
        (lambda t: t.update({NORM: t[NORM].to(torch.int8)}), ["model.safetensors", NORM, "I8"]),
    ],
    ids=[
        "missing",
        "no norm",
        "extra",
        "ninth expert",
        "expert of a dense layer",
        "shape",
        "dims",
        "no scales",
        "scales of bf16",
        "shape of scales",
        "one scale",
        "scale of nothing",
        "packed",
        "i8",
    ],
)
def test_tensors_that_do_not_fit_are_named(
    checkpoint: Callable[..., Path], edit: Callable[[Tensors], object], parts: list[str]
) -> None:
    message = refusal(checkpoint(V3, edit))
    assert [part for part in parts if part not in message] == []


def test_many_missing_tensors_are_counted(checkpoint: Callable[..., Path]) -> None:
    message = refusal(checkpoint(V3, lambda t: [t.pop(name) for name in list(t) if ".layers.2.mlp.experts." in name]))
    assert "model.layers.2.mlp.experts.0.down_proj.weight" in message
    assert "and 19 more" in message


def test_a_missing_shard_file_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    message = refusal(sharded)
    assert "lacks model-00002-of-00002.safetensors" in message
    assert "model.safetensors.index.json" in message


def test_a_shard_without_a_tensor_that_the_index_places_there_is_named(sharded: Path) -> None:
    path = sharded / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    del tensors[NORM]
    save_file(tensors, path)
    message = refusal(sharded)
    assert str(path) in message
    assert NORM in message


@pytest.mark.parametrize(
    "index", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"model.norm.weight": 3}}']
)
def test_a_broken_index_is_named(sharded: Path, index: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(index)
    assert str(sharded / "model.safetensors.index.json") in refusal(sharded)


@pytest.mark.parametrize("size", [0, 4, 100, 5000, -1])
def test_a_cut_off_file_is_named(checkpoint: Callable[..., Path], size: int) -> None:
    path = checkpoint(V3) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(path.parent)
    assert f"{path} is not a readable safetensors file" in message


def test_a_cut_off_shard_is_named(sharded: Path) -> None:
    path = sharded / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    assert f"{path} is not a readable safetensors file" in refusal(sharded)


def test_a_folder_without_weights_says_what_it_looked_for(tmp_path: Path) -> None:
    shutil.copy(V3 / "config.json", tmp_path)
    message = refusal(tmp_path)
    assert [w for w in (str(tmp_path), "model.safetensors.index.json", "model.safetensors") if w not in message] == []

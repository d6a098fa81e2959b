"""MTP modules are loaded whole or refused, with the model's embedding and head or with their own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.engine import EngineConfig
from configs.hf import load_model_config
from layers.models.decoder import Decoder
from layers.parallel import TensorParallel
from tests.layer_context import CPU, layer_context
from tests.oracles import SHIPPED
from workers.loader import CheckpointError, load_weights
from workers.runner import ModelRunner

V3 = SHIPPED / "tiny-deepseek_v3-yarn"
MODULE = "model.layers.3."
OWN = (f"{MODULE}embed_tokens.weight", f"{MODULE}shared_head.head.weight")


def checkpoint(folder: Path, **changed: torch.Tensor | None) -> Path:
    """A copy of V3 in one file with tensors of its MTP module changed, or dropped (None)."""
    tensors = {name: t for path in V3.glob("model-*.safetensors") for name, t in load_file(path).items()}
    for name, tensor in changed.items():
        if tensor is None:
            del tensors[MODULE + name]
        else:
            tensors[MODULE + name] = tensor
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text((V3 / "config.json").read_text())
    return folder


def run(folder: Path) -> ModelRunner:
    config = EngineConfig(model=folder, num_draft_tokens=2, kv_cache_bytes=8 << 20)
    return ModelRunner(config, load_model_config(folder), 128, TensorParallel(), CPU, lambda done, total: None)


@pytest.mark.parametrize(
    "name",
    ["eh_proj.weight", "enorm.weight", "hnorm.weight", "shared_head.norm.weight", "mlp.experts.7.up_proj.weight"],
)
def test_a_module_with_a_tensor_missing_is_refused(tmp_path: Path, name: str) -> None:
    """It never runs with random weights; without drafts nobody asks for the tensor."""
    folder = checkpoint(tmp_path, **{name: None})
    with pytest.raises(
        CheckpointError, match=f"has no tensor {MODULE}{name}; config.json describes a model that needs"
    ):
        run(folder)
    load_weights(Decoder(layer_context(), load_model_config(folder), 8), folder, lambda done, total: None)


def test_copies_of_embedding_and_head_are_not_loaded_twice(tmp_path: Path) -> None:
    for folder in (V3, checkpoint(tmp_path, **{name.removeprefix(MODULE): None for name in OWN})):
        model = run(folder).model
        (module,) = model.mtp
        assert module.embed_tokens is model.embed_tokens and module.lm_head is model.lm_head
        assert not {weight.name for weight in model.weights()} & set(OWN)


@pytest.mark.parametrize("index", [0, 1])
def test_an_embedding_or_head_of_its_own_is_used(tmp_path: Path, index: int) -> None:
    name = OWN[index]
    other = torch.randn(320, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    model = run(checkpoint(tmp_path, **{name.removeprefix(MODULE): other})).model
    (module,) = model.mtp
    used = (module.embed_tokens.weight, module.lm_head.weight)
    assert torch.equal(used[index], other.float())
    assert torch.equal(used[1 - index], (model.embed_tokens.weight, model.lm_head.weight)[1 - index])


def test_modules_that_are_not_used_take_no_memory() -> None:
    config = load_model_config(V3)
    plain, drafting = (Decoder(layer_context(), config, 8, count) for count in (0, 1))
    extra = {name for name, _ in drafting.named_parameters()} - {name for name, _ in plain.named_parameters()}
    assert extra and all(name.startswith("mtp_modules.0.") for name in extra)

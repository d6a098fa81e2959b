"""Random weights: the same each time, in memory or written to a checkpoint, and a router that spreads its rows."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.hf import load_model_config
from layers.models.decoder import Decoder
from layers.moe.router import Router
from serve.llm import LLM
from serve.tokenizer import Tokenizer
from tests import REPOSITORY
from tests.layer_context import layer_context
from workers.random_weights import fill_randomly
from workers.step import SamplingParams

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

from presets import PRESETS
from random_checkpoint import tensor_shapes, write_checkpoint, write_tokenizer


def preset_folder(name: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PRESETS[name]))
    return folder


@pytest.mark.parametrize(
    ("name", "billions"), [("v2-lite", 15.71), ("v3-slice", 48.57), ("v32-slice", 48.64), ("glm52-slice", 41.86)]
)
def test_presets_have_the_released_sizes(name: str, billions: float, tmp_path: Path) -> None:
    """V2-Lite has 15.7 billion parameters; a DeepSeek-V3 layer 11.5, of which the slice has four (its MTP module's
    included), one dense layer, embedding and head."""
    shapes = tensor_shapes(preset_folder(name, tmp_path))
    assert sum(shape.numel() for shape in shapes.values()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_a_written_checkpoint_is_what_dummy_weights_are(tmp_path: Path) -> None:
    written, plain = tmp_path / "written", preset_folder("tiny", tmp_path / "plain")
    write_checkpoint("tiny", written, torch.device("cpu"))
    write_checkpoint("tiny", written, torch.device("cpu"))  # is there already
    with pytest.raises(SystemExit, match="is not empty and does not hold a whole v2-lite"):
        write_checkpoint("v2-lite", written, torch.device("cpu"))
    logits, texts = [], []
    for folder, load_format in ((written, "safetensors"), (plain, "dummy")):
        with LLM(folder, device="cpu", dtype="bfloat16", load_format=load_format, num_draft_tokens=2) as llm:
            logits.append(llm.logits([[1, 2, 3, 400]])[0])
            (done,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
            texts.append(done.token_ids)
    assert np.isfinite(logits[0]).all() and 0.3 < logits[0].std() < 3
    assert np.array_equal(logits[0], logits[1]) and texts[0] == texts[1]


def test_every_id_has_a_text(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, 5000)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size == 5000
    assert tokenizer.token_bytes(4999) == b" token4999"
    assert tokenizer.encode("In the beginning", add_special_tokens=True) == Tokenizer(
        REPOSITORY / "examples" / "tiny-model"
    ).encode("In the beginning", add_special_tokens=True)


def test_routing_is_spread(tmp_path: Path) -> None:
    """No expert of the first MoE layer gets more than 2.5 times its share of 512 different rows."""
    config = load_model_config(preset_folder("tiny", tmp_path))
    model = Decoder(layer_context(), config, 64)
    fill_randomly(model, 0, lambda done, total: None)
    router = next(module for module in model.modules() if isinstance(module, Router))
    rows = torch.nn.functional.rms_norm(model.embed_tokens(torch.arange(512)).float(), (64,))
    chosen = router(rows).expert_ids.flatten()
    counts, share = torch.bincount(chosen, minlength=16), chosen.numel() / 16
    assert counts.max() < 2.5 * share and counts.min() > 0.2 * share

"""Checkpoints of random weights on disk: files that another engine can read, and a router that spreads what decodes."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from layers.parallel import TensorParallel
from tests import REPOSITORY
from tests.layers.ranks import Rank

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import random_checkpoint
from presets import PRESETS
from random_checkpoint import write_checkpoint

CPU = torch.device("cpu")


def test_shards_and_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(random_checkpoint, "SHARD_BYTES", 200_000)
    write_checkpoint("tiny", tmp_path, CPU)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) > 2
    size, tensors = 0, {}
    for file in files:
        with safe_open(tmp_path / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensors[name] = opened.get_tensor(name)
                assert index["weight_map"][name] == file and tensors[name].dtype == torch.bfloat16
                size += tensors[name].nbytes
    assert tensors.keys() == index["weight_map"].keys() and size == index["metadata"]["total_size"]
    assert (tensors["model.norm.weight"] == 1).all()
    assert (tensors["model.layers.1.mlp.gate.e_score_correction_bias"] == 0).all()
    assert "model.layers.3.eh_proj.weight" in tensors  # the MTP module
    progress = capsys.readouterr().out.splitlines()
    assert len(progress) == len(files)


def test_a_folder_that_was_left_half_written_is_refused(tmp_path: Path) -> None:
    write_checkpoint("tiny", tmp_path, CPU)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(SystemExit, match="is not empty and does not hold a whole tiny"):
        write_checkpoint("tiny", tmp_path, CPU)


def test_decoded_rows_touch_the_experts_that_the_floor_expects(tmp_path: Path) -> None:
    """Balance is measured as the floor needs it: distinct experts among rows of different sequences that decode their
    own greedy text, over E (1 - (1 - k / E)^rows). In every layer; the floor's share of each step hangs on it."""
    write_checkpoint("tiny", tmp_path, CPU)
    rank = Rank(tmp_path, TensorParallel(), "bfloat16")
    generator = torch.Generator().manual_seed(0)
    sequences, steps, experts, chosen = (
        8,
        16,
        PRESETS["tiny"]["n_routed_experts"],
        PRESETS["tiny"]["num_experts_per_tok"],
    )
    seen: dict[int, list[torch.Tensor]] = {}
    for _ in range(sequences):
        prompt = torch.randint(PRESETS["tiny"]["vocab_size"], (24,), generator=generator).tolist()
        ids = prompt + rank.greedy(prompt, steps)
        for layer, routing in rank.routings(ids).items():
            seen.setdefault(layer, []).append(routing.expert_ids[-steps:])
    assert sorted(seen) == [1, 2]
    for layer, parts in seen.items():
        ids = torch.stack(parts)  # [sequences, steps, chosen]
        for rows in (1, 2, 4, 8):
            groups = [ids[i : i + rows, s].unique() for s in range(steps) for i in range(0, sequences, rows)]
            touched = sum(len(group) for group in groups) / len(groups)
            expected = experts * (1 - (1 - chosen / experts) ** rows)
            assert touched == pytest.approx(expected, rel=0.1), (layer, rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", "tiny", str(folder), "--device", "cuda"])
    with pytest.raises(SystemExit, match="--device cuda: torch finds no GPU here: use cpu"):
        random_checkpoint.main()
    assert not folder.exists()

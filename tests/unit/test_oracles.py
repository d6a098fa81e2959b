"""The reference data is what the other tests take it for."""

from pathlib import Path

import pytest
import torch

from tests.oracles import SHIPPED, load_reference, oracle_folders


def test_the_shipped_oracles_are_found_without_the_full_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SHOAL_ORACLES", str(tmp_path / "absent"))
    names = ["tiny-deepseek_v2-group", "tiny-deepseek_v3-yarn", "tiny-glm4_moe_lite-noqlora"]
    assert oracle_folders() == [SHIPPED / name for name in names]
    assert oracle_folders(quantised=True) == [SHIPPED / "tiny-deepseek_v32-small-fp8"]
    assert oracle_folders("deepseek_v3", "deepseek_v2") == [SHIPPED / name for name in names[:2]]


def test_the_full_set_adds_to_the_shipped_one_and_quantised_ones_are_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, config in {
        "tiny-deepseek_v2-group": '{"model_type": "deepseek_v2"}',
        "tiny-deepseek_v2-other": '{"model_type": "deepseek_v2"}',
        "tiny-deepseek_v2-fp8": '{"model_type": "deepseek_v2", "quantization_config": {}}',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    monkeypatch.setenv("SHOAL_ORACLES", str(tmp_path))
    assert oracle_folders("deepseek_v2") == [tmp_path / "tiny-deepseek_v2-group", tmp_path / "tiny-deepseek_v2-other"]
    assert oracle_folders("deepseek_v2", quantised=True) == [tmp_path / "tiny-deepseek_v2-fp8"]


EVERY = oracle_folders() + oracle_folders(quantised=True)


@pytest.mark.parametrize("folder", EVERY, ids=lambda folder: folder.name)
def test_a_reference_agrees_with_itself(folder: Path) -> None:
    reference = load_reference(folder)
    lengths = [len(p.prompt) for p in reference.prompts]
    assert lengths == [5, 64, 150][: len(lengths)] and len(lengths) > 1
    for prompt in reference.prompts:
        first, last = len(prompt.prompt) - 1, len(prompt.ids) - 1
        assert prompt.logits.shape[0] == len(prompt.ids)
        assert prompt.logits[first:last].argmax(-1).tolist() == prompt.greedy
        best, second = prompt.logits[first:last].topk(2, -1).values.unbind(-1)
        torch.testing.assert_close(best - second, torch.tensor(prompt.margins), atol=1e-4, rtol=0)
        assert prompt.num_decided(tolerance=1e-3) == len(prompt.greedy)
        for router in prompt.routers.values():
            assert router.experts.shape == router.weights.shape
            assert torch.equal(router.experts, router.experts.sort(-1).values)
        for indexer in prompt.indexers.values():
            counts = (indexer.positions >= 0).sum(-1).tolist()
            assert counts == [min(i + 1, indexer.positions.shape[1]) for i in range(len(prompt.ids))]
        for k, module in enumerate(prompt.mtp):
            assert module.logits.shape == (len(prompt.ids) - 1 - k, prompt.logits.shape[1])
        if prompt.chain:
            assert prompt.chain[0] == int(prompt.logits[-1].argmax())


def test_num_decided_stops_at_the_first_near_tie() -> None:
    reference = load_reference(SHIPPED / "tiny-deepseek_v2-group").prompts[0]
    smallest = min(reference.margins)
    assert reference.num_decided(smallest) == reference.margins.index(smallest)

"""The FlashInfer adapter without a GPU: what it hands on, that the installed package takes it, and what it refuses."""

import inspect
from importlib import metadata as package_metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.base import ConfigError
from layers.attention import flashinfer_topk
from layers.attention.flashinfer_topk import FusedTopK, UnfusedTopK, make_flashinfer_topk
from layers.attention.flashinfer_version import require_flashinfer
from layers.attention.topk import TopKMetadata, TorchTopK
from layers.attention.topk_backends import make_topk_backend
from tests.layers.test_topk import generator, metadata

CUDA = torch.device("cuda")


class Recorder:
    """Stands for top_k_page_table_transform."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __call__(self, *args: Any, **keywords: Any) -> None:
        self.calls.append((args, keywords))


def fake_top_k(scores: torch.Tensor, k: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for top_k: ties as told, the order shuffled."""
    ids = torch.arange(scores.shape[1])
    flip = options["tie_break"] == 2
    values = scores.flip(-1) if flip else scores
    chosen = values.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = ids.flip(0)[chosen] if flip else chosen
    return scores.gather(1, chosen), chosen[:, torch.randperm(k, generator=torch.Generator().manual_seed(1))]


@pytest.mark.parametrize(("tie_break", "code"), [("none", 0), ("small", 1), ("large", 2)])
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_fused_route_hands_on_exactly_this(tie_break: str, code: int, deterministic: bool) -> None:
    transform = Recorder()
    scores = torch.zeros(4, 100)[:, :80]
    wide = torch.arange(40, dtype=torch.int32).view(4, 10)
    lengths = torch.arange(8, dtype=torch.int32)[::2]
    ints = torch.zeros(4, dtype=torch.int32)
    meta = TopKMetadata(wide[:, ::5], lengths, 64, 16, False, ints, ints.clone(), ints.clone())
    physical, raw = torch.empty(2, 4, 16, dtype=torch.int32)
    FusedTopK(transform, tie_break, deterministic=deterministic).select(scores, meta, physical, raw)
    (((got_scores, table, got_lengths, k), keywords),) = transform.calls
    assert got_scores is scores
    assert table.is_contiguous() and torch.equal(table, meta.page_table)
    assert got_lengths.is_contiguous() and torch.equal(got_lengths, lengths)
    assert k == 16
    for name, want in (("row_to_batch", meta.row_to_table), ("row_starts", meta.row_starts)):
        assert keywords.pop(name) is want
    assert keywords.pop("page_table_row_starts") is meta.table_starts
    assert keywords.pop("out") is physical and keywords.pop("out_raw_indices") is raw
    assert keywords == {
        "deterministic": deterministic,
        "tie_break": code,
        "dsa_graph_safe": True,
        "page_size": 64,
    }


@pytest.mark.parametrize("tie_break", ["small", "large"])
@pytest.mark.parametrize("width", [10, 16, 300])
def test_the_unfused_route_selects_what_the_reference_does(tie_break: str, width: int) -> None:
    lengths = [min(n, width) for n in (300, 0, 16, 1, 17, 15, 299, 128)]
    scores = torch.randn(8, width, generator=generator(1)).mul(2).round()
    scores[6, 3:290] = -torch.inf
    for fields in ({}, {"row_to_table": torch.arange(8, dtype=torch.int32).flip(0)}):
        meta = metadata(lengths, 16, 64, 320, 2, **fields)
        want, got = torch.full((2, 2, 8, 16), 7, dtype=torch.int32)
        TorchTopK(tie_break).select(scores, meta, *want)
        UnfusedTopK(fake_top_k, tie_break, deterministic=True).select(scores, meta, *got)
        assert torch.equal(got, want)


def test_the_unfused_route_with_row_starts() -> None:
    starts = torch.tensor([0, 64, 128], dtype=torch.int32)
    meta = metadata([64, 40, 5], 16, 64, 192, 3, row_starts=starts, table_starts=starts // 64)
    scores = torch.randn(3, 192, generator=generator(4))
    want, got = torch.full((2, 2, 3, 16), 7, dtype=torch.int32)
    TorchTopK("small").select(scores, meta, *want)
    UnfusedTopK(fake_top_k, "small", deterministic=True).select(scores, meta, *got)
    assert torch.equal(got, want)


def test_the_installed_package_takes_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")  # else its import looks for a GPU
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    flashinfer = pytest.importorskip("flashinfer")
    transform, top_k = Recorder(), Recorder()
    meta = metadata([100], 16, 64, 128, 5)
    outputs = torch.empty(2, 1, 16, dtype=torch.int32)
    FusedTopK(transform, "small", deterministic=True).select(torch.zeros(1, 128), meta, *outputs)
    with pytest.raises(TypeError):  # the recorder gives nothing back
        UnfusedTopK(top_k, "small", deterministic=True).select(torch.zeros(1, 128), meta, *outputs)
    for function, recorder in ((flashinfer.top_k_page_table_transform, transform), (flashinfer.top_k, top_k)):
        args, keywords = recorder.calls[0]
        inspect.signature(function).bind(*args, **keywords)


def test_the_route_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = SimpleNamespace(top_k_page_table_transform=Recorder(), top_k=Recorder())
    monkeypatch.setattr(flashinfer_topk, "import_module", lambda name: functions)
    monkeypatch.setattr(package_metadata, "version", lambda name: "0.6.18.post1")
    card = SimpleNamespace(shared_memory_per_multiprocessor=228 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name in ("flashinfer", "flashinfer_unfused"):
        assert make_topk_backend(name, 2048, "small", True, CUDA).name == name
    assert make_topk_backend("auto", 2048, "small", True, CUDA).name == "flashinfer"
    assert make_topk_backend("auto", 4096, "small", True, CUDA).name == "torch"
    with pytest.raises(ConfigError, match="selects at most 2048, index_topk is 4096"):
        make_flashinfer_topk("flashinfer", 4096, "small", True, CUDA)
    card.shared_memory_per_multiprocessor = 100 << 10
    with pytest.raises(ConfigError, match="needs 128 KiB of shared memory a multiprocessor, this card has 100"):
        make_flashinfer_topk("flashinfer", 2048, "small", True, CUDA)


def test_a_cpu_has_no_such_backend() -> None:
    with pytest.raises(ConfigError, match="'flashinfer' needs a GPU, this worker runs on cpu: use 'torch'"):
        make_topk_backend("flashinfer", 16, "small", True, torch.device("cpu"))


@pytest.mark.parametrize("version", ["0.6.18", "0.6.18.post1", "0.7.4", "1.0"])
def test_versions_that_will_do(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(package_metadata, "version", lambda name: version)
    require_flashinfer("topk_backend 'flashinfer'", "0.6.18", "'torch'")


@pytest.mark.parametrize("version", ["0.6.17", "0.6.18rc7", "0.6.9"])
def test_versions_that_are_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(package_metadata, "version", lambda name: version)
    with pytest.raises(ConfigError, match=rf"needs flashinfer-python >= 0.6.18, installed is {version}: upgrade"):
        require_flashinfer("topk_backend 'flashinfer'", "0.6.18", "'torch'")


def test_none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise package_metadata.PackageNotFoundError(name)

    monkeypatch.setattr(package_metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"which is not installed: install shoal\[gpu\], or use 'torch'"):
        require_flashinfer("topk_backend 'flashinfer'", "0.6.18", "'torch'")

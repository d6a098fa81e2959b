"""The adapter of FlashInfer's FA3 MLA kernel without a GPU: what it hands on, when it plans, and what it refuses."""

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.base import ConfigError
from configs.hf import load_model_config
from layers.attention.backend import PagedRows
from layers.attention.backends import make_attention_backend
from tests.oracles import SHIPPED

pytest.importorskip("triton")

from layers.attention import backends, flashinfer_fa3
from layers.attention.flashinfer_fa3 import FlashInferFA3
from layers.kernels.mla_plan import PlanLayout

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS, SCALE = 16, 0.125
LIST = 4 * 16384
# As FlashInfer 0.6.18 lays a plan out for one cluster size: lists of 16384 int32, those of merges one for each SM.
MERGES = 3 * LIST
AFTER = MERGES + 5 * 544
PLAN = [1, 132, 0, LIST, 2 * LIST, *(MERGES + 544 * i for i in range(5)), *(AFTER + LIST * i for i in range(6))]
PLAN += [0, 17301504]


class Wrapper:
    """Stands for BatchMLAPagedAttentionWrapper."""

    plan_info = PLAN

    def __init__(self, workspace: torch.Tensor, **options: Any) -> None:
        self.made = (workspace, options)
        self._int_workspace_buffer = torch.zeros(8 << 20, dtype=torch.uint8)
        self.plans: list[tuple[Any, ...]] = []
        self.runs: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = []

    def plan(self, *arguments: Any) -> None:
        self.plans.append(arguments)
        self._plan_info = self.plan_info

    def run(self, *arguments: Any, **keywords: Any) -> None:
        self.runs.append((arguments, keywords, self._kv_indices_buf))
        keywords["out"].fill_(len(self.runs))


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What would be written by `write_plan`."""
    written: list[tuple[Any, ...]] = []
    monkeypatch.setattr(flashinfer_fa3, "write_plan", lambda *arguments: written.append(arguments))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    return written


def rows(count: int, per_sequence: int = 1, max_length: int = 200) -> PagedRows:
    table = torch.arange(count // per_sequence * 4, dtype=torch.int32).view(-1, 4)
    return PagedRows(table, torch.full((count,), 7, dtype=torch.int32), per_sequence, max_length)


def attend(backend: FlashInferFA3, batch: PagedRows, slots: torch.Tensor | None = None) -> torch.Tensor:
    q, cache = torch.zeros(len(batch.lengths), HEADS, 576), torch.zeros(9, 64, 576)
    if slots is None:
        return backend.decode(q, cache, batch, scale=SCALE, value_dim=512)
    return backend.sparse(q, cache, slots, batch, scale=SCALE, value_dim=512)


def test_a_plan_serves_all_layers_of_its_step(plans: list[tuple[Any, ...]]) -> None:
    backend = FlashInferFA3(Wrapper, HEADS, SCALE, CPU)
    first, second = rows(6, per_sequence=3), rows(2)
    for batch in (first, first, second, first):
        attend(backend, batch)
    assert len(plans) == 3
    workspace, layout, lengths, limit, per_table, stride, heads, cluster, clusters = plans[0]
    assert workspace.dtype == torch.int32 and lengths is not first.lengths and torch.equal(lengths, first.lengths)
    assert (limit, per_table, stride, heads, cluster, clusters) == (200, 3, 4, HEADS, 1, 132)
    assert layout == PlanLayout(*(offset // 4 for offset in PLAN[2:16]))
    run = backend._runs[64]
    (q, q_rope, latents, ropes), keywords, table = run.runs[0]
    assert (q.shape[-1], q_rope.shape[-1], latents.shape, ropes.shape) == (512, 64, (9, 64, 512), (9, 64, 64))
    assert keywords["out"].shape == (6, HEADS, 512) and table.data_ptr() == first.block_table.data_ptr()


def test_sparse_rows_are_pages_of_one_entry(plans: list[tuple[Any, ...]]) -> None:
    backend = FlashInferFA3(Wrapper, HEADS, SCALE, CPU)
    batch = rows(3)
    slots = torch.arange(60, dtype=torch.int32).view(3, 20)
    attend(backend, batch)
    attend(backend, batch, slots)
    attend(backend, batch)  # the dense plan is still there
    attend(backend, batch, slots)
    assert [(plan[3], plan[4], plan[5]) for plan in plans] == [(200, 1, 4), (20, 1, 20)]
    assert plans[0][0].data_ptr() != plans[1][0].data_ptr()
    (_, _, latents, _), _, table = backend._runs[1].runs[0]
    assert latents.shape == (9 * 64, 1, 512) and table.data_ptr() == slots.data_ptr()


def test_more_rows_than_a_plan_takes(plans: list[tuple[Any, ...]]) -> None:
    """In pieces of whole sequences, or of rows where all are of one."""
    backend = FlashInferFA3(Wrapper, HEADS, SCALE, CPU)
    batch = rows(8193, per_sequence=3)
    out = attend(backend, batch)
    assert [len(plan[2]) for plan in plans] == [8190, 3]
    tables = [table for _, _, table in backend._runs[64].runs]
    assert [table[0, 0].item() for table in tables] == [0, 4 * 2730]
    assert (out[:8190] == 1).all() and (out[8190:] == 2).all()
    plans.clear()
    attend(backend, rows(10000, per_sequence=10000))
    assert [len(plan[2]) for plan in plans] == [8192, 1808]
    assert all(table.shape == (1, 4) for _, _, table in backend._runs[64].runs[2:])


def test_another_scale(plans: list[tuple[Any, ...]]) -> None:
    backend = FlashInferFA3(Wrapper, HEADS, SCALE, CPU)
    with pytest.raises(ValueError, match=r"made for a scale of 0.125, not 0.2"):
        backend.decode(torch.zeros(1, HEADS, 576), torch.zeros(1, 64, 576), rows(1), scale=0.2, value_dim=512)


@pytest.mark.parametrize("info", [PLAN[:17], [3, *PLAN[1:]], [*PLAN[:3], 99, *PLAN[4:]]])
def test_plans_of_another_layout(
    plans: list[tuple[Any, ...]], info: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wrapper, "plan_info", info)
    monkeypatch.setattr(flashinfer_fa3.metadata, "version", lambda name: "0.6.99")
    with pytest.raises(ConfigError, match=r"does not know the plans of FlashInfer 0.6.99: use 'triton'"):
        FlashInferFA3(Wrapper, HEADS, SCALE, CPU)


def on_a_card(monkeypatch: pytest.MonkeyPatch, major: int, module: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr(flashinfer_fa3, "require_triton", lambda *names: None)
    monkeypatch.setattr(backends, "require_triton", lambda *names: None)
    monkeypatch.setattr(flashinfer_fa3, "require_flashinfer", lambda *names: None)
    monkeypatch.setattr(flashinfer_fa3, "import_module", lambda name: module)


def config(**changes: int) -> Any:
    shipped = load_model_config(SHIPPED / "tiny-deepseek_v3-yarn").attention
    return shipped.model_copy(update={"kv_lora_rank": 512, "qk_rope_head_dim": 64, **changes})


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a GPU"):
        make_attention_backend("flashinfer_fa3", config(), HEADS, 64, torch.bfloat16, CPU)
    on_a_card(monkeypatch, 8, None)
    with pytest.raises(ConfigError, match=r"needs a Hopper GPU \(SM90\): use 'triton'"):
        make_attention_backend("flashinfer_fa3", config(), HEADS, 64, torch.bfloat16, CUDA)
    on_a_card(monkeypatch, 9, SimpleNamespace())
    for mla, heads, dtype in (
        (config(), HEADS, torch.float32),
        (config(), 129, torch.bfloat16),
        (config(kv_lora_rank=256), HEADS, torch.bfloat16),
    ):
        with pytest.raises(ConfigError, match="takes bfloat16, kv_lora_rank 512, qk_rope_head_dim 64 and up to 128"):
            make_attention_backend("flashinfer_fa3", mla, heads, 64, dtype, CUDA)
    with pytest.raises(ConfigError, match=r"could not load its kernel \(AttributeError: .*: use 'triton'"):
        make_attention_backend("flashinfer_fa3", config(), HEADS, 64, torch.bfloat16, CUDA)


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
def test_flashinfer_takes_the_calls(
    plans: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    wrapper = pytest.importorskip("flashinfer.mla").BatchMLAPagedAttentionWrapper
    backend = FlashInferFA3(Wrapper, HEADS, SCALE, CPU)
    attend(backend, rows(2))
    fake = backend._runs[64]
    workspace, options = fake.made
    inspect.signature(wrapper.__init__).bind(None, workspace, **options)
    inspect.signature(wrapper.plan).bind(None, *fake.plans[0])
    arguments, keywords, _ = fake.runs[0]
    inspect.signature(wrapper.run).bind(None, *arguments, **keywords)
    source = inspect.getsource(wrapper)
    for name in ("_plan_info", "_int_workspace_buffer", "_kv_indices_buf"):
        assert f"self.{name}" in source

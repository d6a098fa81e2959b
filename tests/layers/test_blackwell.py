"""The adapters of FlashInfer's Blackwell kernels, without one: what they hand on, and that the installed package takes
it."""

import ast
import importlib.util
import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.base import ConfigError
from configs.hf import load_model_config
from configs.model import MLAConfig
from layers.attention import trtllm_gen
from layers.attention.backend import PagedRows, TorchAttention
from layers.attention.backends import make_attention_backend
from layers.attention.counters import counter_bytes
from layers.attention.trtllm_gen import TrtllmGenAttention
from layers.moe.cute_dsl import CuteDslExperts, ExpertShape, NvFp4Experts, activation_type
from tests.oracles import SHIPPED

CPU = torch.device("cpu")
HEADS, SMS = 16, 148
needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="flashinfer-python is not installed"
)


def config(**changes: int) -> MLAConfig:
    shipped = load_model_config(SHIPPED / "tiny-deepseek_v3-yarn").attention
    return shipped.model_copy(update={"kv_lora_rank": 512, "qk_rope_head_dim": 64, **changes})


class Decode:
    """Stands for trtllm_batch_decode_with_kv_cache_mla: keeps its arguments, answers ones."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **arguments: Any) -> torch.Tensor:
        self.calls.append(arguments)
        return torch.ones(*arguments["query"].shape[:3], 512, dtype=arguments["query"].dtype)


def attention() -> tuple[TrtllmGenAttention, Decode]:
    decode = Decode()
    return TrtllmGenAttention(decode, config(), HEADS, 100, SMS, CPU, TorchAttention()), decode


def test_dense_verify_rows() -> None:
    backend, decode = attention()
    table = torch.arange(24, dtype=torch.int32).view(2, 12)[:, ::2]
    lengths = torch.tensor([300, 301, 302, 0, 1, 2], dtype=torch.int32)
    q, cache = torch.zeros(6, HEADS, 576), torch.zeros(30, 64, 576)
    out = backend.decode(q, cache, PagedRows(table, lengths, 3, 330), scale=0.125, value_dim=512)
    assert out.shape == (6, HEADS, 512)
    assert (out[3] == 0).all() and (out[[0, 1, 2, 4, 5]] == 1).all()
    (call,) = decode.calls
    assert call["query"].shape == (2, 3, HEADS, 576) and call["kv_cache"] is cache
    assert call["seq_lens"].tolist() == [302, 2] and call["max_seq_len"] == 330
    assert torch.equal(call["block_tables"], table) and call["block_tables"].is_contiguous()
    assert (call["sparse_mla_top_k"], call["bmm1_scale"], call["bmm2_scale"]) == (0, 0.125, 1.0)


def test_sparse_rows() -> None:
    backend, decode = attention()
    slots = torch.full((3, 40), -1, dtype=torch.int32)
    rows = PagedRows(torch.zeros(3, 5, dtype=torch.int32), torch.tensor([7, 40, 300], dtype=torch.int32), 1, 320)
    backend.sparse(torch.zeros(3, HEADS, 576), torch.zeros(9, 64, 576), slots, rows, scale=1.0, value_dim=512)
    (call,) = decode.calls
    assert call["query"].shape == (3, 1, HEADS, 576) and call["block_tables"].shape == (3, 1, 40)
    assert call["seq_lens"].tolist() == [7, 40, 40]
    assert call["max_seq_len"] == call["sparse_mla_top_k"] == 40


def test_counters_are_kept_but_for_wider_launches() -> None:
    backend, decode = attention()
    table = torch.zeros(1, 1, dtype=torch.int32)
    for count in (1, 8193, 4):
        rows = PagedRows(table, torch.ones(count, dtype=torch.int32), count, 64)
        backend.decode(torch.zeros(count, HEADS, 576), torch.zeros(1, 64, 576), rows, scale=1.0, value_dim=512)
    first, wide, last = (call["multi_ctas_kv_counter_buffer"] for call in decode.calls)
    assert first is last and first.numel() == counter_bytes(8192, HEADS, SMS) and first.dtype == torch.uint8
    assert wide.numel() == counter_bytes(8193, HEADS, SMS)


@needs_flashinfer
def test_flashinfer_takes_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "10.0a")
    mla, utils = pytest.importorskip("flashinfer.mla"), pytest.importorskip("flashinfer.utils")
    backend, decode = attention()
    rows = PagedRows(torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1, 64)
    backend.decode(torch.zeros(1, HEADS, 576), torch.zeros(1, 64, 576), rows, scale=1.0, value_dim=512)
    inspect.signature(mla.trtllm_batch_decode_with_kv_cache_mla).bind(**decode.calls[0])
    for count in (1, 9, 8192):
        theirs = utils.get_trtllm_gen_multi_ctas_kv_counter_bytes(count, HEADS, SMS)
        assert counter_bytes(count, HEADS, SMS) == theirs


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for device in (CPU, cuda):
        with pytest.raises(ConfigError, match=r"'trtllm_gen' needs a Blackwell GPU \(SM100\): use 'auto'"):
            make_attention_backend("trtllm_gen", config(), HEADS, 64, torch.bfloat16, device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for changed, heads, dtype in (
        (config(), HEADS, torch.float32),
        (config(), 96, torch.bfloat16),
        (config(kv_lora_rank=256), HEADS, torch.bfloat16),
    ):
        with pytest.raises(ConfigError, match="takes bfloat16, kv_lora_rank 512, qk_rope_head_dim 64 and up to 64 or"):
            make_attention_backend("trtllm_gen", changed, heads, 64, dtype, cuda)


def test_it_is_made_on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    decode = Decode()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    card = SimpleNamespace(multi_processor_count=SMS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for name in ("require_flashinfer", "require_triton"):
        monkeypatch.setattr(trtllm_gen, name, lambda *names: None)
    module = SimpleNamespace(trtllm_batch_decode_with_kv_cache_mla=decode)
    monkeypatch.setattr(trtllm_gen, "import_module", lambda name: module)
    monkeypatch.setattr(trtllm_gen, "TrtllmGenAttention", lambda *arguments: arguments)
    made = make_attention_backend("trtllm_gen", config(), HEADS, 64, torch.bfloat16, torch.device("cuda"))
    assert made[:-1] == (decode, config(), HEADS, 64, SMS, torch.device("cuda"))


# ------------------------------------------------------------------------------------------------ experts


class Wrapper:
    """Stands for CuteDslMoEWrapper."""

    made: list[dict[str, Any]]
    calls: list[dict[str, Any]]

    def __init__(self, **arguments: Any) -> None:
        self.made.append({**arguments, "inference": torch.is_inference_mode_enabled()})

    def run(self, **arguments: Any) -> torch.Tensor:
        self.calls.append(arguments)
        return arguments["x"]


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    monkeypatch.setattr(Wrapper, "made", [], raising=False)
    monkeypatch.setattr(Wrapper, "calls", [], raising=False)
    return Wrapper


def experts(fill: int = 1) -> NvFp4Experts:
    def packed(*shape: int) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.uint8)

    alpha = torch.full((2,), float(fill))
    return NvFp4Experts(packed(2, 32, 16), packed(2, 32, 2), alpha, packed(2, 32, 8), packed(2, 32, 1), alpha.clone())


SHAPE = ExpertShape(num_experts=8, top_k=2, hidden_size=32, width=16, ep_rank=3, ep_size=4)


@needs_flashinfer
def test_the_wrapper_is_made_once_when_needed_and_outside_inference_mode(wrapper: type[Wrapper]) -> None:
    layer = CuteDslExperts(experts(), SHAPE, "silu", CPU, wrapper)
    assert not wrapper.made
    x, ids, weights = torch.zeros(3, 32).bfloat16(), torch.tensor([[0, 7]] * 3), torch.ones(3, 2, dtype=torch.float64)
    with torch.inference_mode():
        for _ in range(2):
            assert layer.run(x, ids, weights) is x
    (made,) = wrapper.made
    assert made["inference"] is False
    assert (made["num_experts"], made["num_local_experts"], made["local_expert_offset"]) == (8, 2, 6)
    assert (made["hidden_size"], made["intermediate_size"], made["top_k"]) == (32, 16, 2)
    assert made["quant_mode"] == "w4a16" and made["activation_type"] == 3
    call = wrapper.calls[0]
    assert (
        call["token_selected_experts"].dtype == torch.int32 and call["token_selected_experts"].tolist() == [[0, 7]] * 3
    )
    assert call["token_final_scales"].dtype == torch.float32
    assert call["x_sf"] is None and call["fc2_input_scale"] is None


@needs_flashinfer
def test_weights_are_reloaded_in_place(wrapper: type[Wrapper]) -> None:
    held = experts()
    layer = CuteDslExperts(held, SHAPE, "relu2", CPU, wrapper)
    addresses = [tensor.data_ptr() for tensor in held]
    layer.reload(experts(fill=5))
    layer.run(torch.zeros(1, 32), torch.zeros(1, 2), torch.ones(1, 2))
    call = wrapper.calls[0]
    names = ("w1_weight", "w1_weight_sf", "w1_alpha", "w2_weight", "w2_weight_sf", "w2_alpha")
    assert [call[name].data_ptr() for name in names] == addresses
    assert all((call[name] == 5).all() for name in names)
    other = experts(fill=9)._replace(down=torch.zeros(2, 32, 9, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"down was \[2, 32, 8\] .* would become \[2, 32, 9\] .* captured again"):
        layer.reload(other)
    assert all((tensor == 5).all() for tensor in held)


@needs_flashinfer
def test_activations() -> None:
    assert activation_type("silu") == 3 and activation_type("relu2") == 6  # Swiglu, Relu2
    for name in ("gelu", "SiLU", ""):
        with pytest.raises(ValueError, match=f"have 'silu' and 'relu2', not '{name}'"):
            activation_type(name)


@needs_flashinfer
def test_flashinfer_has_such_a_wrapper(wrapper: type[Wrapper]) -> None:
    """Read from its source: importing it needs CUDA libraries."""
    layer = CuteDslExperts(experts(), SHAPE, "silu", CPU, wrapper)
    layer.run(torch.zeros(1, 32), torch.zeros(1, 2), torch.ones(1, 2))
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None and spec.origin is not None
    source = Path(os.path.dirname(spec.origin), "fused_moe", "cute_dsl", "fused_moe.py").read_text()
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    (found,) = [node for node in classes if node.name == "CuteDslMoEWrapper"]
    methods = {node.name: node.args for node in found.body if isinstance(node, ast.FunctionDef)}
    for name, given in (("__init__", set(wrapper.made[0]) - {"inference"}), ("run", set(wrapper.calls[0]))):
        arguments = methods[name]
        known = [argument.arg for argument in arguments.args[1:]]
        required = set(known[: len(known) - len(arguments.defaults)])
        assert required <= given <= {*known, *(argument.arg for argument in arguments.kwonlyargs)}

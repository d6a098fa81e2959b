"""FlashInfer's CuTe-DSL experts for Blackwell: NVFP4 weights, bfloat16 activations (W4A16).

No Blackwell card was at hand: the calls are tested against FlashInfer's source, the kernels have not been run here, and
the engine, which keeps weights in bfloat16, does not offer them yet.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch

# Names of FlashInfer's ActivationType by the activation that a config.json names.
_ACTIVATIONS = {"silu": "Swiglu", "relu2": "Relu2"}


class NvFp4Experts(NamedTuple):
    """One rank's experts of one layer, in the layout that CuteDslMoEWrapper.run takes."""

    gate_up: torch.Tensor  # [experts, 2 * width, hidden / 2] uint8, two e2m1 numbers a byte (relu2: width, no gate)
    gate_up_scales: torch.Tensor  # e4m3, one for 16 numbers
    gate_up_alpha: torch.Tensor  # [experts] float32
    down: torch.Tensor  # [experts, hidden, width / 2] uint8
    down_scales: torch.Tensor
    down_alpha: torch.Tensor  # [experts] float32


class ExpertShape(NamedTuple):
    """Sizes of a layer over all ranks, and whose part this is: rank r of ep owns experts
    [r * num_experts / ep, (r + 1) * num_experts / ep)."""

    num_experts: int
    top_k: int
    hidden_size: int
    width: int
    ep_rank: int = 0
    ep_size: int = 1

    @property
    def num_local(self) -> int:
        return self.num_experts // self.ep_size


class CuteDslExperts:
    """Experts of one layer. The wrapper is made once, when it is first needed."""

    def __init__(
        self,
        weights: NvFp4Experts,
        shape: ExpertShape,
        activation: str,
        device: torch.device,
        wrapper: Callable[..., Any] | None = None,
    ) -> None:
        """`wrapper`: in place of flashinfer.CuteDslMoEWrapper. Raises ValueError for an activation it does not have."""
        self._weights = weights
        self._shape = shape
        self._activation = activation_type(activation)
        self._device = device
        self._make = wrapper
        self._wrapper: Any = None

    def run(self, x: torch.Tensor, expert_ids: torch.Tensor, expert_weights: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] bfloat16; expert_ids [rows, k], of all experts, and expert_weights [rows, k]
        -> [rows, hidden] bfloat16, the sum over this rank's experts."""
        if self._wrapper is None:
            self._wrapper = self._make_wrapper()
        w = self._weights
        return self._wrapper.run(
            x=x,
            x_sf=None,
            token_selected_experts=expert_ids.int(),
            token_final_scales=expert_weights.float(),
            w1_weight=w.gate_up,
            w1_weight_sf=w.gate_up_scales,
            w1_alpha=w.gate_up_alpha,
            fc2_input_scale=None,
            w2_weight=w.down,
            w2_weight_sf=w.down_scales,
            w2_alpha=w.down_alpha,
        )

    def reload(self, weights: NvFp4Experts) -> None:
        """Takes other values into the same memory, which captured graphs point to. Raises ValueError, and changes
        nothing, if a shape or dtype differs."""
        for name, old, new in zip(NvFp4Experts._fields, self._weights, weights, strict=True):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise ValueError(
                    f"{name} was {list(old.shape)} {old.dtype} and would become {list(new.shape)} {new.dtype}: "
                    "graphs that hold it would have to be captured again"
                )
        for old, new in zip(self._weights, weights, strict=True):
            old.copy_(new)

    def _make_wrapper(self) -> Any:
        """Outside inference mode: what the wrapper keeps is used again outside of it, and while graphs are captured."""
        make = self._make or import_module("flashinfer").CuteDslMoEWrapper
        shape = self._shape
        with torch.inference_mode(False):
            return make(
                num_experts=shape.num_experts,
                top_k=shape.top_k,
                hidden_size=shape.hidden_size,
                intermediate_size=shape.width,
                use_cuda_graph=True,
                num_local_experts=shape.num_local,
                local_expert_offset=shape.ep_rank * shape.num_local,
                output_dtype=torch.bfloat16,
                device=str(self._device),
                activation_type=self._activation,
                use_fused_finalize=False,  # sums in a fixed order
                quant_mode="w4a16",
            )


def activation_type(activation: str) -> int:
    """FlashInfer's ActivationType of an activation. Raises ValueError for others than silu and relu2."""
    if activation not in _ACTIVATIONS:
        raise ValueError(f"FlashInfer's CuTe-DSL experts have 'silu' and 'relu2', not {activation!r}")
    kinds = import_module("flashinfer").ActivationType
    return int(kinds[_ACTIVATIONS[activation]])

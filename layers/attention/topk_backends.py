"""Which selection backend runs: resolved once, from the config, when the engine is built."""

import torch

from configs.base import ConfigError
from layers.attention.flashinfer_topk import make_flashinfer_topk
from layers.attention.topk import TieBreak, TopKBackend, TorchTopK


def make_topk_backend(name: str, k: int, tie_break: TieBreak, deterministic: bool, device: torch.device) -> TopKBackend:
    """The backend of that name for selections of k; `auto` is FlashInfer's fused kernel where it can run, else torch.
    Raises ConfigError for one that cannot run here."""
    if name == "auto":
        try:
            return make_flashinfer_topk("flashinfer", k, tie_break, deterministic, device)
        except ConfigError:
            return TorchTopK(tie_break)
    if name == "torch":
        return TorchTopK(tie_break)
    if name == "flashinfer":
        return make_flashinfer_topk("flashinfer", k, tie_break, deterministic, device)
    if name == "flashinfer_unfused":
        return make_flashinfer_topk("flashinfer_unfused", k, tie_break, deterministic, device)
    raise ConfigError(f"topk_backend {name!r} is not known: use 'auto', 'torch', 'flashinfer' or 'flashinfer_unfused'")

"""Whether Triton kernels can run."""

import importlib.util

import torch

from configs.base import ConfigError


def triton_runs(device: torch.device) -> bool:
    """Whether Triton kernels can run there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def require_triton(setting: str, device: torch.device) -> None:
    """Raises ConfigError naming the setting unless Triton kernels can run on the device."""
    if not triton_runs(device):
        missing = "needs a GPU" if device.type != "cuda" else "needs the package triton, which is not installed"
        raise ConfigError(f"{setting} 'triton' {missing}: use 'auto' or 'torch'")

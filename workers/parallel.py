"""Process groups: the one place that starts torch.distributed."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from configs.engine import ParallelConfig
from layers.parallel import TensorParallel


def init_tensor_parallel(
    config: ParallelConfig, rank: int, rendezvous: str, device: torch.device, timeout_s: float
) -> TensorParallel:
    """Joins the group of `tp_size` ranks. `rendezvous` is a torch.distributed init_method (tcp:// or file://).

    A group of one needs no process group. Collectives that a peer never joins fail after `timeout_s` seconds.
    """
    if config.tp_size == 1:
        return TensorParallel()
    if rendezvous.startswith("file://") and device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks on this host: do not ask the resolver
    dist.init_process_group(
        backend="nccl" if device.type == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=config.tp_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    return TensorParallel(rank=rank, size=config.tp_size, ep_size=config.ep_size, group=dist.group.WORLD)


def leave() -> None:
    """Leaves the group without waiting for peers, who may be gone."""
    if dist.is_initialized():
        dist.destroy_process_group()

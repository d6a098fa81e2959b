"""Persistent counters of kernels that split a row over several thread blocks: the last block of a row to arrive
reduces what the others left, and sets the row's counter back to zero.

The layout is what FlashInfer's trtllm-gen kernels take as `multi_ctas_kv_counter_buffer`.
"""

from collections.abc import Callable

import torch

MIN_ROWS = 8192
_ALIGNMENT = 16


def counter_bytes(rows: int, q_heads: int, sm_count: int) -> int:
    """One int32 for each (row, query head), no fewer than multiprocessors, in whole groups of eight."""
    return 4 * (-(-max(rows * q_heads, sm_count) // 8) * 8)


class CounterBuffers:
    """Zeroed uint8 buffers of one device, one for each stream on which kernels may run at the same time.

    A captured graph holds the address of its stream's buffer: only `reserve` ever replaces one, and what it replaces
    stays alive.
    """

    def __init__(
        self,
        q_heads: int,
        sm_count: int,
        device: torch.device,
        capturing: Callable[[], bool] = lambda: torch.cuda.is_available() and torch.cuda.is_current_stream_capturing(),
    ) -> None:
        self._q_heads = q_heads
        self._sm_count = sm_count
        self._device = device
        self._capturing = capturing
        self._buffers: dict[int, torch.Tensor] = {}
        self._outgrown: list[torch.Tensor] = []

    def reserve(self, rows: int, stream: int = 0) -> torch.Tensor:
        """The stream's buffer, kept for launches of up to max(rows, 8192) rows: the same object if it suffices, new
        zeros if not. Raises RuntimeError if it would have to grow while a graph is captured."""
        rows = max(rows, MIN_ROWS)
        buffer = self._buffers.get(stream)
        if buffer is None or buffer.numel() < counter_bytes(rows, self._q_heads, self._sm_count):
            grown = self._zeros(rows)
            if buffer is not None:
                self._outgrown.append(buffer)
            buffer = self._buffers[stream] = grown
        return buffer

    def take(self, rows: int, stream: int = 0) -> torch.Tensor:
        """Counters for one launch of so many rows: the stream's buffer, or zeros of its own for a launch wider than was
        reserved. Raises RuntimeError if it would need those while a graph is captured."""
        buffer = self._buffers.get(stream)
        if buffer is not None and buffer.numel() >= counter_bytes(rows, self._q_heads, self._sm_count):
            return buffer
        return self._zeros(rows)

    def _zeros(self, rows: int) -> torch.Tensor:
        if self._capturing():
            raise RuntimeError(
                f"counters for {rows} rows of {self._q_heads} heads are needed while a graph is captured: "
                "reserve them before"
            )
        size = counter_bytes(rows, self._q_heads, self._sm_count)
        buffer = torch.zeros(size, dtype=torch.uint8, device=self._device)
        assert buffer.data_ptr() % _ALIGNMENT == 0  # torch aligns to 64 bytes and more
        return buffer

"""Sizes and life of the counters of split-KV kernels."""

import weakref

import pytest
import torch

from layers.attention.counters import CounterBuffers, counter_bytes

CPU = torch.device("cpu")


class Capture:
    """Says whether a graph is being captured."""

    active = False

    def __call__(self) -> bool:
        return self.active


@pytest.mark.parametrize(
    ("rows", "heads", "sms", "size"),
    [(1, 1, 132, 4 * 136), (1, 128, 132, 4 * 136), (2, 128, 132, 4 * 256), (3, 20, 8, 4 * 64), (8192, 16, 132, 524288)],
)
def test_size(rows: int, heads: int, sms: int, size: int) -> None:
    assert counter_bytes(rows, heads, sms) == size


def test_the_same_buffer_until_it_must_grow() -> None:
    buffers = CounterBuffers(16, 132, CPU)
    first = buffers.reserve(5)
    assert first.dtype == torch.uint8 and first.numel() == counter_bytes(8192, 16, 132) and not first.any()
    assert first.data_ptr() % 16 == 0
    assert buffers.reserve(8192) is first and buffers.take(8192) is first and buffers.take(1) is first
    first[0] = 1
    grown = buffers.reserve(8193)
    assert grown is not first and grown.numel() == counter_bytes(8193, 16, 132) and not grown.any()
    assert buffers.reserve(1) is grown
    # A graph may hold the address of the old one, whose memory must not be given to anything else.
    address, alive = first.data_ptr(), weakref.ref(first)
    del first
    assert alive() is not None and alive().data_ptr() == address


def test_a_wider_launch_takes_a_temporary() -> None:
    buffers = CounterBuffers(16, 132, CPU)
    kept = buffers.reserve(1)
    wide = buffers.take(8193)
    assert wide is not kept and wide.numel() == counter_bytes(8193, 16, 132) and not wide.any()
    assert buffers.take(8193) is not wide
    assert buffers.take(8192) is kept


def test_streams_do_not_share() -> None:
    buffers = CounterBuffers(4, 132, CPU)
    assert buffers.reserve(1, stream=0) is not buffers.reserve(1, stream=1)
    assert buffers.take(1, stream=1) is buffers.reserve(1, stream=1)
    assert buffers.take(1, stream=2) is not buffers.take(1, stream=2)


def test_nothing_is_made_during_capture() -> None:
    capture = Capture()
    buffers = CounterBuffers(16, 132, CPU, capture)
    kept = buffers.reserve(1)
    capture.active = True
    assert buffers.take(8192) is kept and buffers.reserve(8192) is kept
    for call in (buffers.reserve, buffers.take):
        with pytest.raises(RuntimeError, match=r"counters for 8193 rows of 16 heads .* reserve them before"):
            call(8193)

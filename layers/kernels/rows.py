"""Triton kernels for what lies between a layer's matmuls: one program for each row of a batch."""

import torch
import triton
import triton.language as tl

_HEADS = 16  # that one program rotates


def add_norm(
    x: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    exact: torch.Tensor | None,
) -> None:
    """x += delta (in place, unless delta is None); out = RMS norm of x, in out's dtype, and in float32 into `exact`.

    x [rows, size] of any float dtype, rows may be strided; delta [rows, size]; weight [size] float32; out and exact
    [rows, size], contiguous.
    """
    rows, size = x.shape
    if not rows:
        return
    _add_norm[(rows,)](
        x,
        delta,
        weight,
        out,
        exact,
        size,
        eps,
        x.stride(0),
        delta.stride(0) if delta is not None else 0,
        HAS_DELTA=delta is not None,
        HAS_EXACT=exact is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 2048 else 4,
    )


@triton.jit
def _add_norm(
    x,
    delta,
    weight,
    out,
    exact,
    size,
    eps,
    x_stride,
    delta_stride,
    HAS_DELTA: tl.constexpr,
    HAS_EXACT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * x_stride + column, inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + row * delta_stride + column, inside, other=0.0).to(tl.float32)
        tl.store(x + row * x_stride + column, value, inside)
    scale = tl.rsqrt(tl.sum(value * value) / size + eps)
    value = value * scale * tl.load(weight + column, inside, other=0.0)
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), inside)
    if HAS_EXACT:
        tl.store(exact + row * size + column, value, inside)


def rotate_and_store(
    q: torch.Tensor | None,
    q_out: torch.Tensor | None,
    kv: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    turn: torch.Tensor,
    interleaved: bool,
    cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """q_out = q rotated; the cache entry of each row = (RMS norm of its latent, its rotated rope key).

    q, q_out [rows, heads, rope] (views; may be the same); kv [rows, latent + rope]; weight [latent] float32; turn
    [rows, 1, rope / 2] complex64; cache [entries, latent + rope]; slots [rows] int64.
    """
    rows, width = kv.shape
    if not rows:
        return
    rope = 2 * turn.shape[-1]
    latent = width - rope
    heads = q.shape[1] if q is not None else 0
    angles = torch.view_as_real(turn)
    source, target = (q, q_out) if q is not None and q_out is not None else (kv, kv)
    _rotate_and_store[(rows, 1 + triton.cdiv(heads, _HEADS))](
        source,
        target,
        kv,
        weight,
        angles,
        cache,
        slots,
        eps,
        heads,
        latent,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        kv.stride(0),
        angles.stride(0),
        cache.stride(0),
        HALF=rope // 2,
        HALF_BLOCK=triton.next_power_of_2(rope // 2),
        HEADS_BLOCK=min(_HEADS, triton.next_power_of_2(max(heads, 1))),
        LATENT_BLOCK=triton.next_power_of_2(latent),
        STEP=2 if interleaved else 1,
        APART=1 if interleaved else rope // 2,
    )


@triton.jit(do_not_specialize=["slots"])
def _rotate_and_store(
    q,
    q_out,
    kv,
    weight,
    angles,
    cache,
    slots,
    eps,
    heads,
    latent,
    q_row,
    q_head,
    out_row,
    out_head,
    kv_row,
    angle_row,
    cache_row,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    LATENT_BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    APART: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    cos = tl.load(angles + row * angle_row + 2 * pair, inside, other=0.0)
    sin = tl.load(angles + row * angle_row + 2 * pair + 1, inside, other=0.0)
    if tl.program_id(1) == 0:
        column = tl.arange(0, LATENT_BLOCK)
        normed = tl.load(kv + row * kv_row + column, column < latent, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(normed * normed) / latent + eps)
        normed = normed * scale * tl.load(weight + column, column < latent, other=0.0)
        entry = cache + tl.load(slots + row) * cache_row
        tl.store(entry + column, normed.to(cache.dtype.element_ty), column < latent)
        key = kv + row * kv_row + latent + pair * STEP
        first = tl.load(key, inside, other=0.0).to(tl.float32)
        second = tl.load(key + APART, inside, other=0.0).to(tl.float32)
        entry += latent + pair * STEP
        tl.store(entry, (first * cos - second * sin).to(cache.dtype.element_ty), inside)
        tl.store(entry + APART, (first * sin + second * cos).to(cache.dtype.element_ty), inside)
    else:
        _turn_heads(
            q + row * q_row, q_head, q_out + row * out_row, out_head, cos, sin, tl.program_id(1) - 1, heads, inside,
            pair, HEADS_BLOCK, STEP, APART,
        )  # fmt: skip


@triton.jit
def _turn_heads(
    q, q_head, q_out, out_head, cos, sin, block, heads, inside, pair,
    HEADS_BLOCK: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    head = (block * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    inside = (head < heads) & inside[None, :]
    source = q + head * q_head + pair[None, :] * STEP
    target = q_out + head * out_head + pair[None, :] * STEP
    first = tl.load(source, inside, other=0.0).to(tl.float32)
    second = tl.load(source + APART, inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # source and target may be the same
    tl.store(target, (first * cos[None, :] - second * sin[None, :]).to(q_out.dtype.element_ty), inside)
    tl.store(target + APART, (first * sin[None, :] + second * cos[None, :]).to(q_out.dtype.element_ty), inside)


def rotate_in_place(x: torch.Tensor, turn: torch.Tensor, interleaved: bool) -> None:
    """Rotates the first channels of x [rows, heads, d]; turn [rows, 1, rope / 2] complex64."""
    rows, heads, _ = x.shape
    if not rows:
        return
    half = turn.shape[-1]
    angles = torch.view_as_real(turn)
    _rotate[(rows, triton.cdiv(heads, _HEADS))](
        x,
        angles,
        heads,
        x.stride(0),
        x.stride(1),
        angles.stride(0),
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        HEADS_BLOCK=min(_HEADS, triton.next_power_of_2(heads)),
        STEP=2 if interleaved else 1,
        APART=1 if interleaved else half,
    )


@triton.jit
def _rotate(
    x, angles, heads, x_row, x_head, angle_row,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr, STEP: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    cos = tl.load(angles + row * angle_row + 2 * pair, inside, other=0.0)
    sin = tl.load(angles + row * angle_row + 2 * pair + 1, inside, other=0.0)
    _turn_heads(
        x + row * x_row, x_head, x + row * x_row, x_head, cos, sin, tl.program_id(1), heads, inside, pair,
        HEADS_BLOCK, STEP, APART,
    )  # fmt: skip


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 * width] (gate first) -> [rows, width] in its dtype."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _silu_mul[(rows, triton.cdiv(width, 1024))](gate_up, out, width, gate_up.stride(0), BLOCK=1024)
    return out


@triton.jit
def _silu_mul(gate_up, out, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * stride + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + column, inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), inside)

"""Operations between a model's matrix products on GPUs, in Triton. Values are computed in fp32."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    activations, weight, output, stride, eps, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise one of a token's ``HEADS`` rows of ``WIDTH`` values per program."""
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    element = tl.arange(0, BLOCK)
    inside = element < WIDTH
    values = tl.load(activations + token * stride + head * WIDTH + element, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    normed = (values * factor).to(output.dtype.element_ty).to(tl.float32)  # rounded before it is scaled
    weights = tl.load(weight + head * WIDTH + element, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * WIDTH + element, (normed * weights).to(output.dtype.element_ty), mask=inside)


@triton.jit
def rotate_kernel(
    heads, cos, sin, stride, HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one token's heads of ``2 * HALF`` values per program, in place."""
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEAD_BLOCK), tl.arange(0, BLOCK)
    inside = pair < HALF
    angle = token * (2 * HALF) + pair
    first_cos = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    second_cos = tl.load(cos + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    first_sin = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    second_sin = tl.load(sin + angle + HALF, mask=inside, other=0.0).to(tl.float32)
    places = heads + token * stride + head[:, None] * (2 * HALF) + pair[None, :]
    mask = (head < HEADS)[:, None] & inside[None, :]
    first = tl.load(places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(places + HALF, mask=mask, other=0.0).to(tl.float32)
    kind = heads.dtype.element_ty
    tl.store(places, (first * first_cos[None, :] - second * first_sin[None, :]).to(kind), mask=mask)
    tl.store(places + HALF, (second * second_cos[None, :] + first * second_sin[None, :]).to(kind), mask=mask)


@triton.jit
def gate_kernel(gate_up, output, WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Compute ``BLOCK`` values of one token per program. ``KIND`` is an ``Activation``."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = element < WIDTH
    gate = tl.load(gate_up + token * (2 * WIDTH) + element, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + element, mask=inside, other=0.0).to(tl.float32)
    if KIND == 0:
        gate *= tl.sigmoid(gate)
    elif KIND == 1:  # tanh(x) = 2 sigmoid(2 x) - 1
        gate *= tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    elif KIND == 2:
        gate *= tl.sigmoid(1.702 * gate)
    else:
        gate *= 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
    tl.store(output + token * WIDTH + element, (gate * up).to(output.dtype.element_ty), mask=inside)

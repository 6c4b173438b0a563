"""The causal convolution and the gated delta rule on GPUs, in Triton; ``kernels/cpu/delta_block.h`` has the formulas.

Kernels read a step's tables (``DeltaTables``), int64 on the device. A layer's ``channels`` are the queries and keys of
``KEY_HEADS`` heads, then the values of ``VALUE_HEADS`` heads. Columns of a state are independent, so programs take
``COLUMNS`` of them. Blocks of ``DIM_BLOCK`` and ``COLUMNS`` are padded; masked values are zero.

Products accumulate in fp32. ``tf32x3`` multiplies fp32 operands as three TF32 products, which is nearly exact.
"""

import triton
import triton.language as tl

PAST = tl.constexpr(3)  # tokens before a new one that the convolution sees
L2_EPS = tl.constexpr(1e-6)
LOWEST = tl.constexpr(-200.0)  # lower bound of a decay's logarithm, whose exponential is 0 in any case


@triton.jit
def convolve_kernel(
    mixed, taps, conv, convolved, starts, lens, slots, fresh,
    mixed_stride, conv_stride, past_stride, channels, query_scale,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Convolve one head's channels of one sequence, ``TOKENS`` at a time, and update its part of the state ``conv``.

    Queries and keys are normalised, and queries multiplied by ``query_scale``. ``convolved`` is fp32 [T, channels].
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    start, count = tl.load(starts + sequence), tl.load(lens + sequence)
    past = conv + tl.load(slots + sequence) * conv_stride
    oldest = tl.where(tl.load(fresh + sequence) == 0, -PAST, 0)  # of the tokens that are read
    is_value = head >= 2 * KEY_HEADS
    first = tl.where(is_value, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM)
    dims = tl.arange(0, DIM_BLOCK)
    exists = dims < tl.where(is_value, VALUE_DIM, KEY_DIM)
    own = mixed + start * mixed_stride + first + dims
    for base in range(0, count, TOKENS):
        tokens = base + tl.arange(0, TOKENS)
        inside = (tokens < count)[:, None] & exists[None, :]
        sums = tl.zeros([TOKENS, DIM_BLOCK], tl.float32)
        for tap in tl.static_range(PAST + 1):
            places = tokens - PAST + tap
            new = tl.load(
                own[None, :] + places[:, None] * mixed_stride, mask=inside & (places >= 0)[:, None], other=0.0
            )
            before = past + (places[:, None] + PAST) * past_stride + first + dims[None, :]
            old = tl.load(before, mask=inside & ((places < 0) & (places >= oldest))[:, None], other=0.0)
            weights = tl.load(taps + tap * channels + first + dims, mask=exists, other=0.0).to(tl.float32)
            sums += weights[None, :] * (new.to(tl.float32) + old.to(tl.float32))
        sums = sums.to(mixed.dtype.element_ty).to(tl.float32)
        values = (sums * tl.sigmoid(sums)).to(mixed.dtype.element_ty).to(tl.float32)
        factors = 1 / tl.sqrt(tl.sum(values * values, 1) + L2_EPS)
        factors = tl.where(is_value, 1.0, tl.where(head < KEY_HEADS, factors * query_scale, factors))
        to = convolved + (start + tokens[:, None]) * channels + first + dims[None, :]
        tl.store(to, values * factors[:, None], mask=inside)
    rows = tl.arange(0, 4)
    places = count - PAST + rows
    kept = (rows < PAST)[:, None] & exists[None, :]
    new = tl.load(own[None, :] + places[:, None] * mixed_stride, mask=kept & (places >= 0)[:, None], other=0.0)
    before = past + (places[:, None] + PAST) * past_stride + first + dims[None, :]
    old = tl.load(before, mask=kept & ((places < 0) & (places >= oldest))[:, None], other=0.0)
    tl.debug_barrier()  # all of the program has read the old tokens
    tl.store(past + rows[:, None] * past_stride + first + dims[None, :], new + old, mask=kept)


@triton.jit
def _gates(a, b, rates, dt_bias, tokens, exists, a_stride, b_stride, head):
    """Return logarithms of decays and betas of ``tokens``; 0 for those that don't exist."""
    x = tl.load(a + tokens * a_stride + head, mask=exists, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.maximum(x, 0.0) + tl.log(1 + tl.exp(-tl.abs(x)))
    log_decays = tl.where(exists, tl.maximum(-tl.load(rates + head) * softplus, LOWEST), 0.0)
    betas = tl.sigmoid(tl.load(b + tokens * b_stride + head, mask=exists, other=0.0).to(tl.float32))
    return log_decays, tl.where(exists, betas, 0.0)


@triton.jit
def single_kernel(
    convolved, a, b, rates, dt_bias, recurrent, output, singles, starts, lens, slots, fresh,
    a_stride, b_stride, recurrent_stride, channels,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Advance ``COLUMNS`` of a value head's state by its sequence's last token."""
    sequence, head = tl.load(singles + tl.program_id(0)), tl.program_id(1)
    count = tl.load(lens + sequence)
    token = tl.load(starts + sequence) + count - 1
    rows = tl.where(tl.load(fresh + sequence) * (count == 1) == 0, KEY_DIM, 0)  # that are read
    dims = tl.arange(0, DIM_BLOCK)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    own = convolved + token * channels
    query = tl.load(own + key_head * KEY_DIM + dims, mask=dims < KEY_DIM, other=0.0)
    key = tl.load(own + (KEY_HEADS + key_head) * KEY_DIM + dims, mask=dims < KEY_DIM, other=0.0)
    values = own + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    value = tl.load(values + columns, mask=columns < VALUE_DIM, other=0.0)
    log_decay, beta = _gates(a, b, rates, dt_bias, token, True, a_stride, b_stride, head)

    place = tl.load(slots + sequence) * recurrent_stride + head * KEY_DIM * VALUE_DIM
    offsets = place + dims[:, None] * VALUE_DIM + columns[None, :]
    mask = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    state = tl.load(recurrent + offsets, mask=mask & (dims < rows)[:, None], other=0.0) * tl.exp(log_decay)
    change = beta * (value - tl.sum(state * key[:, None], 0))
    state += key[:, None] * change[None, :]
    tl.store(recurrent + offsets, state, mask=mask)
    result = tl.sum(state * query[:, None], 0).to(output.dtype.element_ty)
    tl.store(output + (token * VALUE_HEADS + head) * VALUE_DIM + columns, result, mask=columns < VALUE_DIM)


@triton.jit
def _solve(system, wanted, TOKENS: tl.constexpr):
    """Return the solution of (1 + system) x = wanted, row by row: ``system`` [TOKENS, TOKENS] is strictly lower
    triangular. Powers of it, which would be products of whole matrices, can be huge where keys resemble each other."""
    rows = tl.arange(0, TOKENS)[:, None]
    found = wanted
    for row in range(1, TOKENS):
        factors = tl.sum(tl.where(rows == row, system, 0.0), 0)
        earlier = tl.sum(factors[:, None] * found, 0)
        found = tl.where(rows == row, found - earlier[None, :], found)
    return found


@triton.jit
def several_kernel(
    convolved, a, b, rates, dt_bias, recurrent, output, several, starts, lens, slots, fresh,
    a_stride, b_stride, recurrent_stride, channels,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Advance ``COLUMNS`` of a value head's state by its sequence's tokens, in blocks of ``TOKENS``.

    A last block of one token is left to ``single_kernel``.
    """
    sequence, head = tl.load(several + tl.program_id(0)), tl.program_id(1)
    start, count = tl.load(starts + sequence), tl.load(lens + sequence)
    whole = tl.where(count % TOKENS == 1, count - 1, count)
    dims = tl.arange(0, DIM_BLOCK)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    place = tl.load(slots + sequence) * recurrent_stride + head * KEY_DIM * VALUE_DIM
    offsets = place + dims[:, None] * VALUE_DIM + columns[None, :]
    mask = (dims < KEY_DIM)[:, None] & (columns < VALUE_DIM)[None, :]
    rows = tl.where(tl.load(fresh + sequence) == 0, KEY_DIM, 0)  # that are read
    state = tl.load(recurrent + offsets, mask=mask & (dims < rows)[:, None], other=0.0)

    block = tl.arange(0, TOKENS)
    later, same = block[:, None] > block[None, :], block[:, None] == block[None, :]
    for base in range(0, whole, TOKENS):
        exists = base + block < whole
        tokens = start + base + block
        own = convolved + tokens[:, None] * channels
        inside = exists[:, None] & (dims < KEY_DIM)[None, :]
        query = tl.load(own + key_head * KEY_DIM + dims[None, :], mask=inside, other=0.0)
        key = tl.load(own + (KEY_HEADS + key_head) * KEY_DIM + dims[None, :], mask=inside, other=0.0)
        inside = exists[:, None] & (columns < VALUE_DIM)[None, :]
        values = own + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
        value = tl.load(values + columns[None, :], mask=inside, other=0.0)
        log_decays, betas = _gates(a, b, rates, dt_bias, tokens, exists, a_stride, b_stride, head)

        # from token j to token i: sums of their own, since differences of sums would lose digits after a strong decay
        until = tl.where(later | same, 1.0, 0.0)  # of [i, l]: l is at most i
        after = tl.where(later, log_decays[:, None], 0.0)  # of [l, j]: l is after j
        between = tl.where(later | same, tl.exp(tl.dot(until, after, input_precision="tf32x3")), 0.0)
        since_start = tl.exp(tl.sum(tl.where(later | same, log_decays[None, :], 0.0), 1))
        until_end = tl.exp(tl.sum(after, 0))

        by_keys = tl.dot(key, tl.trans(key), input_precision="tf32x3") * between * betas[:, None]
        wanted = value - tl.dot(key, state, input_precision="tf32x3") * since_start[:, None]
        changes = _solve(tl.where(later, by_keys, 0.0), wanted * betas[:, None], TOKENS)
        attention = tl.dot(query, tl.trans(key), input_precision="tf32x3") * between
        result = tl.dot(query, state, input_precision="tf32x3") * since_start[:, None]
        result += tl.dot(attention, changes, input_precision="tf32x3")
        to = output + (tokens[:, None] * VALUE_HEADS + head) * VALUE_DIM + columns[None, :]
        tl.store(to, result.to(output.dtype.element_ty), mask=inside)
        state *= tl.exp(tl.sum(log_decays, 0))
        state += tl.dot(tl.trans(key), changes * until_end[:, None], input_precision="tf32x3")
    tl.store(recurrent + offsets, state, mask=mask)

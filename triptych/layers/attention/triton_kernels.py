"""Attention over the paged KV cache on GPUs, in Triton: decode, prefill, and writing the cache.

Kernels read a step's tables (``tables.py``), int64 on the device. Caches are [pages, page_size, kv_heads, head_dim],
contiguous; queries [T, heads, head_dim], contiguous except for the stride of T. The query heads of a group, which share
a kv head, are rows of one matrix, so that keys and values are read once for all of them. Softmax is computed online
over blocks of keys (Milakov and Gimelshein, arXiv:1805.02867), as in FlashAttention (arXiv:2205.14135). It uses base 2,
for which GPUs have an instruction: scores include the factor log2(e), and so do sinks.

A key has ``DIM + REST`` values. Its value has ``DIM``: those of another cache or, if ``SHARED``, the key's first ones.
Query heads that share a kv head are processed in ``GROUPS`` groups in all, one or more for each kv head.

``WINDOW`` is the number of tokens that each token attends to, including itself, or with ``CHUNKED`` the length of the
chunks to which attention is limited; ``CAP`` is the soft limit of scores; 0 for none. ``SINKS`` says whether there are
``sinks``, fp32 [heads]: logits without values.

Products accumulate in fp32. ``tf32x3`` multiplies fp32 operands as three TF32 products, which is nearly exact; the
default rounds them to one. fp32 on ordinary cores (``ieee``) would need too many registers.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
SMALLEST = tl.constexpr(1e-30)  # below the total of any row with keys, which is at least 1
NEVER = tl.constexpr(-1e30)  # a score below all others; finite, so that the difference of two is a number


@triton.jit
def write_kernel(
    key, value, key_cache, value_cache, slots, key_stride, value_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """Write one token per program: its ``WIDTH`` = kv_heads * head_dim values of K and of V go to its slot. If values
    are ``SHARED``, there is no V."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slots + token) * WIDTH
    element = tl.arange(0, BLOCK)
    inside = element < WIDTH
    keys = tl.load(key + token * key_stride + element, mask=inside)
    tl.store(key_cache + place + element, keys.to(key_cache.dtype.element_ty), mask=inside)
    if not SHARED:
        values = tl.load(value + token * value_stride + element, mask=inside)
        tl.store(value_cache + place + element, values.to(value_cache.dtype.element_ty), mask=inside)


@triton.jit
def _attend_block(
    query, rest, key_cache, value_cache, page_table, kv_head, places, inside, visible, scale, maxima, totals, sums,
    KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    REST: tl.constexpr, REST_BLOCK: tl.constexpr, SHARED: tl.constexpr, CAP: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Add one block of keys to the online softmax.

    ``query`` [rows, DIM_BLOCK] and ``rest`` [rows, REST_BLOCK] are the queries; ``rest`` isn't used without ``REST``.

    ``places`` [KEYS] are the keys' token indices, ``inside`` [KEYS] marks those that exist, ``visible`` [rows, KEYS]
    those that a row attends to; with ``ALL`` that is each of them, and neither mask is read. Returns the updated
    ``maxima``, ``totals`` [rows] and ``sums`` [rows, DIM_BLOCK].
    """
    dims = tl.arange(0, DIM_BLOCK)
    pages = tl.load(page_table + places // PAGE_SIZE, mask=None if ALL else inside, other=None if ALL else 0)
    heads = ((pages * PAGE_SIZE + places % PAGE_SIZE) * KV_HEADS + kv_head) * (DIM + REST)
    offsets = heads[:, None] + dims[None, :]
    # unwritten parts of the cache may hold NaN, which a weight of 0 wouldn't cancel
    mask = (dims < DIM)[None, :]
    if not ALL:
        mask = mask & inside[:, None]
    keys = tl.load(key_cache + offsets, mask=mask, other=0.0).to(query.dtype)
    values = keys
    if not SHARED:
        values = tl.load(value_cache + offsets, mask=mask, other=0.0).to(query.dtype)
    scores = tl.dot(query, tl.trans(keys), input_precision="tf32x3")
    if REST > 0:
        more = tl.arange(0, REST_BLOCK)
        rest_mask = (more < REST)[None, :]
        if not ALL:
            rest_mask = rest_mask & inside[:, None]
        rest_keys = tl.load(key_cache + heads[:, None] + DIM + more[None, :], mask=rest_mask, other=0.0)
        scores = tl.dot(rest, tl.trans(rest_keys.to(query.dtype)), scores, input_precision="tf32x3")
    scores *= scale
    if CAP > 0:  # CAP * tanh(score / CAP)
        scores = (1 - 2 / (tl.exp2(scores * (2 / CAP)) + 1)) * (CAP * LOG2_E)
    if not ALL:
        scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(maxima, tl.max(scores, 1))
    rescale = tl.exp2(maxima - higher)
    weights = tl.exp2(scores - higher[:, None])
    totals = totals * rescale + tl.sum(weights, 1)
    sums = sums * rescale[:, None] + tl.dot(weights.to(query.dtype), values, input_precision="tf32x3")
    return higher, totals, sums


@triton.jit
def _load_queries(
    rows, exists, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr
):
    """Return the queries that begin at the pointers ``rows``: [rows, DIM_BLOCK], and [rows, REST_BLOCK] of the rest."""
    dims = tl.arange(0, DIM_BLOCK)
    queries = tl.load(rows[:, None] + dims[None, :], mask=exists[:, None] & (dims < DIM)[None, :], other=0.0)
    rest = queries
    if REST > 0:
        more = tl.arange(0, REST_BLOCK)
        rest = tl.load(rows[:, None] + DIM + more[None, :], mask=exists[:, None] & (more < REST)[None, :], other=0.0)
    return queries, rest


@triton.jit
def _start_softmax(sinks, heads, exists, SINKS: tl.constexpr, ROWS: tl.constexpr):
    """Return the first ``maxima`` and ``totals`` of rows with these heads. A sink is a key without a value."""
    maxima = tl.full([ROWS], NEVER, tl.float32)
    totals = tl.zeros([ROWS], tl.float32)
    if SINKS:
        maxima = tl.maximum(tl.load(sinks + heads, mask=exists, other=0.0) * LOG2_E, maxima)
        totals += 1
    return maxima, totals


@triton.jit
def _first_read(position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return the first key that a token at ``position`` of its sequence attends to."""
    if CHUNKED:
        first = position - position % WINDOW
    elif WINDOW > 0:
        first = tl.maximum(position - WINDOW + 1, 0)
    else:
        first = position * 0
    return first


@triton.jit
def _mean(sums, totals):
    """Return ``sums`` [rows, DIM_BLOCK] divided by ``totals`` [rows], which are 0 in rows without keys."""
    return sums / tl.maximum(totals, SMALLEST)[:, None]


@triton.jit
def decode_kernel(
    query, key_cache, value_cache, sinks, output, partial_sums, partial_maxima, partial_totals,
    decodes, query_starts, kv_lens, page_starts, pages, query_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Attend from one new token, for one group of query heads, to one part of the context per program.

    As in Flash-Decoding, splitting the context keeps a GPU busy with few sequences. ``SPLITS`` doesn't depend on
    lengths, so that a CUDA graph can record the launch; a short context leaves splits empty, and a negative index of a
    sequence all of them. With one split the result goes to ``output``, otherwise to the partial tensors, for
    ``reduce_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    split = tl.program_id(2)
    sequence = tl.load(decodes + row)
    is_used = sequence >= 0
    sequence = tl.maximum(sequence, 0)
    token = tl.load(query_starts + sequence)
    kv_len = tl.where(is_used, tl.load(kv_lens + sequence), 0)
    page_table = pages + tl.load(page_starts + sequence)
    visible = _first_read(tl.maximum(kv_len - 1, 0), WINDOW, CHUNKED)
    span = tl.cdiv(tl.cdiv(kv_len - visible, SPLITS), KEYS) * KEYS
    start = visible + split * span
    end = tl.minimum(start + span, kv_len)

    GROUP: tl.constexpr = HEADS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)
    heads = which * GROUP + group
    dims = tl.arange(0, DIM_BLOCK)
    exists = group < tl.where(is_used, GROUP, 0)
    mask = exists[:, None] & (dims < DIM)[None, :]
    rows = query + token * query_stride + heads * (DIM + REST)
    queries, rest = _load_queries(rows, exists, DIM, DIM_BLOCK, REST, REST_BLOCK)

    maxima, totals = _start_softmax(sinks, heads, exists, SINKS, GROUP_BLOCK)
    if SPLITS > 1:  # only the first split has the sinks
        maxima = tl.where(split == 0, maxima, NEVER)
        totals = tl.where(split == 0, totals, 0.0)
    sums = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    for base in range(start, end, KEYS):
        places = base + tl.arange(0, KEYS)
        inside = places < end
        maxima, totals, sums = _attend_block(
            queries, rest, key_cache, value_cache, page_table, which // (GROUPS // KV_HEADS), places, inside,
            inside[None, :], scale, maxima, totals, sums,
            KV_HEADS, PAGE_SIZE, DIM, DIM_BLOCK, REST, REST_BLOCK, SHARED, CAP, ALL=False,
        )  # fmt: skip

    if SPLITS == 1:
        result = _mean(sums, totals).to(output.dtype.element_ty)
        tl.store(output + (token * HEADS + heads[:, None]) * DIM + dims[None, :], result, mask=mask)
    else:
        part = (row * HEADS + heads) * SPLITS + split
        tl.store(partial_maxima + part, maxima, mask=exists)
        tl.store(partial_totals + part, totals, mask=exists)
        tl.store(partial_sums + part[:, None] * DIM + dims[None, :], sums, mask=mask)


@triton.jit
def reduce_kernel(
    output, partial_sums, partial_maxima, partial_totals, decodes, query_starts,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Combine the splits of the context for one new token and one query head per program.

    An empty split has the maximum ``NEVER``, hence a weight of 0; the first split is never empty.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    sequence = tl.load(decodes + row)
    token = tl.load(query_starts + tl.maximum(sequence, 0))
    part = (row * HEADS + head) * SPLITS + tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM_BLOCK)
    is_written = tl.arange(0, SPLITS) < tl.where(sequence >= 0, SPLITS, 0)
    mask = dims < tl.where(sequence >= 0, DIM, 0)
    maxima = tl.load(partial_maxima + part, mask=is_written, other=0.0)
    weights = tl.exp2(maxima - tl.max(maxima, 0))
    total = tl.sum(weights * tl.load(partial_totals + part, mask=is_written, other=1.0), 0)
    sums = tl.load(partial_sums + part[:, None] * DIM + dims[None, :], mask=mask[None, :], other=0.0)
    result = tl.sum(sums * weights[:, None], 0) / total
    tl.store(output + (token * HEADS + head) * DIM + dims, result.to(output.dtype.element_ty), mask=mask)


@triton.jit
def _attend_keys(
    queries, rest, key_cache, value_cache, page_table, kv_head, begin, end, position, last, scale,
    maxima, totals, sums, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    REST: tl.constexpr, REST_BLOCK: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr, CAP: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """Add the keys ``[begin, end)`` to the online softmax, those that a row at ``position`` [rows] attends to: up to
    ``last`` [rows] and within its window; all of them with ``ALL``. Else as ``_attend_block``."""
    for base in range(begin, end, KEYS):
        places = base + tl.arange(0, KEYS)
        inside = places < end
        visible = inside[None, :] & (places[None, :] <= last[:, None])
        if WINDOW > 0:
            visible = visible & (places[None, :] >= _first_read(position, WINDOW, CHUNKED)[:, None])
        maxima, totals, sums = _attend_block(
            queries, rest, key_cache, value_cache, page_table, kv_head, places, inside, visible, scale,
            maxima, totals, sums, KV_HEADS, PAGE_SIZE, DIM, DIM_BLOCK, REST, REST_BLOCK, SHARED, CAP, ALL,
        )  # fmt: skip
    return maxima, totals, sums


@triton.jit
def prefill_kernel(
    query, key_cache, value_cache, sinks, output, ends, tiles, query_starts, query_lens, kv_lens, page_starts, pages,
    query_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUPS: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, REST: tl.constexpr,
    REST_BLOCK: tl.constexpr, SHARED: tl.constexpr, KEYS: tl.constexpr, TILE: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, CAP: tl.constexpr, SINKS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Attend from ``TILE`` new tokens of one sequence, for one group of query heads, per program; rows are tokens times
    heads.

    New tokens are at positions ``kv_len - query_len`` and on; each attends to its sequence up to itself or, with
    ``SPANS``, to its element of ``ends`` [T].
    """
    tile = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    sequence = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    query_len = tl.load(query_lens + sequence)
    past = tl.load(kv_lens + sequence) - query_len
    page_table = pages + tl.load(page_starts + sequence)

    GROUP: tl.constexpr = HEADS // GROUPS
    ROWS: tl.constexpr = TILE * GROUP_BLOCK
    row = tl.arange(0, ROWS)
    token = first + row // GROUP_BLOCK
    head = row % GROUP_BLOCK
    dims = tl.arange(0, DIM_BLOCK)
    exists = (token < query_len) & (head < GROUP)
    mask = exists[:, None] & (dims < DIM)[None, :]
    packed = tl.load(query_starts + sequence) + token
    heads = which * GROUP + head
    rows = query + packed * query_stride + heads * (DIM + REST)
    queries, rest = _load_queries(rows, exists, DIM, DIM_BLOCK, REST, REST_BLOCK)

    last = past + token
    end = past + tl.minimum(first + TILE, query_len)
    if SPANS:
        last = tl.maximum(last, tl.load(ends + packed, mask=exists, other=0) - 1)
        end = tl.minimum(tl.max(tl.where(exists, last, 0), 0) + 1, past + query_len)
    begin = _first_read(past + first, WINDOW, CHUNKED) // KEYS * KEYS
    maxima, totals = _start_softmax(sinks, heads, head < GROUP, SINKS, ROWS)
    sums = tl.zeros([ROWS, DIM_BLOCK], tl.float32)
    kv_head, middle = which // (GROUPS // KV_HEADS), begin
    if WINDOW == 0:  # all rows attend to all keys up to the first row's token, if the tile has one
        middle = tl.minimum(past + first + 1, end) // KEYS * KEYS
        maxima, totals, sums = _attend_keys(
            queries, rest, key_cache, value_cache, page_table, kv_head, begin, middle, past + token, last, scale,
            maxima, totals, sums, KV_HEADS, PAGE_SIZE, DIM, DIM_BLOCK, REST, REST_BLOCK, SHARED, KEYS, WINDOW, CHUNKED,
            CAP, ALL=True,
        )  # fmt: skip
    maxima, totals, sums = _attend_keys(
        queries, rest, key_cache, value_cache, page_table, kv_head, middle, end, past + token, last, scale,
        maxima, totals, sums, KV_HEADS, PAGE_SIZE, DIM, DIM_BLOCK, REST, REST_BLOCK, SHARED, KEYS, WINDOW, CHUNKED, CAP,
        ALL=False,
    )  # fmt: skip

    result = _mean(sums, totals).to(output.dtype.element_ty)
    tl.store(output + (packed[:, None] * HEADS + heads[:, None]) * DIM + dims[None, :], result, mask=mask)

/* The causal convolution of queries, keys and values, and the gated delta rule (arXiv:2412.06464) over them, in float32:
 * S = e^g S, S += k (beta (v - S^T k))^T, o = S^T q, with a state S for each value head of each sequence.
 *
 * First, threads share heads of sequences to convolve their tokens, then heads to advance their states: a single token in
 * place, in two passes over the state; several in blocks (delta_block.h). A token's output depends, to the bit, on its own
 * sequence and its place in a block, but not on the rest of the step or on the number of threads.
 */
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "delta_block.h"
#include "delta_rule.h"
#include "pointwise.h"

#define AT_ONCE (LANES / 2) /* vectors of a state's columns whose sums are in registers, for a single token */
#define L2_EPS 1e-6f /* added to the sum of squares of a query, and of a key */
#define PREFETCHED 4 /* tokens */
#define ROWS_AHEAD 8 /* rows of a state that are prefetched; beyond a head's last row they are the next head's */

/* Divides a query or key by its length. */
inlined void normalise_length(float *values, int64_t dim, float scale) {
    floats squares = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        floats x = load(values + i, dim - i);
        squares += x * x;
    }
    float factor = scale / sqrtf(sum_of(squares) + L2_EPS);
    for (int64_t i = 0; i < dim; i += LANES) store(values + i, load(values + i, dim - i) * factor, dim - i);
}

/* Convolves one head of a sequence, channels ``first`` to ``first`` + ``dim``, and updates its part of the state. */
inlined void convolve(const DeltaStep *step, int64_t sequence, int64_t first, int64_t dim, float *to, float scale) {
    int64_t count = step->lens[sequence], stride = step->mixed_stride;
    int64_t channels = 2 * step->key_heads * step->key_dim + step->value_heads * step->value_dim;
    const float *mixed = step->mixed + step->starts[sequence] * stride + first, *taps = step->taps + first;
    float *past = step->conv + step->slots[sequence] * step->conv_stride + first;
    if (step->fresh[sequence])
        for (int64_t row = 0; row < PAST; row++) memset(past + row * step->past_stride, 0, dim * sizeof(float));
    for (int64_t token = 0; token < count; token++, to += dim) {
        const float *rows[PAST + 1];
        for (int64_t row = 0; row <= PAST; row++) {
            int64_t place = token - PAST + row;
            rows[row] = place < 0 ? past + (place + PAST) * step->past_stride : mixed + place * stride;
        }
        if (token + PREFETCHED < count)
            for (int64_t i = 0; i < dim; i += 16) __builtin_prefetch(rows[PAST] + PREFETCHED * stride + i);
        for (int64_t i = 0; i < dim; i += LANES) {
            floats sum = {};
#pragma GCC unroll 4
            for (int64_t row = 0; row <= PAST; row++)
                sum = multiply_add(load(taps + row * channels + i, dim - i), load(rows[row] + i, dim - i), sum);
            store(to + i, sum * sigmoid(sum), dim - i);
        }
        if (scale) normalise_length(to, dim, scale);
    }
    for (int64_t row = 0; row < PAST; row++) {
        int64_t place = count - PAST + row;
        const float *from = place < 0 ? past + (place + PAST) * step->past_stride : mixed + place * stride;
        memcpy(past + row * step->past_stride, from, dim * sizeof(float));
    }
}

/* Convolves the head ``which``, counted from queries through keys to values. */
static void convolve_head(const DeltaStep *step, const Convolved *to, int64_t sequence, int64_t which) {
    int64_t keys = step->key_heads, dim = step->key_dim, tokens = step->num_tokens, start = step->starts[sequence];
    if (which < keys) {
        convolve(step, sequence, which * dim, dim, to->queries + (which * tokens + start) * dim, 1 / sqrtf(dim));
    } else if (which < 2 * keys) {
        convolve(step, sequence, which * dim, dim, to->keys + ((which - keys) * tokens + start) * dim, 1);
    } else {
        int64_t head = which - 2 * keys, width = step->value_dim;
        float *values = to->values + (head * tokens + start) * width;
        convolve(step, sequence, 2 * keys * dim + head * width, width, values, 0);
    }
}

/* Computes a token's decays, e^(-rate softplus(a + dt_bias)), and betas, sigmoid(b). */
inlined void find_gates(const DeltaStep *step, const Convolved *to, int64_t token) {
    for (int64_t head = 0; head < step->value_heads; head++) {
        float x = step->a[token * step->a_stride + head] + step->dt_bias[head];
        float softplus = (x > 0 ? x : 0) + log1pf(expf(-fabsf(x)));
        to->decays[head * step->num_tokens + token] = expf(-step->rates[head] * softplus);
        to->betas[head * step->num_tokens + token] = 1 / (1 + expf(-step->b[token * step->b_stride + head]));
    }
}

/* Advances columns of a state by one token; ``product`` is that of its query and its key. The last vector may be partial:
 * then it is the only one, with ``left`` columns. */
inlined void advance_columns(const DeltaHead *head, int64_t first, int64_t dim, int64_t width, float product,
                             int64_t left, const int vectors) {
    floats by_key[AT_ONCE] = {}, by_query[AT_ONCE] = {}, change[AT_ONCE];
    float *state = head->state + first, decay = *head->decays, beta = *head->betas;
    for (int64_t row = 0; row < dim; row++) {
        floats key = splat(head->keys[row]), query = splat(head->queries[row]);
        for (int i = 0; i < vectors; i++) __builtin_prefetch(state + (row + ROWS_AHEAD) * width + i * LANES);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            floats own = load(state + row * width + i * LANES, left);
            by_key[i] = multiply_add(key, own, by_key[i]);
            by_query[i] = multiply_add(query, own, by_query[i]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < vectors; i++) {
        change[i] = beta * (load(head->values + first + i * LANES, left) - decay * by_key[i]);
        store(head->output + first + i * LANES, multiply_add(splat(product), change[i], decay * by_query[i]), left);
    }
    for (int64_t row = 0; row < dim; row++) {
        floats key = splat(head->keys[row]);
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            float *own = state + row * width + i * LANES;
            store(own, multiply_add(key, change[i], decay * load(own, left)), left);
        }
    }
}

/* Advances a head's state by its only token. */
static void advance_one(const DeltaHead *head, int64_t dim, int64_t width) {
    floats products = {};
    for (int64_t i = 0; i < dim; i += LANES)
        products = multiply_add(load(head->queries + i, dim - i), load(head->keys + i, dim - i), products);
    float product = sum_of(products);
    int64_t first = 0;
    for (; first + AT_ONCE * LANES <= width; first += AT_ONCE * LANES)
        advance_columns(head, first, dim, width, product, LANES, AT_ONCE);
    for (; first + LANES <= width; first += LANES) advance_columns(head, first, dim, width, product, LANES, 1);
    if (first < width) advance_columns(head, first, dim, width, product, width - first, 1);
}

/* Moves a head past ``count`` tokens. */
inlined void move_on(DeltaHead *head, const DeltaStep *step, int64_t count) {
    head->queries += count * step->key_dim;
    head->keys += count * step->key_dim;
    head->values += count * step->value_dim;
    head->decays += count;
    head->betas += count;
    head->output += count * step->value_heads * step->value_dim;
}

/* Advances the states of ``count`` value heads with the same key head by a sequence's tokens. */
static void advance_several(const DeltaStep *step, const Convolved *from, int64_t sequence, int64_t first_head,
                            int64_t count, Block *block) {
    int64_t dim = step->key_dim, width = step->value_dim, rows = padded(dim, ROWS), each = state_floats(step);
    float *states = block->rest + SPAN * rows;
    int64_t tokens = step->lens[sequence], whole = tokens % SPAN == 1 ? tokens - 1 : tokens;
    memset(states, 0, count * each * sizeof(float));
    if (!step->fresh[sequence])
        for (int64_t i = 0; i < count; i++)
            copy_state(states + i * each, delta_head(step, from, sequence, first_head + i).state, step, 0);
    for (int64_t token = 0; token < whole; token += SPAN) {
        int64_t some = least(SPAN, whole - token);
        for (int64_t i = 0; i < count; i++) {
            DeltaHead head = delta_head(step, from, sequence, first_head + i);
            move_on(&head, step, token);
            if (i == 0) multiply_keys(block, head.queries, head.keys, some, dim);
            apply_decays(block, head.decays, head.betas, some);
            for (int64_t first = 0; first < width; first += WIDTH)
                advance_slice(block, states + i * each + first * rows, &head, first, some, step);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        DeltaHead head = delta_head(step, from, sequence, first_head + i);
        copy_state(states + i * each, head.state, step, 1);
        if (whole == tokens) continue;
        move_on(&head, step, whole); /* a block of one token is a single token, too */
        advance_one(&head, dim, width);
    }
}

/* Advances the states of ``count`` value heads by a sequence's only token. */
static void advance_single(const DeltaStep *step, const Convolved *from, int64_t sequence, int64_t first_head,
                           int64_t count) {
    int64_t dim = step->key_dim, width = step->value_dim;
    if (step->lens[sequence] > 1) return; /* done in advance_several */
    for (int64_t i = 0; i < count; i++) {
        DeltaHead head = delta_head(step, from, sequence, first_head + i);
        if (step->fresh[sequence]) memset(head.state, 0, dim * width * sizeof(float));
        advance_one(&head, dim, width);
    }
}

/* Called by all threads of a team. ``together`` value heads with the same key head are a task; ``blocks`` are working
 * memory, ``bytes`` for each thread. */
static void advance_together(const DeltaStep *step, const Convolved *from, int64_t together, char *blocks,
                             int64_t bytes) {
    int64_t shares = step->value_heads / together, all = (step->num_several + step->num_singles) * shares;
    int64_t heads = 2 * step->key_heads + step->value_heads;
#pragma omp for nowait
    for (int64_t token = 0; token < step->num_tokens; token++) find_gates(step, from, token);
#pragma omp for
    for (int64_t task = 0; task < step->num_sequences * heads; task++)
        convolve_head(step, from, task / heads, task % heads);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < all; task++) {
        int64_t which = task / shares, head = task % shares * together;
        if (which < step->num_several) {
            Block *own = (Block *)(blocks + omp_get_thread_num() * bytes);
            advance_several(step, from, step->several[which], head, together, own);
        } else {
            advance_single(step, from, step->singles[which - step->num_several], head, together);
        }
    }
}

/* Returns 1 on success. Without side effects, returns 0 for a slot beyond the state, and -1 if there is no memory. */
int delta_rule(const DeltaStep *step) {
    for (int64_t sequence = 0; sequence < step->num_sequences; sequence++)
        if (step->slots[sequence] < 0 || step->slots[sequence] >= step->num_slots) return 0;
    int64_t tokens = step->num_tokens, threads = omp_get_max_threads(), shared = step->value_heads / step->key_heads;
    /* heads with the same keys share their products, unless that leaves threads without work */
    int64_t together = step->num_sequences * step->key_heads < 2 * threads ? 1 : shared;
    int64_t keys = padded(tokens * step->key_heads * step->key_dim + SPAN * step->key_dim, 16);
    int64_t values = padded(tokens * step->value_heads * step->value_dim, 16);
    int64_t gates = padded(tokens * step->value_heads, 16), bytes = block_bytes(step, together);
    int64_t shares = step->num_several ? threads * bytes : 0;
    float *room = aligned_alloc(64, (2 * keys + values + 2 * gates) * sizeof(float) + shares);
    if (!room) return -1;
    float *past_keys = room + 2 * keys, *past_values = past_keys + values;
    Convolved convolved = {room, room + keys, past_keys, past_values, past_values + gates};
#pragma omp parallel
    advance_together(step, &convolved, together, (char *)(past_values + 2 * gates), bytes);
    free(room);
    return 1;
}

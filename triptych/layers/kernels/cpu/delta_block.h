/* The gated delta rule for several tokens of a sequence, in blocks (arXiv:2406.06484, section 3).
 *
 * With decays, a token i of a block changes the state by k_i n_i^T, and n_i depends on the changes before it: with B_ij the
 * decay from token j to i, and B_i that from before the block,
 *     n_i + sum_{j<i} beta_i (k_i . k_j) B_ij n_j = beta_i (v_i - B_i S^T k_i),
 *     o_i = B_i S^T q_i + sum_{j<=i} (q_i . k_j) B_ij n_j,     S' = B_c S + sum_j B_cj k_j n_j^T.
 * Columns of the state are independent, so a slice of WIDTH columns goes through all of it at a time. Decays are
 * multiplied, not added up as logarithms, whose differences would lose digits after a strong decay.
 *
 * Each sum has its terms in the order of tokens or of key values, so results don't depend on how rows are tiled, and rows
 * beyond a block's last token can hold anything.
 */
#pragma once
#include "delta_rule.h"

#define SPAN 32             /* tokens of a block: BLOCK in triptych/layers/delta_rule/base.py */
#define WIDTH (2 * LANES)   /* columns of a slice */
#define ROWS (LANES / 2)    /* rows whose sums are in registers at a time */
#define NEGLIGIBLE 1e-30f   /* decays below it are zero: products with numbers below 1e-38 are slow */

/* Working memory of one thread. */
typedef struct {
    float attention[SPAN * SPAN];  /* (q_i . k_j) B_ij */
    float system[SPAN * SPAN];     /* -beta_i (k_i . k_j) B_ij */
    float by_queries[SPAN * SPAN], by_keys[SPAN * SPAN]; /* products of all heads with the same keys */
    float since_start[SPAN], until_end[SPAN];            /* B_i and B_cj */
    float read[SPAN * WIDTH], changes[SPAN * WIDTH];     /* S^T q_i, then o_i; S^T k_i, then n_i */
    float rest[];                  /* transposed keys, then states in slices */
} __attribute__((aligned(64))) Block;

inlined int64_t padded(int64_t count, int64_t multiple) { return (count + multiple - 1) / multiple * multiple; }

/* Floats of a head's state in slices: each is [key_dim, WIDTH], padded with zeros. */
inlined int64_t state_floats(const DeltaStep *step) {
    return padded(step->value_dim, WIDTH) * padded(step->key_dim, ROWS);
}

inlined int64_t block_bytes(const DeltaStep *step, int64_t heads) {
    int64_t rest = SPAN * padded(step->key_dim, ROWS) + heads * state_floats(step);
    return padded(sizeof(Block) + rest * sizeof(float), 64);
}

/* to[ROWS][WIDTH] = scale * to[ROWS][WIDTH] + left[ROWS][depth] * right[depth][WIDTH]; without ``adds``, previous values
 * are overwritten. ``stride`` is that of to's rows, ``across`` and ``along`` those of left's rows and columns. */
inlined void multiply_tile(float *to, int64_t stride, const float *left, int64_t across, int64_t along,
                           const float *right, int64_t depth, float scale, const int adds) {
    floats sums[ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++)
            sums[row][half] = adds ? *(floats *)(to + row * stride + half * LANES) * scale : (floats){};
    for (int64_t i = 0; i < depth; i++) {
        floats low = *(const floats *)(right + i * WIDTH), high = *(const floats *)(right + i * WIDTH + LANES);
#pragma GCC unroll 8
        for (int row = 0; row < ROWS; row++) {
            floats factor = splat(left[row * across + i * along]);
            sums[row][0] = multiply_add(factor, low, sums[row][0]);
            sums[row][1] = multiply_add(factor, high, sums[row][1]);
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) *(floats *)(to + row * stride + half * LANES) = sums[row][half];
}

/* to[rows][WIDTH] = left[rows][depth] * right[depth][WIDTH] */
static void multiply_rows(float *to, int64_t stride, const float *left, const float *right, int64_t depth,
                          int64_t rows) {
    for (int64_t row = 0; row < rows; row += ROWS)
        multiply_tile(to + row * stride, stride, left + row * depth, depth, 1, right, depth, 0, 0);
}

/* Transposes keys [count, dim] to slices [dim][WIDTH] of tokens. */
inlined void transpose_keys(float *to, const float *keys, int64_t count, int64_t dim) {
    int64_t slice = dim * WIDTH;
    for (int64_t token = 0; token < padded(count, WIDTH); token += LANES)
        for (int64_t i = 0; i < dim; i += LANES) {
            floats tile[LANES];
            for (int64_t lane = 0; lane < LANES; lane++)
                tile[lane] = token + lane < count ? load(keys + (token + lane) * dim + i, dim - i) : (floats){};
            transpose(tile);
            float *own = to + token / WIDTH * slice + token % WIDTH + i * WIDTH;
            for (int64_t lane = 0; lane < least(LANES, dim - i); lane++) *(floats *)(own + lane * WIDTH) = tile[lane];
        }
}

/* Computes the products of a block's queries and keys with its keys. */
static void multiply_keys(Block *block, const float *queries, const float *keys, int64_t count, int64_t dim) {
    transpose_keys(block->rest, keys, count, dim);
    for (int64_t slice = 0; slice < count; slice += WIDTH) {
        const float *columns = block->rest + slice * dim;
        int64_t first = slice / ROWS * ROWS, rows = count - first; /* tokens before the slice don't see it */
        float *by_queries = block->by_queries + first * SPAN + slice, *by_keys = block->by_keys + first * SPAN + slice;
        multiply_rows(by_queries, SPAN, queries + first * dim, columns, dim, rows);
        multiply_rows(by_keys, SPAN, keys + first * dim, columns, dim, rows);
    }
}

/* Applies a head's decays and betas to the products. */
inlined void apply_decays(Block *block, const float *decays, const float *betas, int64_t count) {
    floats between[SPAN / LANES] = {};
    float start = 1;
    for (int64_t token = 0; token < count; token++) {
        start *= decays[token];
        block->since_start[token] = start = start < NEGLIGIBLE ? 0 : start;
        for (int64_t part = 0; part < SPAN / LANES; part++) {
            int64_t at = token * SPAN + part * LANES;
            ints before = lanes_below(token - part * LANES), now = lanes_below(token + 1 - part * LANES);
            floats decayed = between[part] * decays[token];
            decayed = choose(decayed < NEGLIGIBLE, (floats){}, decayed);
            decayed = between[part] = choose(before, decayed, choose(now, splat(1), (floats){}));
            floats by_query = *(floats *)(block->by_queries + at) * decayed;
            floats by_key = *(floats *)(block->by_keys + at) * decayed * -betas[token];
            *(floats *)(block->attention + at) = choose(now, by_query, (floats){});
            *(floats *)(block->system + at) = choose(before, by_key, (floats){});
        }
    }
    for (int64_t part = 0; part < SPAN / LANES; part++) *(floats *)(block->until_end + part * LANES) = between[part];
}

/* Solves the rows of a tile that depend on each other; the earlier tiles' part is in ``changes`` already. */
inlined void solve_tile(float *changes, const float *system) {
    floats own[ROWS][2];
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) own[row][half] = *(floats *)(changes + row * WIDTH + half * LANES);
#pragma GCC unroll 8
    for (int from = 0; from < ROWS - 1; from++)
#pragma GCC unroll 8
        for (int row = from + 1; row < ROWS; row++) {
            floats factor = splat(system[row * SPAN + from]);
            for (int half = 0; half < 2; half++)
                own[row][half] = multiply_add(factor, own[from][half], own[row][half]);
        }
#pragma GCC unroll 8
    for (int row = 0; row < ROWS; row++)
        for (int half = 0; half < 2; half++) *(floats *)(changes + row * WIDTH + half * LANES) = own[row][half];
}

/* Advances a slice of the state, [key_dim, WIDTH], from the column ``first`` on, by a block of tokens, and writes their
 * outputs. ``head`` begins with the block. */
static void advance_slice(Block *block, float *state, const DeltaHead *head, int64_t first, int64_t count,
                          const DeltaStep *step) {
    int64_t dim = step->key_dim, width = step->value_dim, across = step->value_heads * width;
    float *read = block->read, *changes = block->changes;
    multiply_rows(read, WIDTH, head->queries, state, dim, count);
    multiply_rows(changes, WIDTH, head->keys, state, dim, count);
    for (int64_t token = 0; token < count; token++)
        for (int64_t half = 0; half < WIDTH; half += LANES) {
            int64_t left = most(0, width - first - half);
            floats start = splat(block->since_start[token]);
            floats *own = (floats *)(changes + token * WIDTH + half), *other = (floats *)(read + token * WIDTH + half);
            floats value = left ? load(head->values + token * width + first + half, left) : (floats){};
            *own = head->betas[token] * (value - start * *own);
            *other *= start;
        }
    for (int64_t row = 0; row < count; row += ROWS) {
        multiply_tile(changes + row * WIDTH, WIDTH, block->system + row * SPAN, SPAN, 1, changes, row, 1, 1);
        solve_tile(changes + row * WIDTH, block->system + row * SPAN + row);
        multiply_tile(read + row * WIDTH, WIDTH, block->attention + row * SPAN, SPAN, 1, changes,
                      least(count, row + ROWS), 1, 1);
    }
    for (int64_t token = 0; token < count; token++)
        for (int64_t half = 0; half < WIDTH && first + half < width; half += LANES) {
            floats *own = (floats *)(changes + token * WIDTH + half);
            store(head->output + token * across + first + half, *(floats *)(read + token * WIDTH + half),
                  width - first - half);
            *own *= block->until_end[token];
        }
    float end = block->since_start[count - 1];
    for (int64_t row = 0; row < dim; row += ROWS)
        multiply_tile(state + row * WIDTH, WIDTH, head->keys + row, 1, dim, changes, count, end, 1);
}

/* Copies a head's state to slices, or back. */
inlined void copy_state(float *slices, float *state, const DeltaStep *step, const int is_back) {
    int64_t dim = step->key_dim, width = step->value_dim, rows = padded(dim, ROWS);
    for (int64_t first = 0; first < width; first += WIDTH, slices += rows * WIDTH)
        for (int64_t row = 0; row < dim; row++) {
            int64_t bytes = least(WIDTH, width - first) * sizeof(float);
            float *inside = slices + row * WIDTH, *outside = state + row * width + first;
            if (is_back) memcpy(outside, inside, bytes);
            else memcpy(inside, outside, bytes);
        }
}

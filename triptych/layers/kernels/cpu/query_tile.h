/* Tiles of queries in attention: their products with keys and values, and their softmax. Rows are lanes of vectors. */
#pragma once
#include "attention.h"
#include "tiles.h"
#include "vectors.h"

#define MAX_DIM 576       /* values per head */
/* BLOCK: keys, or dimensions, whose sums are in registers at a time. */
#if LANES == 16
#define BLOCK 8
#elif defined __x86_64__ && !defined __AVX__
#define BLOCK 4 /* a vector takes two registers */
#else
#define BLOCK 6
#endif
#define ROWS (2 * LANES)  /* rows of a tile: its tokens times the query heads of a group */
#define WHOLE 32          /* AMX multiplies whole tiles: keys and dimensions are padded to a multiple of it */

/* sum + scalar * vector; or with pairs, of which scalar is one and vector has one per lane, their dot product */
inlined floats plus_product(floats sum, float scalar, floats vector, const int in_pairs) {
#ifdef __AVX512BF16__
    if (in_pairs) {
        int32_t pair;
        memcpy(&pair, &scalar, sizeof pair);
        return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)vector, (__m512bh)_mm512_set1_epi32(pair));
    }
#endif
    (void)in_pairs;
    return multiply_add(splat(scalar), vector, sum);
}

/* sums[block][ROWS] = sums[block][ROWS] * shrink[ROWS] + scalars[block * step + i * across] * vectors[i][ROWS], summed
 * over i, for the first ``halves`` halves of the rows. Without ``shrink``, previous sums are overwritten. */
inlined void multiply(float *sums, const floats *shrink, const float *scalars, int64_t step, int64_t across,
                      const float *vectors, int64_t count, const int blocks, const int halves, const int in_pairs) {
    floats found[BLOCK][2];
    for (int block = 0; block < blocks; block++)
        for (int half = 0; half < halves; half++)
            found[block][half] = shrink ? *(floats *)(sums + block * ROWS + half * LANES) * shrink[half] : (floats){};
    for (int64_t i = 0; i < count; i++) {
        const floats *vector = (const floats *)(vectors + i * ROWS);
        floats low = vector[0], high = halves > 1 ? vector[1] : low;
#pragma GCC unroll 8
        for (int block = 0; block < blocks; block++) {
            float scalar = scalars[block * step + i * across];
            found[block][0] = plus_product(found[block][0], scalar, low, in_pairs);
            if (halves > 1) found[block][1] = plus_product(found[block][1], scalar, high, in_pairs);
        }
    }
    for (int block = 0; block < blocks; block++)
        for (int half = 0; half < halves; half++) *(floats *)(sums + block * ROWS + half * LANES) = found[block][half];
}

inlined void multiply_all(float *sums, const floats *shrink, const float *scalars, int64_t step, int64_t across,
                          const float *vectors, int64_t count, int64_t blocks, const int halves, const int in_pairs) {
    switch (blocks) {
#define SOME(n) case n: multiply(sums, shrink, scalars, step, across, vectors, count, n, halves, in_pairs); break;
        SOME(BLOCK) SOME(BLOCK - 1) SOME(BLOCK - 2)
#undef SOME
    default:
        for (int64_t block = 0; block < blocks; block++)
            multiply(sums + block * ROWS, shrink, scalars + block * step, step, across, vectors, count, 1, halves,
                     in_pairs);
    }
}

/* Size of the next block of ``left`` keys or dimensions. Blocks are as few as possible and of nearly one size, since small
 * ones take nearly as long. If ``multiply_all`` has no body for that size, blocks are whole, and it takes the rest one by
 * one. */
inlined int64_t next_block(int64_t left) {
    int64_t blocks = (left + BLOCK - 1) / BLOCK;
    return left / blocks < BLOCK - 2 ? least(BLOCK, left) : (left + blocks - 1) / blocks;
}

inlined int64_t whole(int64_t count) { return (count + WHOLE - 1) / WHOLE * WHOLE; }

/* sums[rows][ROWS] = left[rows][depth] * right[depth / 2][ROWS], by AMX: bfloat16, right in pairs, both numbers whole.
 * ``stride`` is that of left's rows. With ``adds``, products are added to previous sums. */
inlined void multiply_by_amx(float *sums, const uint16_t *left, int64_t stride, const float *right, int64_t rows,
                             int64_t depth, const int adds) {
#ifdef __AMX_BF16__
    const int64_t line = ROWS * sizeof(float), across = stride * sizeof(uint16_t), half = ROWS / 2;
    __asm__ volatile("" ::: "memory"); /* the compiler doesn't know that tiles read memory */
    for (int64_t row = 0; row < rows; row += WHOLE) {
        float *low = sums + row * ROWS, *high = low + WHOLE / 2 * ROWS;
        const uint16_t *first = left + row * stride, *second = first + WHOLE / 2 * stride;
        if (adds) {
            _tile_loadd(0, low, line);
            _tile_loadd(1, low + half, line);
            _tile_loadd(2, high, line);
            _tile_loadd(3, high + half, line);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t at = 0; at < depth; at += WHOLE) {
            _tile_loadd(4, first + at, across);
            _tile_loadd(6, right + at / 2 * ROWS, line);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right + at / 2 * ROWS + half, line);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, second + at, across);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, low, line);
        _tile_stored(1, low + half, line);
        _tile_stored(2, high, line);
        _tile_stored(3, high + half, line);
    }
#endif
}

/* Pairs of a and b, rounded to bfloat16. Never called on processors without instructions for it. */
inlined floats paired(floats a, floats b) {
#ifdef __AVX512BF16__
    __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                     20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (floats)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    (void)b;
    return a;
#endif
}

/* 2^x to a relative error of 2^-13.7, which rounding to bfloat16 hides: 2^n 2^f, where f is at least 0 and below 1, and
 * 2^f the polynomial of degree 3 with the smallest error. */
inlined floats brief_power(floats x) {
#ifdef __AVX512BF16__
    floats rest = (floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), sum = splat(0.07802452f);
    sum = sum * rest + 0.22606718f;
    sum = sum * rest + 0.69583352f;
    sum = sum * rest + 0.99992522f;
    return (floats)_mm512_scalef_ps((__m512)sum, (__m512)x); /* rounds x down */
#else
    return x; /* never called */
#endif
}

/* A tile of one group of query heads. Rows are lanes of vectors, so nothing is summed across lanes, and each row processes the same
 * keys in the same order whatever the other tiles are. */
typedef struct {
    float *queries, *sums;     /* [whole(dim), ROWS], or of pairs; multiples of 64 */
    float scores[TILE * ROWS]; /* or of pairs */
    floats maxima[2], totals[2], shrink[2];
    ints to[2];                /* last key that each row's token attends to */
    ints from[2];              /* first key that each row's token attends to */
    int64_t place, tokens;     /* index of the first token in the step; number of tokens */
    int64_t first, last;       /* positions of the first and the last token */
    int64_t first_to;          /* last key that the first token attends to, which is the earliest of all */
    int64_t last_from;         /* first key that the last token attends to, which is the latest of all */
    int64_t begin, end;        /* range of keys visible to any row, extended at its start to a multiple of TILE */
} __attribute__((aligned(64))) Tile; /* aligned, so that no vector crosses a cache line */

/* Bytes of a tile's queries, and of its sums. */
inlined int64_t tile_bytes(const Step *step) { return whole(step->dim) * ROWS * sizeof(float); }

/* ``memory`` is for queries and sums. */
inlined void begin_tile(Tile *tile, char *memory, const Step *step, int64_t sequence, int64_t first_token, int64_t which,
                        const int in_pairs) {
    int64_t group = step->heads / step->groups, dim = step->dim, kv_len = step->kv_lens[sequence];
    int64_t query_len = step->query_lens[sequence], tokens = least(ROWS / group, query_len - first_token);
    tile->queries = (float *)memory;
    tile->sums = (float *)(memory + tile_bytes(step));
    tile->tokens = tokens;
    tile->place = step->query_starts[sequence] + first_token;
    tile->first = step->causal ? kv_len - query_len + first_token : kv_len - 1;
    tile->last = step->causal ? tile->first + tokens - 1 : tile->first;
    tile->last_from = first_read(step, tile->last);
    tile->begin = first_read(step, tile->first) / TILE * TILE;
    tile->first_to = key_end(step, tile->place, tile->first, kv_len) - 1;
    tile->end = key_end(step, tile->place + tokens - 1, tile->last, kv_len);
    const float *query = step->query + tile->place * step->query_stride + which * group * dim, *rows[ROWS];
    for (int row = 0; row < ROWS; row++) {
        int64_t token = least(row / group, tokens - 1); /* unused rows repeat the last token */
        rows[row] = query + token * step->query_stride + row % group * dim;
        /* a sink is a key that all tokens see, without a value */
        tile->maxima[row / LANES][row % LANES] = step->sinks ? step->sinks[which * group + row % group] : NEVER;
        int64_t position = least(tile->first + token, tile->last);
        tile->to[row / LANES][row % LANES] = (int32_t)(key_end(step, tile->place + token, position, kv_len) - 1);
        tile->from[row / LANES][row % LANES] = (int32_t)first_read(step, position);
    }
    for (int64_t i = 0; i < whole(dim) * ROWS; i++) tile->sums[i] = 0;
    for (int64_t i = dim / 2 * ROWS; i < whole(dim) / 2 * ROWS && in_pairs; i++) tile->queries[i] = 0;
    for (int half = 0; half < 2; half++) {
        tile->totals[half] = splat(step->sinks ? 1.0f : 0.0f);
        for (int64_t i = 0; i < dim; i += LANES) {
            floats square[LANES];
            for (int lane = 0; lane < LANES; lane++)
                square[lane] = load(rows[half * LANES + lane] + i, dim - i) * step->scale;
            transpose(square);
            if (in_pairs) for (int64_t at = i; at < least(i + LANES, dim); at += 2)
                *(floats *)(tile->queries + at / 2 * ROWS + half * LANES) = paired(square[at - i], square[at - i + 1]);
            else for (int64_t at = i; at < least(i + LANES, dim); at++)
                *(floats *)(tile->queries + at * ROWS + half * LANES) = square[at - i];
        }
    }
}

/* A key's weight, but nothing at all for a key that isn't attended to: the exponential of NEVER is only nearly 0, and a
 * tile has such keys for the sake of its other rows. A row that has seen no other keys yet has a maximum of NEVER: the
 * exponential of their difference is 1, and brief_power's, of a rounding error of NEVER, 0 or infinity. */
inlined floats if_seen(floats weight, floats score) { return choose(score != splat(NEVER), weight, (floats){}); }

/* Turns the scores of ``count`` keys into pairs of weights, and adds these to ``totals``. */
inlined void weigh_pairs(floats (*scores)[2], int64_t count, const floats *highest, floats *totals, const int halves,
                         const int masked) {
    floats factor = splat(1.44269504f), least[2];
    for (int half = 0; half < halves; half++) least[half] = -highest[half] * factor;
    for (int64_t key = 0; key < count; key += 2)
        for (int half = 0; half < halves; half++) {
            floats first = brief_power(multiply_add(scores[key][half], factor, least[half])), second = {};
            if (key + 1 < count) second = brief_power(multiply_add(scores[key + 1][half], factor, least[half]));
            if (masked) {
                first = if_seen(first, scores[key][half]);
                if (key + 1 < count) second = if_seen(second, scores[key + 1][half]);
            }
            totals[half] += first + second;
            scores[key / 2][half] = paired(first, second);
        }
}

/* Turns the scores of ``count`` keys, from ``start`` on, into softmax weights of their values. */
inlined void weigh_tile(Tile *tile, float *of_keys, const Step *step, int64_t start, int64_t count, const int halves,
                        const int in_pairs) {
    floats (*scores)[2] = (floats (*)[2])of_keys, highest[2] = {tile->maxima[0], tile->maxima[1]}, totals[2];
    if (step->cap) cap_scores(of_keys, count * ROWS, step->cap);
    const int masked = start + count - 1 > tile->first_to || start < tile->last_from;
    if (masked) {
        for (int64_t key = 0; key < count; key++)
            for (int half = 0; half < halves; half++) {
                int32_t at = (int32_t)(start + key);
                ints seen = (at <= tile->to[half]) & (at >= tile->from[half]);
                scores[key][half] = choose(seen, scores[key][half], splat(NEVER));
            }
    }
    floats others[2] = {highest[0], highest[1]}; /* of every other key, so that fewer operations wait for each other */
    for (int64_t key = 0; key < count; key += 2)
        for (int half = 0; half < halves; half++) {
            highest[half] = larger(scores[key][half], highest[half]);
            if (key + 1 < count) others[half] = larger(scores[key + 1][half], others[half]);
        }
    for (int half = 0; half < halves; half++) highest[half] = larger(highest[half], others[half]);
    for (int half = 0; half < halves; half++) {
        tile->shrink[half] = exponential(tile->maxima[half] - highest[half]);
        tile->maxima[half] = highest[half];
        totals[half] = tile->totals[half] * tile->shrink[half];
    }
    if (in_pairs) {
        if (masked) weigh_pairs(scores, count, highest, totals, halves, 1);
        else weigh_pairs(scores, count, highest, totals, halves, 0);
        for (int64_t pair = (count + 1) / 2; pair < whole(count) / 2; pair++)
            for (int half = 0; half < halves; half++) scores[pair][half] = (floats){};
    } else
        for (int64_t key = 0; key < count; key++)
            for (int half = 0; half < halves; half++) {
                floats weight = exponential(scores[key][half] - highest[half]);
                scores[key][half] = masked ? if_seen(weight, scores[key][half]) : weight;
                totals[half] += scores[key][half];
            }
    for (int half = 0; half < halves; half++) tile->totals[half] = totals[half];
}

inlined void finish_tile(const Tile *tile, const Step *step, int64_t which) {
    int64_t group = step->heads / step->groups, dim = step->value_dim, rows = tile->tokens * group;
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t i = 0; i < dim; i += LANES) {
            floats square[LANES] = {};
            for (int64_t at = i; at < least(i + LANES, dim); at++)
                square[at - i] = *(const floats *)(tile->sums + at * ROWS + first) / tile->totals[first / LANES];
            transpose(square);
            for (int64_t row = first; row < least(first + LANES, rows); row++) {
                int64_t head = which * group + row % group;
                store(step->output + ((tile->place + row / group) * step->heads + head) * dim + i, square[row - first],
                      dim - i);
            }
        }
}

/* Multiplies a tile's sums by ``shrink``, which is 1 once the rows' largest scores have been seen. */
inlined void shrink_sums(Tile *tile, int64_t depth) {
    floats (*sums)[2] = (floats (*)[2])tile->sums;
    ints changed = (tile->shrink[0] != 1) | (tile->shrink[1] != 1);
    if (!any_of(changed)) return;
    for (int64_t i = 0; i < depth; i++)
        for (int half = 0; half < 2; half++) sums[i][half] *= tile->shrink[half];
}

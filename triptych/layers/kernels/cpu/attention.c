/* Attention over a paged KV cache, in float32: new tokens read their sequence's history in place. The cache may be in
 * half precision or int8 (kv_format.h): keys and values, including the new ones, are then rounded before they are used.
 *
 * Tiles may multiply in bfloat16, where the processor has instructions for it: queries, keys, softmax weights and values
 * are rounded to it, and sums are float32. Two values are then adjacent, a pair: of dimensions for scores, of keys for
 * outputs. A pair has the size of a float, so that tiles and loops are the same.
 *
 * A tile of new tokens (a chunk of a prompt) reads its keys once, one kv head at a time; a single new token (decode)
 * reads a span of keys, row by row, for all its heads. Each keeps a running maximum and sum of the softmax (Milakov and
 * Gimelshein, arXiv:1805.02867). A token's output depends, to the bit, on its own sequence and on whether it is its
 * sequence's only new token, but not on the rest of the step.
 * Built by native.py.
 */
#include <omp.h>
#include <stdlib.h>

#include "attention.h"
#include "kv_format.h"
#include "vectors.h"

#define MAX_GROUP 16      /* query heads per kv head */
#define MAX_DIM 256       /* values per head */
#define MAX_HEADS 32      /* query heads of a single token that are processed together */
#define SPAN 1024         /* keys of a single token that one thread processes */
#define AHEAD 4           /* rows that are prefetched while others are processed */
#define NEVER -1e30f      /* a score below all others; finite, so that the difference of two is a number */
#define BLOCK (LANES / 2) /* keys, or dimensions, whose sums are in registers at a time */
#define ROWS (2 * LANES)  /* rows of a tile: its tokens times the query heads per kv head */
#define TILE 64           /* keys that are scored before their values are summed */
#define TOGETHER 8        /* maximum number of a sequence's tiles that share gathered keys; limited by the stack */
#define LINE 64           /* bytes of a cache line */

/* Calls a function with the cache's format as its last argument, a constant in each call. */
#define IN_FORMAT(function, ...) \
    switch (step->format) { \
    case KV_FLOAT: function(__VA_ARGS__, KV_FLOAT); break; \
    case KV_HALF: function(__VA_ARGS__, KV_HALF); break; \
    default: function(__VA_ARGS__, KV_INT8); \
    }

#ifdef __AVX512BF16__
const int attention_has_bf16 = 1;
#else
const int attention_has_bf16 = 0;
#endif
const int attention_group = MAX_GROUP, attention_dim = MAX_DIM, attention_rows = ROWS;

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
    return sum + scalar * vector;
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
    if (blocks == BLOCK) {
        multiply(sums, shrink, scalars, step, across, vectors, count, BLOCK, halves, in_pairs);
    } else {
        for (int64_t block = 0; block < blocks; block++)
            multiply(sums + block * ROWS, shrink, scalars + block * step, step, across, vectors, count, 1, halves,
                     in_pairs);
    }
}

/* Address of a head within the first token's keys or values. */
inlined const char *from_head(const void *cache, int64_t head, const Step *step, const int format) {
    return (const char *)cache + head * head_bytes(step->dim, format);
}

inlined const char *row_of(const char *cache, const int64_t *pages, int64_t key, const Step *step) {
    uint32_t at = key, page_size = step->page_size; /* fewer bits are divided faster */
    int64_t slot = pages[at / page_size] * page_size + at % page_size;
    return cache + slot * step->cache_stride;
}

/* Prefetches one kv head's keys, or values, from ``start`` to ``end``. Heads are interleaved in the cache, so rows may be
 * on different memory pages, where hardware prefetchers stop. */
inlined void prefetch(const char *cache, const int64_t *pages, int64_t start, int64_t end, const Step *step,
                      const int format) {
    for (int64_t key = start; key < end; key++) {
        const char *row = row_of(cache, pages, key, step);
        for (int64_t i = 0; i < head_bytes(step->dim, format); i += LINE) __builtin_prefetch(row + i, 0, 2);
    }
}

/* Copies them to consecutive rows: at their own addresses they would evict each other from the CPU's caches. */
inlined void gather(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                    const Step *step, const int format) {
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key++) {
        const char *row = row_of(cache, pages, start + key, step);
        float scale = stored_scale(row, dim, format);
        if (format == KV_FLOAT) memcpy(rows + key * dim, row, dim * sizeof(float));
        else for (int64_t i = 0; i < dim; i += LANES)
            store(rows + key * dim + i, load_stored(row, i, dim, format) * scale, dim - i);
    }
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

/* e^x for x <= 0 to a relative error of 2^-14, which rounding to bfloat16 hides: 2^n 2^f, where f is at most one half and
 * 2^f a Taylor series. */
inlined floats brief_exponential(floats x) {
#ifdef __AVX512BF16__
    floats power = x * 1.44269504f, whole = (floats)_mm512_roundscale_ps((__m512)power, _MM_FROUND_TO_NEAREST_INT);
    floats rest = power - whole, sum = splat(0.00961813f);
    sum = sum * rest + 0.05550411f;
    sum = sum * rest + 0.24022651f;
    sum = sum * rest + 0.69314718f;
    sum = sum * rest + 1.0f;
    return (floats)_mm512_scalef_ps((__m512)sum, (__m512)whole);
#else
    return exponential(x);
#endif
}

/* As ``gather``, with pairs of dimensions: [count, dim / 2]. */
inlined void gather_keys(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                         const Step *step, const int format) {
#ifdef __AVX512BF16__
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key++) {
        const char *row = row_of(cache, pages, start + key, step);
        float scale = stored_scale(row, dim, format);
        uint16_t *to = (uint16_t *)rows + key * dim;
        for (int64_t i = 0; i < dim; i += LANES) {
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)(load_stored(row, i, dim, format) * scale));
            memcpy(to + i, &rounded, least(LANES, dim - i) * sizeof(uint16_t));
        }
    }
#endif
}

/* As ``gather``, with pairs of keys: [count / 2, dim]. The last pair of an odd number of keys has a zero. */
inlined void gather_values(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                           const Step *step, const int format) {
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key += 2) {
        const char *first = row_of(cache, pages, start + key, step);
        const char *second = key + 1 < count ? row_of(cache, pages, start + key + 1, step) : NULL;
        float scale = stored_scale(first, dim, format), other_scale = second ? stored_scale(second, dim, format) : 0;
        for (int64_t i = 0; i < dim; i += LANES) {
            floats one = load_stored(first, i, dim, format) * scale;
            floats other = second ? load_stored(second, i, dim, format) * other_scale : (floats){};
            store(rows + key / 2 * dim + i, paired(one, other), dim - i);
        }
    }
}

/* A tile of one kv head. Rows are lanes of vectors, so nothing is summed across lanes, and each row processes the same
 * keys in the same order whatever the other tiles are. */
typedef struct {
    float queries[MAX_DIM * ROWS], sums[MAX_DIM * ROWS], scores[TILE * ROWS]; /* [dim or TILE, ROWS], or of pairs */
    floats maxima[2], totals[2], shrink[2];
    ints position[2];          /* position of each row's token in the sequence */
    int64_t place, tokens;     /* index of the first token in the step; number of tokens */
    int64_t first, last;       /* positions of the first and the last token */
    int64_t begin, end;        /* range of keys visible to any row, extended at its start to a multiple of TILE */
} __attribute__((aligned(64))) Tile; /* aligned, so that no vector crosses a cache line */

inlined void begin_tile(Tile *tile, const Step *step, int64_t sequence, int64_t first_token, int64_t kv_head,
                        const int in_pairs) {
    int64_t group = step->heads / step->kv_heads, dim = step->dim, kv_len = step->kv_lens[sequence];
    int64_t query_len = step->query_lens[sequence], tokens = least(ROWS / group, query_len - first_token);
    tile->tokens = tokens;
    tile->place = step->query_starts[sequence] + first_token;
    tile->first = step->causal ? kv_len - query_len + first_token : kv_len - 1;
    tile->last = step->causal ? tile->first + tokens - 1 : tile->first;
    tile->begin = most(0, tile->first - step->window + 1) / TILE * TILE;
    tile->end = tile->last + 1;
    const float *query = step->query + tile->place * step->query_stride + kv_head * group * dim, *rows[ROWS];
    for (int row = 0; row < ROWS; row++) {
        int64_t token = least(row / group, tokens - 1); /* unused rows repeat the last token */
        rows[row] = query + token * step->query_stride + row % group * dim;
        tile->position[row / LANES][row % LANES] = (int32_t)least(tile->first + token, tile->last);
    }
    for (int64_t i = 0; i < dim * ROWS; i++) tile->sums[i] = 0;
    for (int half = 0; half < 2; half++) {
        tile->maxima[half] = splat(NEVER);
        tile->totals[half] = (floats){};
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

/* Turns the scores of ``count`` keys, from ``start`` on, into softmax weights of their values. */
inlined void weigh_tile(Tile *tile, const Step *step, int64_t start, int64_t count, const int halves,
                        const int in_pairs) {
    floats (*scores)[2] = (floats (*)[2])tile->scores, highest[2] = {tile->maxima[0], tile->maxima[1]}, totals[2];
    if (start + count - 1 > tile->first || start <= tile->last - step->window) {
        for (int64_t key = 0; key < count; key++)
            for (int half = 0; half < halves; half++) {
                int32_t at = (int32_t)(start + key);
                ints position = tile->position[half], seen = (at <= position) & (at > position - (int32_t)step->window);
                scores[key][half] = choose(seen, scores[key][half], splat(NEVER));
            }
    }
    for (int64_t key = 0; key < count; key++)
        for (int half = 0; half < halves; half++) highest[half] = larger(scores[key][half], highest[half]);
    for (int half = 0; half < halves; half++) {
        tile->shrink[half] = exponential(tile->maxima[half] - highest[half]);
        tile->maxima[half] = highest[half];
        totals[half] = tile->totals[half] * tile->shrink[half];
    }
    if (in_pairs)
        for (int64_t key = 0; key < count; key += 2)
            for (int half = 0; half < halves; half++) {
                floats first = brief_exponential(scores[key][half] - highest[half]), second = {};
                if (key + 1 < count) second = brief_exponential(scores[key + 1][half] - highest[half]);
                totals[half] += first + second;
                scores[key / 2][half] = paired(first, second);
            }
    else
        for (int64_t key = 0; key < count; key++)
            for (int half = 0; half < halves; half++) {
                scores[key][half] = exponential(scores[key][half] - highest[half]);
                totals[half] += scores[key][half];
            }
    for (int half = 0; half < halves; half++) tile->totals[half] = totals[half];
}

inlined void finish_tile(const Tile *tile, const Step *step, int64_t kv_head) {
    int64_t group = step->heads / step->kv_heads, dim = step->dim, rows = tile->tokens * group;
    for (int64_t first = 0; first < rows; first += LANES)
        for (int64_t i = 0; i < dim; i += LANES) {
            floats square[LANES] = {};
            for (int64_t at = i; at < least(i + LANES, dim); at++)
                square[at - i] = *(const floats *)(tile->sums + at * ROWS + first) / tile->totals[first / LANES];
            transpose(square);
            for (int64_t row = first; row < least(first + LANES, rows); row++) {
                int64_t head = kv_head * group + row % group;
                store(step->output + ((tile->place + row / group) * step->heads + head) * dim + i, square[row - first],
                      dim - i);
            }
        }
}

/* Number of keys, from ``start`` on and at most TILE, that a tile processes. */
inlined int64_t keys_for(const Tile *tile, int64_t start) {
    return start < tile->begin ? 0 : most(0, least(TILE, tile->end - start));
}

/* Attends from consecutive tiles of a sequence, for which keys and values are gathered once; uses the first ``halves``
 * halves of their rows. */
inlined void attend_tiles(Tile *tiles, int64_t num_tiles, const Step *step, int64_t sequence, int64_t kv_head,
                          const int halves, const int in_pairs, const int format) {
    float gathered[TILE * MAX_DIM];
    int64_t dim = step->dim, depth = in_pairs ? dim / 2 : dim, end = tiles[num_tiles - 1].end;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const char *keys = from_head(step->keys, kv_head, step, format);
    const char *values = from_head(step->values, kv_head, step, format);
    for (int64_t start = tiles[0].begin; start < end; start += TILE) {
        int64_t all = least(TILE, end - start);
        if (in_pairs) gather_keys(gathered, keys, pages, start, all, step, format);
        else gather(gathered, keys, pages, start, all, step, format);
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start);
            for (int64_t key = 0, some; key < count; key += some) {
                some = least(BLOCK, count - key);
                int64_t done = which * all + key;
                prefetch(values, pages, start + done / num_tiles, start + (done + some) / num_tiles, step, format);
                multiply_all(tile->scores + key * ROWS, NULL, gathered + key * depth, depth, 1, tile->queries, depth,
                             some, halves, in_pairs);
            }
            if (count) weigh_tile(tile, step, start, count, halves, in_pairs);
        }
        if (in_pairs) gather_values(gathered, values, pages, start, all, step, format);
        else gather(gathered, values, pages, start, all, step, format);
        int64_t next = start + TILE, ahead = least(TILE, end - next); /* below 1 when there is none */
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start);
            for (int64_t i = 0, some; i < dim && count; i += some) {
                some = least(BLOCK, dim - i);
                int64_t done = which * dim + i, whole = num_tiles * dim;
                prefetch(keys, pages, next + ahead * done / whole, next + ahead * (done + some) / whole, step,
                         format);
                multiply_all(tile->sums + i * ROWS, tile->shrink, gathered + i, 1, dim, tile->scores,
                             in_pairs ? (count + 1) / 2 : count, some, halves, in_pairs);
            }
        }
    }
}

inlined void attend_in(const Step *step, const int64_t *first, int64_t num_tiles, int64_t kv_head,
                       const int in_pairs) {
    Tile tiles[TOGETHER];
    int64_t group = step->heads / step->kv_heads, sequence = first[0];
    for (int64_t which = 0; which < num_tiles; which++)
        begin_tile(tiles + which, step, sequence, first[2 * which + 1], kv_head, in_pairs);
    if (num_tiles * tiles->tokens * group <= LANES) {
        IN_FORMAT(attend_tiles, tiles, num_tiles, step, sequence, kv_head, 1, in_pairs);
    } else {
        IN_FORMAT(attend_tiles, tiles, num_tiles, step, sequence, kv_head, 2, in_pairs);
    }
    for (int64_t which = 0; which < num_tiles; which++) finish_tile(tiles + which, step, kv_head);
}

static void attend_in_bf16(const Step *step, const int64_t *first, int64_t num_tiles, int64_t kv_head) {
    attend_in(step, first, num_tiles, kv_head, 1);
}

static void attend_in_float(const Step *step, const int64_t *first, int64_t num_tiles, int64_t kv_head) {
    attend_in(step, first, num_tiles, kv_head, 0);
}

/* Attends from the tiles ``start`` to ``end`` of the step's list, for one kv head, with those of a sequence together. */
static void attend_between(const Step *step, int64_t start, int64_t end, int64_t kv_head) {
    for (int64_t num_tiles; start < end; start += num_tiles) {
        const int64_t *first = step->tiles + 2 * start;
        for (num_tiles = 1; start + num_tiles < end && first[2 * num_tiles] == first[0];) num_tiles++;
        if (attention_has_bf16 && step->in_bf16 && step->dim % 2 == 0) attend_in_bf16(step, first, num_tiles, kv_head);
        else attend_in_float(step, first, num_tiles, kv_head);
    }
}

/* A range of the keys visible to a single token. The results of its spans are combined at the end. */
typedef struct {
    int64_t sequence, start, end;
} Span;

/* Partial results [heads] of each span: the maximum score, the sum of e^(score - maximum), and the sum of the values with
 * these weights, [heads, dim]. */
typedef struct {
    float *maxima, *totals, *sums;
} Parts;

/* Computes the scores of ``count`` keys from ``start`` on, for the query heads of some kv heads, in memory order. */
inlined void score_keys(float scores[][TILE], const Step *step, const Span *span, int64_t start, int64_t count,
                        int64_t first_head, int64_t num_heads, const int64_t dim, const int format) {
    int64_t group = step->heads / step->kv_heads;
    const float *query = step->query + step->query_starts[span->sequence] * step->query_stride + first_head * dim;
    const char *keys = from_head(step->keys, first_head / group, step, format);
    const int64_t *pages = step->pages + step->page_starts[span->sequence];
    for (int64_t key = 0; key < count; key++) {
        const char *row = row_of(keys, pages, start + key, step);
        const char *later = row_of(keys, pages, least(start + key + AHEAD, span->end - 1), step);
        for (int64_t i = 0; i < num_heads / group * head_bytes(dim, format); i += LINE) __builtin_prefetch(later + i);
        for (int64_t head = 0; head < num_heads; head++) {
            const float *own = query + head * dim;
            const char *stored = row + head / group * head_bytes(dim, format);
            floats score = {};
            for (int64_t i = 0; i < dim; i += LANES)
                score += load(own + i, dim - i) * load_stored(stored, i, dim, format);
            scores[head][key] = sum_of(score) * step->scale * stored_scale(stored, dim, format);
        }
    }
}

/* Turns scores into softmax weights, and rescales the previous sums to the new maximum. */
inlined void weigh(float *scores, int64_t count, float *maximum, float *total, float *sums, const int64_t dim) {
    floats highest = splat(*maximum), added = {};
    for (int64_t key = count; key < TILE; key++) scores[key] = NEVER;
    for (int64_t key = 0; key < count; key += LANES) highest = larger(load(scores + key, LANES), highest);
    float found = largest_of(highest);
    for (int64_t key = 0; key < count; key += LANES) {
        floats weight = exponential(load(scores + key, LANES) - found);
        store(scores + key, weight, LANES);
        added += weight;
    }
    float shrink = exponential(splat(*maximum - found))[0];
    *maximum = found;
    *total = *total * shrink + sum_of(added);
    for (int64_t i = 0; i < dim; i += LANES) store(sums + i, load(sums + i, dim - i) * shrink, dim - i);
}

/* Adds the weighted values, AHEAD rows at a time. */
inlined void add_values(float *sums, float scores[][TILE], const Step *step, const Span *span, int64_t start,
                        int64_t count, int64_t first_head, int64_t num_heads, const int64_t dim, const int format) {
    int64_t group = step->heads / step->kv_heads;
    const char *values = from_head(step->values, first_head / group, step, format);
    const int64_t *pages = step->pages + step->page_starts[span->sequence];
    for (int64_t key = 0; key < count; key += AHEAD) {
        const char *rows[AHEAD], *later[AHEAD];
        for (int64_t i = 0; i < AHEAD; i++) {
            /* rows after the last repeat it; their weight is practically 0 */
            rows[i] = row_of(values, pages, start + least(key + i, count - 1), step);
            later[i] = row_of(values, pages, least(start + key + i + AHEAD, span->end - 1), step);
        }
        for (int64_t kv_head = 0; kv_head < num_heads / group; kv_head++) {
            int64_t from = kv_head * head_bytes(dim, format), to = from + head_bytes(dim, format);
            for (int64_t i = 0; i < AHEAD; i++) {
                for (int64_t at = from; at < to; at += LINE) __builtin_prefetch(later[i] + at);
                if (format != KV_INT8) continue;
                float scale = stored_scale(rows[i] + from, dim, format);
                for (int64_t one = 0; one < group; one++) scores[kv_head * group + one][key + i] *= scale;
            }
            for (int64_t at = 0; at < dim; at += LANES) {
                floats value[AHEAD];
                for (int64_t i = 0; i < AHEAD; i++)
                    value[i] = load_stored(rows[i] + from, at, dim, format);
                for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
                    floats sum = load(sums + head * dim + at, dim - at);
                    for (int64_t i = 0; i < AHEAD; i++) sum += scores[head][key + i] * value[i];
                    store(sums + head * dim + at, sum, dim - at);
                }
            }
        }
    }
}

inlined void attend_span(const Step *step, const Span *span, Parts parts, int64_t first_head, int64_t num_heads,
                         const int64_t dim, const int format) {
    float scores[MAX_HEADS][TILE], *sums = parts.sums + first_head * dim;
    for (int64_t head = 0; head < num_heads; head++) {
        parts.maxima[first_head + head] = NEVER;
        parts.totals[first_head + head] = 0;
    }
    for (int64_t i = 0; i < num_heads * dim; i++) sums[i] = 0;
    for (int64_t start = span->start; start < span->end; start += TILE) {
        int64_t count = least(TILE, span->end - start);
        score_keys(scores, step, span, start, count, first_head, num_heads, dim, format);
        for (int64_t head = 0; head < num_heads; head++)
            weigh(scores[head], count, parts.maxima + first_head + head, parts.totals + first_head + head,
                  sums + head * dim, dim);
        add_values(sums, scores, step, span, start, count, first_head, num_heads, dim, format);
    }
}

/* Whether all slots and pages exist, and page tables are long enough. */
static int within(const Step *step) {
    if (step->page_size < 1) return 0;
    for (int64_t token = 0; token < step->num_tokens; token++)
        if (step->slots[token] < 0 || step->slots[token] >= step->num_pages * step->page_size) return 0;
    for (int64_t sequence = 0; sequence < step->num_sequences; sequence++) {
        int last = sequence + 1 == step->num_sequences;
        int64_t first = step->page_starts[sequence], end = last ? step->num_entries : step->page_starts[sequence + 1];
        int64_t needed = (step->kv_lens[sequence] + step->page_size - 1) / step->page_size;
        if (needed > end - first) return 0;
        for (int64_t i = first; i < first + needed; i++)
            if (step->pages[i] < 0 || step->pages[i] >= step->num_pages) return 0;
    }
    return 1;
}

/* Writes the spans of all single tokens, in order, unless ``spans`` is NULL; returns their number. */
static int64_t find_spans(const Step *step, Span *spans) {
    int64_t count = 0;
    for (int64_t which = 0; which < step->num_decodes; which++) {
        int64_t sequence = step->decodes[which], end = step->kv_lens[sequence];
        for (int64_t start = most(0, end - step->window); start < end; start += SPAN, count++)
            if (spans) spans[count] = (Span){sequence, start, least(start + SPAN, end)};
    }
    return count;
}

inlined void attend_sized(const Step *step, const Span *span, Parts parts, int64_t first_head, int64_t num_heads,
                          const int format) {
    if (step->dim == 128) attend_span(step, span, parts, first_head, num_heads, 128, format);
    else if (step->dim == 64) attend_span(step, span, parts, first_head, num_heads, 64, format);
    else attend_span(step, span, parts, first_head, num_heads, step->dim, format);
}

static void attend_one(const Step *step, const Span *span, Parts parts, int64_t first_head, int64_t num_heads) {
    IN_FORMAT(attend_sized, step, span, parts, first_head, num_heads);
}

/* Combines the results of a sequence's spans, of which ``span`` is the first, for one head. */
static void add_spans(const Step *step, const Span *span, Parts parts, int64_t head, int64_t spans_left) {
    int64_t heads = step->heads, dim = step->dim, count = 1;
    while (count < spans_left && span[count].sequence == span->sequence) count++;
    floats highest = splat(NEVER), total = {};
    for (int64_t i = 0; i < count; i++) highest = larger(splat(parts.maxima[i * heads + head]), highest);
    for (int64_t i = 0; i < count; i++)
        total += exponential(splat(parts.maxima[i * heads + head]) - highest) * parts.totals[i * heads + head];
    float *output = step->output + (step->query_starts[span->sequence] * heads + head) * dim;
    for (int64_t at = 0; at < dim; at += LANES) {
        floats sum = {};
        for (int64_t i = 0; i < count; i++) {
            floats share = exponential(splat(parts.maxima[i * heads + head]) - highest);
            sum += share * load(parts.sums + (i * heads + head) * dim + at, dim - at);
        }
        store(output + at, sum / total, dim - at);
    }
}

inlined void write_row(void *cache, int64_t slot, const float *from, const Step *step, const int format) {
    char *to = (char *)cache + slot * step->cache_stride;
    for (int64_t head = 0; head < step->kv_heads; head++)
        store_head(to + head * head_bytes(step->dim, format), from + head * step->dim, step->dim, format);
}

inlined void write_as(const Step *step, int64_t token, const int format) {
    write_row(step->keys, step->slots[token], step->key + token * step->key_stride, step, format);
    write_row(step->values, step->slots[token], step->value + token * step->value_stride, step, format);
}

static void write_token(const Step *step, int64_t token) { IN_FORMAT(write_as, step, token); }

static Parts parts_of(const Step *step, Parts parts, int64_t span) {
    int64_t before = span * step->heads;
    return (Parts){parts.maxima + before, parts.totals + before, parts.sums + before * step->dim};
}

int64_t attention_room(const Step *step) {
    if (!within(step)) return -1;
    int64_t num_spans = find_spans(step, NULL);
    return num_spans * sizeof(Span) + num_spans * step->heads * (step->dim + 2) * sizeof(float);
}

void attend_together(const Step *step, void *room) {
    int64_t heads = step->heads, kv_heads = step->kv_heads, group = heads / kv_heads;
    Span *spans = room;
    int64_t num_spans = find_spans(step, NULL), num_parts = num_spans * heads;
    float *numbers = (float *)(spans + num_spans);
    Parts parts = {numbers, numbers + num_parts, numbers + 2 * num_parts};
    /* if there are few spans, threads take heads of a span separately, which doesn't change results */
    int64_t together = least(kv_heads * num_spans / omp_get_num_threads(), least(kv_heads, MAX_HEADS / group));
    together = most(together, 1);
    int64_t shares = (kv_heads + together - 1) / together, ones = num_spans * shares;
    /* likewise, if there are few tiles, threads take them one at a time */
    int64_t tasks = step->num_tiles * kv_heads / omp_get_num_threads();
    int64_t at_once = most(1, least(TOGETHER, tasks / 8)), num_groups = (step->num_tiles + at_once - 1) / at_once;
#pragma omp single nowait
    find_spans(step, spans);
#pragma omp for
    for (int64_t token = 0; token < step->num_tokens; token++) write_token(step, token);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < ones + num_groups * kv_heads; task++) {
        if (task < ones) {
            int64_t span = task / shares, kv_head = task % shares * together;
            attend_one(step, spans + span, parts_of(step, parts, span), kv_head * group,
                       least(together, kv_heads - kv_head) * group);
        } else {
            /* the last tiles of a prompt have the most work, so they go first */
            int64_t which = num_groups - 1 - (task - ones) / kv_heads;
            attend_between(step, step->num_tiles * which / num_groups, step->num_tiles * (which + 1) / num_groups,
                           (task - ones) % kv_heads);
        }
    }
#pragma omp for
    for (int64_t task = 0; task < num_spans * heads; task++) {
        int64_t span = task / heads;
        if (span > 0 && spans[span - 1].sequence == spans[span].sequence) continue;
        add_spans(step, spans + span, parts_of(step, parts, span), task % heads, num_spans - span);
    }
}

/* Writes the new keys and values, then attends. Returns 1 on success. Without side effects, returns 0 for a slot or page
 * beyond the cache or too short a page table, and -1 if there is no memory. */
int paged_attention(const Step *step) {
    int64_t bytes = attention_room(step);
    if (bytes < 0) return 0;
    void *room = malloc(bytes + 1);
    if (!room) return -1;
#pragma omp parallel
    attend_together(step, room);
    free(room);
    return 1;
}

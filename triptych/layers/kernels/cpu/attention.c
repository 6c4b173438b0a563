/* Attention over a paged KV cache, in float32: new tokens read their sequence's history in place. The cache may be in
 * half precision: keys and values, including the new ones, are then rounded before they are used.
 *
 * Tiles may multiply in bfloat16, where the processor has instructions for it: queries, keys, softmax weights and values
 * are rounded to it, and sums are float32. Two values are then adjacent, a pair: of dimensions for scores, of keys for
 * outputs. A pair has the size of a float, so that tiles and loops are the same. Where the operating system grants AMX,
 * its tiles multiply them.
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
#include "query_tile.h"
#include "vectors.h"

#define MAX_GROUP 16      /* query heads per kv head */
#define MAX_HEADS 32      /* query heads of a single token that are processed together */
#define SPAN 1024         /* keys of a single token that one thread processes */
#define AHEAD 4           /* rows that are prefetched while others are processed */
#define TOGETHER 8        /* maximum number of a sequence's tiles that share gathered keys; limited by the stack */
#define LINE 64           /* bytes of a cache line */

#ifdef __AVX512BF16__
const int attention_has_bf16 = 1;
#else
const int attention_has_bf16 = 0;
#endif
const int attention_group = MAX_GROUP, attention_dim = MAX_DIM, attention_rows = ROWS;

inlined int64_t bytes_of(int64_t elements, const int is_half) {
    return elements * (is_half ? sizeof(uint16_t) : sizeof(float));
}

/* Address of a head within the first token's keys or values. */
inlined const char *from_head(const void *cache, int64_t head, const Step *step, const int is_half) {
    return (const char *)cache + bytes_of(head * step->dim, is_half);
}

inlined const char *row_of(const char *cache, const int64_t *pages, int64_t key, const Step *step, const int is_half) {
    uint32_t at = key, page_size = step->page_size; /* fewer bits are divided faster */
    int64_t slot = pages[at / page_size] * page_size + at % page_size;
    return cache + bytes_of(slot * step->cache_stride, is_half);
}

/* Prefetches one kv head's keys, or values, from ``start`` to ``end``. Heads are interleaved in the cache, so rows may be
 * on different memory pages, where hardware prefetchers stop. */
inlined void prefetch(const char *cache, const int64_t *pages, int64_t start, int64_t end, const Step *step,
                      const int is_half) {
    for (int64_t key = start; key < end; key++) {
        const char *row = row_of(cache, pages, key, step, is_half);
        for (int64_t i = 0; i < bytes_of(step->dim, is_half); i += LINE) __builtin_prefetch(row + i, 0, 2);
    }
}

/* Copies them to consecutive rows: at their own addresses they would evict each other from the CPU's caches. */
inlined void gather(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                    const Step *step, const int is_half) {
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key++) {
        const char *row = row_of(cache, pages, start + key, step, is_half);
        if (!is_half) memcpy(rows + key * dim, row, dim * sizeof(float));
        else for (int64_t i = 0; i < dim; i += LANES)
            store(rows + key * dim + i, load_half((const uint16_t *)row + i, dim - i), dim - i);
    }
}

/* As ``gather``, with pairs of dimensions: [count, depth / 2], padded with zeros. */
inlined void gather_keys(float *rows, int64_t depth, const char *cache, const int64_t *pages, int64_t start,
                         int64_t count, const Step *step, const int is_half) {
#ifdef __AVX512BF16__
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key++) {
        const char *row = row_of(cache, pages, start + key, step, is_half);
        uint16_t *to = (uint16_t *)rows + key * depth;
        for (int64_t i = 0; i < dim; i += LANES) {
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)load_any(row, i, dim - i, is_half));
            memcpy(to + i, &rounded, least(LANES, dim - i) * sizeof(uint16_t));
        }
        for (int64_t i = dim; i < depth; i++) to[i] = 0;
    }
#endif
}

/* As ``gather``, with pairs of keys: [count / 2, dim]. The last pair of an odd number of keys has a zero. */
inlined void gather_values(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                           const Step *step, const int is_half) {
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key += 2) {
        const char *first = row_of(cache, pages, start + key, step, is_half);
        const char *second = key + 1 < count ? row_of(cache, pages, start + key + 1, step, is_half) : NULL;
        for (int64_t i = 0; i < dim; i += LANES) {
            floats other = second ? load_any(second, i, dim - i, is_half) : (floats){};
            store(rows + key / 2 * dim + i, paired(load_any(first, i, dim - i, is_half), other), dim - i);
        }
    }
}

/* As ``gather``, transposed: [depth, TILE] in bfloat16, padded with zeros. */
inlined void gather_columns(float *columns, int64_t depth, const char *cache, const int64_t *pages, int64_t start,
                            int64_t count, const Step *step, const int is_half) {
#ifdef __AVX512BF16__
    for (int64_t key = 0; key < count; key += 2 * LANES) {
        int64_t left = count - key;
        const char *rows[2 * LANES];
        for (int64_t i = 0; i < 2 * LANES; i++)
            rows[i] = row_of(cache, pages, start + key + least(i, left - 1), step, is_half);
        for (int64_t i = 0; i < depth; i += LANES) {
            floats low[LANES] = {}, high[LANES] = {};
            for (int64_t lane = 0; lane < LANES && i < step->dim; lane++) {
                if (lane < left) low[lane] = load_any(rows[lane], i, step->dim - i, is_half);
                if (lane + LANES < left) high[lane] = load_any(rows[lane + LANES], i, step->dim - i, is_half);
            }
            transpose(low);
            transpose(high);
            for (int64_t lane = 0; lane < LANES; lane++) {
                __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh((__m512)high[lane], (__m512)low[lane]);
                memcpy((uint16_t *)columns + (i + lane) * TILE + key, &rounded, sizeof rounded);
            }
        }
    }
#endif
}

/* Number of keys, from ``start`` on and at most TILE, that a tile processes. */
inlined int64_t keys_for(const Tile *tile, int64_t start) {
    return start < tile->begin ? 0 : most(0, least(TILE, tile->end - start));
}

/* Attends from consecutive tiles of a sequence, for which keys and values are gathered once; uses the first ``halves``
 * halves of their rows. */
inlined void attend_tiles(Tile *tiles, int64_t num_tiles, const Step *step, int64_t sequence, int64_t kv_head,
                          const int halves, const int is_half, const int in_pairs) {
    float gathered[TILE * MAX_DIM];
    int64_t dim = step->dim, depth = in_pairs ? dim / 2 : dim, end = tiles[num_tiles - 1].end;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const char *keys = from_head(step->keys, kv_head, step, is_half);
    const char *values = from_head(step->values, kv_head, step, is_half);
    for (int64_t start = tiles[0].begin; start < end; start += TILE) {
        int64_t all = least(TILE, end - start);
        if (in_pairs) gather_keys(gathered, dim, keys, pages, start, all, step, is_half);
        else gather(gathered, keys, pages, start, all, step, is_half);
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start);
            for (int64_t key = 0, some; key < count; key += some) {
                some = least(BLOCK, count - key);
                int64_t done = which * all + key;
                prefetch(values, pages, start + done / num_tiles, start + (done + some) / num_tiles, step, is_half);
                multiply_all(tile->scores + key * ROWS, NULL, gathered + key * depth, depth, 1, tile->queries, depth,
                             some, halves, in_pairs);
            }
            if (count) weigh_tile(tile, step, start, count, halves, in_pairs);
        }
        if (in_pairs) gather_values(gathered, values, pages, start, all, step, is_half);
        else gather(gathered, values, pages, start, all, step, is_half);
        int64_t next = start + TILE, ahead = least(TILE, end - next); /* below 1 when there is none */
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start);
            for (int64_t i = 0, some; i < dim && count; i += some) {
                some = least(BLOCK, dim - i);
                int64_t done = which * dim + i, whole = num_tiles * dim;
                prefetch(keys, pages, next + ahead * done / whole, next + ahead * (done + some) / whole, step,
                         is_half);
                multiply_all(tile->sums + i * ROWS, tile->shrink, gathered + i, 1, dim, tile->scores,
                             in_pairs ? (count + 1) / 2 : count, some, halves, in_pairs);
            }
        }
    }
}

/* As ``attend_tiles``, by AMX. */
inlined void attend_by_amx(Tile *tiles, int64_t num_tiles, const Step *step, int64_t sequence, int64_t kv_head,
                           const int is_half) {
    float gathered[TILE * MAX_DIM / 2] __attribute__((aligned(64)));
    float columns[TILE * MAX_DIM / 2] __attribute__((aligned(64)));
    int64_t depth = whole(step->dim), end = tiles[num_tiles - 1].end;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const char *keys = from_head(step->keys, kv_head, step, is_half);
    const char *values = from_head(step->values, kv_head, step, is_half);
    begin_tiles(WHOLE / 2);
    for (int64_t start = tiles[0].begin; start < end; start += TILE) {
        int64_t all = least(TILE, end - start);
        gather_keys(gathered, depth, keys, pages, start, all, step, is_half);
        gather_columns(columns, depth, values, pages, start, all, step, is_half);
        prefetch(keys, pages, start + TILE, least(start + 2 * TILE, end), step, is_half);
        prefetch(values, pages, start + TILE, least(start + 2 * TILE, end), step, is_half);
        for (Tile *tile = tiles; tile < tiles + num_tiles; tile++) {
            int64_t count = keys_for(tile, start);
            if (!count) continue;
            multiply_by_amx(tile->scores, (uint16_t *)gathered, depth, tile->queries, whole(count), depth, 0);
            weigh_tile(tile, step, start, count, 2, 1);
            shrink_sums(tile, depth);
            multiply_by_amx(tile->sums, (uint16_t *)columns, TILE, tile->scores, depth, whole(count), 1);
        }
    }
    end_tiles();
}

inlined void attend_in(const Step *step, const int64_t *first, int64_t num_tiles, int64_t kv_head,
                       const int in_pairs) {
    Tile tiles[TOGETHER];
    int64_t group = step->heads / step->kv_heads, sequence = first[0];
    for (int64_t which = 0; which < num_tiles; which++)
        begin_tile(tiles + which, step, sequence, first[2 * which + 1], kv_head, in_pairs);
    if (in_pairs && tiles_are_granted) {
        if (step->is_half) attend_by_amx(tiles, num_tiles, step, sequence, kv_head, 1);
        else attend_by_amx(tiles, num_tiles, step, sequence, kv_head, 0);
    } else if (num_tiles * tiles->tokens * group <= LANES) {
        if (step->is_half) attend_tiles(tiles, num_tiles, step, sequence, kv_head, 1, 1, in_pairs);
        else attend_tiles(tiles, num_tiles, step, sequence, kv_head, 1, 0, in_pairs);
    } else {
        if (step->is_half) attend_tiles(tiles, num_tiles, step, sequence, kv_head, 2, 1, in_pairs);
        else attend_tiles(tiles, num_tiles, step, sequence, kv_head, 2, 0, in_pairs);
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
                        int64_t first_head, int64_t num_heads, const int64_t dim, const int is_half) {
    int64_t group = step->heads / step->kv_heads;
    const float *query = step->query + step->query_starts[span->sequence] * step->query_stride + first_head * dim;
    const char *keys = from_head(step->keys, first_head / group, step, is_half);
    const int64_t *pages = step->pages + step->page_starts[span->sequence];
    for (int64_t key = 0; key < count; key++) {
        const char *row = row_of(keys, pages, start + key, step, is_half);
        const char *later = row_of(keys, pages, least(start + key + AHEAD, span->end - 1), step, is_half);
        for (int64_t i = 0; i < bytes_of(num_heads / group * dim, is_half); i += LINE) __builtin_prefetch(later + i);
        for (int64_t head = 0; head < num_heads; head++) {
            const float *own = query + head * dim;
            int64_t other = head / group * dim;
            floats score = {};
            for (int64_t i = 0; i < dim; i += LANES)
                score += load(own + i, dim - i) * load_any(row, other + i, dim - i, is_half);
            scores[head][key] = sum_of(score) * step->scale;
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
                        int64_t count, int64_t first_head, int64_t num_heads, const int64_t dim, const int is_half) {
    int64_t group = step->heads / step->kv_heads;
    const char *values = from_head(step->values, first_head / group, step, is_half);
    const int64_t *pages = step->pages + step->page_starts[span->sequence];
    for (int64_t key = 0; key < count; key += AHEAD) {
        const char *rows[AHEAD], *later[AHEAD];
        for (int64_t i = 0; i < AHEAD; i++) {
            /* rows after the last repeat it; their weight is practically 0 */
            rows[i] = row_of(values, pages, start + least(key + i, count - 1), step, is_half);
            later[i] = row_of(values, pages, least(start + key + i + AHEAD, span->end - 1), step, is_half);
        }
        for (int64_t kv_head = 0; kv_head < num_heads / group; kv_head++) {
            int64_t from = bytes_of(kv_head * dim, is_half), to = bytes_of((kv_head + 1) * dim, is_half);
            for (int64_t i = 0; i < AHEAD; i++)
                for (int64_t at = from; at < to; at += LINE) __builtin_prefetch(later[i] + at);
            for (int64_t at = 0; at < dim; at += LANES) {
                floats value[AHEAD];
                for (int64_t i = 0; i < AHEAD; i++)
                    value[i] = load_any(rows[i], kv_head * dim + at, dim - at, is_half);
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
                         const int64_t dim, const int is_half) {
    float scores[MAX_HEADS][TILE], *sums = parts.sums + first_head * dim;
    for (int64_t head = 0; head < num_heads; head++) {
        parts.maxima[first_head + head] = NEVER;
        parts.totals[first_head + head] = 0;
    }
    for (int64_t i = 0; i < num_heads * dim; i++) sums[i] = 0;
    for (int64_t start = span->start; start < span->end; start += TILE) {
        int64_t count = least(TILE, span->end - start);
        score_keys(scores, step, span, start, count, first_head, num_heads, dim, is_half);
        for (int64_t head = 0; head < num_heads; head++)
            weigh(scores[head], count, parts.maxima + first_head + head, parts.totals + first_head + head,
                  sums + head * dim, dim);
        add_values(sums, scores, step, span, start, count, first_head, num_heads, dim, is_half);
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
                          const int is_half) {
    if (step->dim == 128) attend_span(step, span, parts, first_head, num_heads, 128, is_half);
    else if (step->dim == 64) attend_span(step, span, parts, first_head, num_heads, 64, is_half);
    else attend_span(step, span, parts, first_head, num_heads, step->dim, is_half);
}

static void attend_one(const Step *step, const Span *span, Parts parts, int64_t first_head, int64_t num_heads) {
    if (step->is_half) attend_sized(step, span, parts, first_head, num_heads, 1);
    else attend_sized(step, span, parts, first_head, num_heads, 0);
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

inlined void write_row(void *cache, int64_t slot, const float *from, const Step *step, const int is_half) {
    char *to = (char *)cache + bytes_of(slot * step->cache_stride, is_half);
    int64_t width = step->kv_heads * step->dim;
    if (!is_half) memcpy(to, from, width * sizeof(float));
    else for (int64_t i = 0; i < width; i += LANES)
        store_half((uint16_t *)to + i, load(from + i, width - i), width - i);
}

inlined void write_as(const Step *step, int64_t token, const int is_half) {
    write_row(step->keys, step->slots[token], step->key + token * step->key_stride, step, is_half);
    write_row(step->values, step->slots[token], step->value + token * step->value_stride, step, is_half);
}

static void write_token(const Step *step, int64_t token) {
    if (step->is_half) write_as(step, token, 1);
    else write_as(step, token, 0);
}

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

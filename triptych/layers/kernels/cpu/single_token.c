/* Attention from a sequence's generated token (decode). Its keys are divided into spans, which threads take; a span is
 * read row by row, for all its heads, so that memory is read in order. A group's query heads are processed in twos:
 * what is stored is converted once for both. In int8, whole numbers are multiplied, and scores and weights by the scales.
 */
#include "kv_cache.h"
#include "single_token.h"

#define SPAN 1024      /* keys that one thread processes */
#define SCORED 4       /* keys that are scored at a time */
#define ADDED 8        /* keys whose values are added at a time */
#define FARTHEST 32    /* rows between those that are prefetched and those that are processed, at most */
#define DISTANCE 16384 /* the same in bytes */

/* Some groups of query heads, and the keys of a tile. */
typedef struct {
    const float *query;        /* of the first head */
    const char *keys, *values; /* the cache */
    const int64_t *rows;       /* [TILE + FARTHEST]: bytes from there to each key and to those after the tile; after the
                                * span's last it is repeated */
    int64_t count;             /* keys of the tile */
    int64_t groups, size;      /* groups, and query heads of each */
    int64_t kv_heads[MAX_HEADS]; /* bytes from a row to the kv head of each group */
    int64_t bytes, ahead;      /* bytes of a kv head; rows between those that are prefetched and that are processed */
} Work;

/* Prefetches a kv head's share of ``count`` rows that are needed later. */
inlined void prefetch(const char *cache, const Work *work, int64_t key, int64_t count, int64_t group) {
    for (int64_t i = key + work->ahead; i < key + work->ahead + count; i++)
        for (int64_t at = 0; at < work->bytes; at += LINE)
            __builtin_prefetch(cache + work->rows[i] + work->kv_heads[group] + at);
}

/* One lane's sum of ``first`` in each lane whose number lacks the bit ``far``, and of ``second`` in the others. */
inlined floats merged(floats first, floats second, const int far) {
    ints lane = NEIGHBOURS(0), from = lane + (((lane & far) != 0) & (LANES - far));
    return __builtin_shuffle(first, second, from) + __builtin_shuffle(first, second, from + far);
}

/* Adds up each vector, in the order of ``sum_of``. */
inlined void sums_of(float *found, const floats *vectors) {
    floats sum = merged(merged(vectors[0], vectors[1], LANES / 2), merged(vectors[2], vectors[3], LANES / 2), LANES / 4);
#if LANES == 16
    sum += __builtin_shuffle(sum, (ints)NEIGHBOURS(2));
#endif
    sum += __builtin_shuffle(sum, (ints)NEIGHBOURS(1));
    found[0] = sum[0], found[1] = sum[LANES / 2], found[2] = sum[LANES / 4], found[3] = sum[LANES / 4 * 3];
}

/* Adds the products of ``left`` dimensions, or of a vector of them, of one query head or two with SCORED keys. */
inlined void add_products(floats sums[2][SCORED], const float *query, const char *const *stored, int64_t at,
                          int64_t left, int64_t dim, const int heads, const int format) {
    floats one = load(query + at, left), two = heads > 1 ? load(query + dim + at, left) : one;
#pragma GCC unroll 4
    for (int i = 0; i < SCORED; i++) {
        floats value = load_stored(stored[i], at, left, format);
        sums[0][i] += one * value;
        if (heads > 1) sums[1][i] += two * value;
    }
}

/* Computes the scores of SCORED keys for one query head, or two that share a kv head. */
inlined void score(float scores[][TILE], const Step *step, const float *query, const char *keys, const int64_t *rows,
                   const int heads, const int format) {
    int64_t dim = step->dim, whole = dim / LANES * LANES;
    const char *stored[SCORED];
    floats sums[2][SCORED] = {};
    for (int i = 0; i < SCORED; i++) stored[i] = keys + rows[i];
    for (int64_t at = 0; at < whole; at += LANES) add_products(sums, query, stored, at, LANES, dim, heads, format);
    if (whole < dim) add_products(sums, query, stored, whole, dim - whole, dim, heads, format);
    for (int head = 0; head < heads; head++) {
        sums_of(scores[head], sums[head]);
        for (int i = 0; i < SCORED; i++) scores[head][i] *= step->scale * stored_scale(stored[i], dim, format);
    }
}

inlined void score_keys(float scores[][TILE], const Step *step, const Work *work, const int format) {
    for (int64_t key = 0; key < work->count; key += SCORED)
        for (int64_t group = 0; group < work->groups; group++) {
            const char *keys = work->keys + work->kv_heads[group];
            prefetch(work->keys, work, key, SCORED, group);
            for (int64_t one = 0; one < work->size; one += 2) {
                int64_t head = group * work->size + one;
                const float *query = work->query + head * step->dim;
                float (*own)[TILE] = (float (*)[TILE])(scores[head] + key);
                if (one + 1 < work->size) score(own, step, query, keys, work->rows + key, 2, format);
                else score(own, step, query, keys, work->rows + key, 1, format);
            }
        }
}

/* Turns scores into softmax weights, and rescales the previous sums to the new maximum. */
inlined void weigh(float *scores, int64_t count, float *maximum, float *total, float *sums, int64_t dim) {
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

/* Adds ``left`` dimensions, or a vector of them, of the weighted values of ADDED keys, for one query head or two. */
inlined void add_weighted(float *sums, float weights[][TILE], const char *const *stored, int64_t at, int64_t left,
                          int64_t dim, const int heads, const int format) {
    floats one = load(sums + at, left), two = heads > 1 ? load(sums + dim + at, left) : one;
#pragma GCC unroll 8
    for (int i = 0; i < ADDED; i++) {
        floats value = load_stored(stored[i], at, left, format);
        one += weights[0][i] * value;
        if (heads > 1) two += weights[1][i] * value;
    }
    store(sums + at, one, left);
    if (heads > 1) store(sums + dim + at, two, left);
}

/* Adds the weighted values of ADDED keys for one query head, or two that share a kv head. */
inlined void add(float *sums, float weights[][TILE], const char *values, const int64_t *rows, const Step *step,
                 const int heads, const int format) {
    int64_t dim = step->value_dim, whole = dim / LANES * LANES;
    const char *stored[ADDED];
    for (int i = 0; i < ADDED; i++) {
        stored[i] = values + rows[i];
        for (int head = 0; head < heads; head++) weights[head][i] *= stored_scale(stored[i], step->dim, format);
    }
    for (int64_t at = 0; at < whole; at += LANES) add_weighted(sums, weights, stored, at, LANES, dim, heads, format);
    if (whole < dim) add_weighted(sums, weights, stored, whole, dim - whole, dim, heads, format);
}

/* Weights of keys after the last are practically 0. */
inlined void add_values(float *sums, float weights[][TILE], const Step *step, const Work *work, const int format) {
    int64_t dim = step->value_dim;
    for (int64_t key = 0; key < work->count; key += ADDED)
        for (int64_t group = 0; group < work->groups; group++) {
            const char *values = work->values + work->kv_heads[group];
            prefetch(work->values, work, key, ADDED, group);
            for (int64_t one = 0; one < work->size; one += 2) {
                int64_t head = group * work->size + one;
                float (*own)[TILE] = (float (*)[TILE])(weights[head] + key);
                if (one + 1 < work->size) add(sums + head * dim, own, values, work->rows + key, step, 2, format);
                else add(sums + head * dim, own, values, work->rows + key, step, 1, format);
            }
        }
}

inlined void attend_keys(const Step *step, const Work *work, Parts parts, const int format) {
    float scores[MAX_HEADS][TILE];
    score_keys(scores, step, work, format);
    int64_t dim = step->value_dim;
    for (int64_t head = 0; head < work->groups * work->size; head++) {
        if (step->cap) cap_scores(scores[head], work->count, step->cap);
        weigh(scores[head], work->count, parts.maxima + head, parts.totals + head, parts.sums + head * dim, dim);
    }
    add_values(parts.sums, scores, step, work, format);
}

void attend_span(const Step *step, const Span *span, Parts parts, int64_t first_group, int64_t num_groups) {
    int64_t size = step->heads / step->groups, dim = step->dim, bytes = head_bytes(dim, step->format);
    int64_t rows[TILE + FARTHEST], together = num_groups * bytes, num_heads = num_groups * size;
    const int64_t *pages = step->pages + step->page_starts[span->sequence];
    Work work = {
        .query = step->query + step->query_starts[span->sequence] * step->query_stride + first_group * size * dim,
        .keys = step->keys,
        .values = step->values,
        .rows = rows,
        .groups = num_groups,
        .size = size,
        .bytes = bytes,
        .ahead = most(ADDED, least(FARTHEST, DISTANCE / together)),
    };
    for (int64_t head = 0; head < num_heads; head++) {
        parts.maxima[head] = NEVER;
        parts.totals[head] = 0;
    }
    for (int64_t i = 0; i < num_groups; i++) work.kv_heads[i] = head_of(first_group + i, step);
    for (int64_t i = 0; i < num_heads * step->value_dim; i++) parts.sums[i] = 0;
    for (int64_t start = span->start; start < span->end; start += TILE) {
        for (int64_t key = 0; key < TILE + FARTHEST; key++)
            rows[key] = row_of(pages, least(start + key, span->end - 1), step);
        work.count = least(TILE, span->end - start);
        IN_FORMAT(attend_keys, step, &work, parts);
    }
}

int64_t find_spans(const Step *step, Span *spans) {
    int64_t count = 0;
    for (int64_t which = 0; which < step->num_decodes; which++) {
        int64_t sequence = step->decodes[which], end = step->kv_lens[sequence];
        for (int64_t start = first_read(step, end - 1); start < end; start += SPAN, count++)
            if (spans) spans[count] = (Span){sequence, start, least(start + SPAN, end)};
    }
    return count;
}

void add_spans(const Step *step, const Span *span, Parts parts, int64_t head, int64_t spans_left) {
    int64_t heads = step->heads, dim = step->value_dim, count = 1;
    while (count < spans_left && span[count].sequence == span->sequence) count++;
    floats sink = splat(step->sinks ? step->sinks[head] : NEVER), highest = sink, total = {};
    for (int64_t i = 0; i < count; i++) highest = larger(splat(parts.maxima[i * heads + head]), highest);
    for (int64_t i = 0; i < count; i++)
        total += exponential(splat(parts.maxima[i * heads + head]) - highest) * parts.totals[i * heads + head];
    if (step->sinks) total += exponential(sink - highest);
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

/* Attention over a paged KV cache, in float32: new tokens read their sequence's history in place.
 *
 * A single new token (decode) and a tile of several (a chunk of a prompt) go through their keys once, each with a
 * running maximum and sum of the softmax (Milakov and Gimelshein, arXiv:1805.02867), for all query heads that share a
 * kv head.
 * Built by native.py.
 */
#include "vectors.h"

#define MAX_GROUP 16      /* query heads for one kv head */
#define MAX_DIM 256       /* of a head */
#define NEVER -1e30f      /* a score that loses to all others, and of which two have a difference */
#define BLOCK (LANES / 2) /* keys, or dimensions, whose sums are in registers at a time */
#define ROWS (2 * LANES)  /* of a tile: its tokens, times the query heads of a kv head */
#define TILE 64           /* keys scored before their values are added up */
#define LINE 16           /* floats that memory is read by */

/* A step of S sequences and T new tokens, and one layer's operands. ``PagedTables`` says what the int64 fields are. */
typedef struct {
    const float *query;        /* [T, heads, dim], query_stride floats from one token to the next; so the next two */
    const float *key, *value;  /* [T, kv_heads, dim] */
    float *keys, *values;      /* [pages, page_size, kv_heads, dim], cache_stride floats from one token to the next */
    float *output;             /* [T, heads, dim] */
    const int64_t *slots, *query_starts, *query_lens, *kv_lens, *page_starts, *decodes, *tiles, *pages;
    int64_t num_tokens, num_sequences, num_decodes, num_tiles, num_entries; /* entries: of pages */
    int64_t heads, kv_heads, dim, num_pages, page_size;
    int64_t query_stride, key_stride, value_stride, cache_stride;
    int64_t window;            /* how many tokens each one sees, at most 2^30 */
    float scale;
} Step;

inlined int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inlined int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* sums[block][ROWS] += scalars[block * step + i * across] * vectors[i][ROWS], over i; of the rows, so many halves. */
inlined void multiply(float *sums, const float *scalars, int64_t step, int64_t across, const float *vectors,
                      int64_t count, const int blocks, const int halves) {
    floats found[BLOCK][2];
    for (int block = 0; block < blocks; block++)
        for (int half = 0; half < halves; half++) found[block][half] = *(floats *)(sums + block * ROWS + half * LANES);
    for (int64_t i = 0; i < count; i++) {
        const floats *vector = (const floats *)(vectors + i * ROWS);
        floats low = vector[0], high = halves > 1 ? vector[1] : low;
#pragma GCC unroll 8
        for (int block = 0; block < blocks; block++) {
            float scalar = scalars[block * step + i * across];
            found[block][0] += scalar * low;
            if (halves > 1) found[block][1] += scalar * high;
        }
    }
    for (int block = 0; block < blocks; block++)
        for (int half = 0; half < halves; half++) *(floats *)(sums + block * ROWS + half * LANES) = found[block][half];
}

inlined void multiply_all(float *sums, const float *scalars, int64_t step, int64_t across, const float *vectors,
                          int64_t count, int64_t blocks, const int halves) {
    if (blocks == BLOCK) {
        multiply(sums, scalars, step, across, vectors, count, BLOCK, halves);
    } else {
        for (int64_t block = 0; block < blocks; block++)
            multiply(sums + block * ROWS, scalars + block * step, step, across, vectors, count, 1, halves);
    }
}

/* Where key ``start`` is, and how many follow it at the same distance from each other, at most ``wanted``. */
inlined int64_t run(const int64_t *pages, int64_t start, int64_t wanted, int64_t page_size, int64_t *slot) {
    int64_t page = start / page_size, found = page_size - start % page_size;
    *slot = pages[page] * page_size + start % page_size;
    for (; found < wanted && pages[page + 1] == pages[page] + 1; page++) found += page_size;
    return least(found, wanted);
}

inlined const float *row_of(const float *cache, const int64_t *pages, int64_t key, const Step *step) {
    return cache + (pages[key / step->page_size] * step->page_size + key % step->page_size) * step->cache_stride;
}

/* Has the keys, or values, from ``start`` to ``end`` of one kv head on their way. Heads lie between each other's in the
 * cache, so each row is on another page, which is where processors stop to prefetch by themselves. */
inlined void prefetch(const float *cache, const int64_t *pages, int64_t start, int64_t end, const Step *step) {
    for (int64_t key = start; key < end; key++) {
        const float *row = row_of(cache, pages, key, step);
        for (int64_t i = 0; i < step->dim; i += LINE) __builtin_prefetch(row + i, 0, 2);
    }
}

/* Copies them, one after the other: where they are, they would push each other out of the processor's caches. */
inlined void gather(float *rows, const float *cache, const int64_t *pages, int64_t start, int64_t count,
                    const Step *step) {
    for (int64_t key = 0; key < count; key++)
        memcpy(rows + key * step->dim, row_of(cache, pages, start + key, step), step->dim * sizeof(float));
}

inlined void attend_tile(const Step *step, int64_t sequence, int64_t first_token, int64_t kv_head, const int halves) {
    float queries[MAX_DIM * ROWS], sums[MAX_DIM * ROWS], scores[TILE * ROWS], rows[TILE * MAX_DIM];
    int64_t group = step->heads / step->kv_heads, dim = step->dim, kv_len = step->kv_lens[sequence];
    int64_t query_len = step->query_lens[sequence], tokens = least(ROWS / group, query_len - first_token);
    int64_t first = kv_len - query_len + first_token, last = first + tokens - 1; /* their positions */
    int64_t place = step->query_starts[sequence] + first_token;
    const float *query = step->query + place * step->query_stride + kv_head * group * dim;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const float *keys = step->keys + kv_head * dim, *values = step->values + kv_head * dim;
    ints position[2];
    for (int row = 0; row < ROWS; row++) {
        int64_t token = least(row / group, tokens - 1); /* rows without a token repeat the last one's */
        const float *own = query + token * step->query_stride + row % group * dim;
        for (int64_t i = 0; i < dim; i++) queries[i * ROWS + row] = own[i] * step->scale;
        position[row / LANES][row % LANES] = (int32_t)(first + token);
    }
    for (int64_t i = 0; i < dim * ROWS; i++) sums[i] = 0;
    floats maxima[2] = {all(NEVER), all(NEVER)}, totals[2] = {{}, {}};
    int64_t end = last + 1, begin = most(0, first - step->window + 1);
    for (int64_t start = begin; start < end; start += TILE) {
        int64_t count = least(TILE, end - start);
        for (int64_t i = 0; i < count * ROWS; i++) scores[i] = 0;
        gather(rows, keys, pages, start, count, step);
        for (int64_t key = 0, some; key < count; key += some) {
            some = least(BLOCK, count - key);
            prefetch(values, pages, start + key, start + key + some, step);
            multiply_all(scores + key * ROWS, rows + key * dim, dim, 1, queries, dim, some, halves);
        }
        int partly = start + count - 1 > first || start <= last - step->window;
        for (int half = 0; half < halves; half++) {
            floats highest = maxima[half];
            for (int64_t key = 0; key < count; key++) {
                floats *score = (floats *)(scores + key * ROWS + half * LANES);
                if (partly) {
                    int32_t at = (int32_t)(start + key);
                    ints seen = (at <= position[half]) & (at > position[half] - (int32_t)step->window);
                    *score = choose(seen, *score, all(NEVER));
                }
                highest = larger(*score, highest);
            }
            floats shrink = exponential(maxima[half] - highest);
            maxima[half] = highest;
            totals[half] *= shrink;
            for (int64_t i = 0; i < dim; i++) *(floats *)(sums + i * ROWS + half * LANES) *= shrink;
            for (int64_t key = 0; key < count; key++) {
                floats *score = (floats *)(scores + key * ROWS + half * LANES);
                *score = exponential(*score - highest);
                totals[half] += *score;
            }
        }
        gather(rows, values, pages, start, count, step);
        int64_t next = start + TILE, ahead = least(TILE, end - next); /* below 1 when there is none */
        for (int64_t i = 0, some; i < dim; i += some) {
            some = least(BLOCK, dim - i);
            prefetch(keys, pages, next + ahead * i / dim, next + ahead * (i + some) / dim, step);
            multiply_all(sums + i * ROWS, rows + i, 1, dim, scores, count, some, halves);
        }
    }
    for (int row = 0; row < tokens * group; row++) {
        float *output = step->output + ((place + row / group) * step->heads + kv_head * group + row % group) * dim;
        float total = totals[row / LANES][row % LANES];
        for (int64_t i = 0; i < dim; i++) output[i] = sums[i * ROWS + row] / total;
    }
}

static void attend_several(const Step *step, int64_t sequence, int64_t first_token, int64_t kv_head) {
    int64_t group = step->heads / step->kv_heads, tokens = step->query_lens[sequence] - first_token;
    if (tokens * group <= LANES) attend_tile(step, sequence, first_token, kv_head, 1);
    else attend_tile(step, sequence, first_token, kv_head, 2);
}

static void attend_one(const Step *step, int64_t sequence, int64_t kv_head) {
    float sums[MAX_GROUP][MAX_DIM], scores[MAX_GROUP][TILE], maxima[MAX_GROUP], totals[MAX_GROUP];
    int64_t group = step->heads / step->kv_heads, dim = step->dim, kv_len = step->kv_lens[sequence], slot, count;
    const float *query = step->query + step->query_starts[sequence] * step->query_stride + kv_head * group * dim;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const float *all_keys = step->keys + kv_head * dim, *all_values = step->values + kv_head * dim;
    for (int64_t head = 0; head < group; head++) {
        maxima[head] = NEVER;
        totals[head] = 0;
        for (int64_t i = 0; i < dim; i++) sums[head][i] = 0;
    }
    for (int64_t start = most(0, kv_len - step->window); start < kv_len; start += count) {
        count = run(pages, start, least(TILE, kv_len - start), step->page_size, &slot);
        const float *keys = all_keys + slot * step->cache_stride, *values = all_values + slot * step->cache_stride;
        for (int64_t key = 0; key < count; key++) {
            prefetch(all_values, pages, start + key, start + key + 1, step);
            for (int64_t head = 0; head < group; head++) {
                floats score = {};
                for (int64_t i = 0; i < dim; i += LANES)
                    score += load(query + head * dim + i, dim - i) * load(keys + key * step->cache_stride + i, dim - i);
                scores[head][key] = sum_of(score) * step->scale;
            }
        }
        for (int64_t head = 0; head < group; head++) {
            floats highest = all(maxima[head]), total = {};
            for (int64_t key = count; key < TILE; key++) scores[head][key] = NEVER;
            for (int64_t key = 0; key < count; key += LANES) highest = larger(load(scores[head] + key, LANES), highest);
            float maximum = largest_of(highest);
            for (int64_t key = 0; key < count; key += LANES) {
                floats weight = exponential(load(scores[head] + key, LANES) - maximum);
                store(scores[head] + key, weight, LANES);
                total += weight;
            }
            float shrink = exponential(all(maxima[head] - maximum))[0];
            maxima[head] = maximum;
            totals[head] = totals[head] * shrink + sum_of(total);
            for (int64_t i = 0; i < dim; i += LANES)
                store(sums[head] + i, load(sums[head] + i, dim - i) * shrink, dim - i);
        }
        int64_t next = start + count, ahead = least(count, kv_len - next);
        prefetch(all_keys, pages, next, next + ahead, step);
        for (int64_t head = 0; head < group; head++)
            for (int64_t i = 0; i < dim; i += LANES) {
                floats sum = load(sums[head] + i, dim - i);
                for (int64_t key = 0; key < count; key++)
                    sum += scores[head][key] * load(values + key * step->cache_stride + i, dim - i);
                store(sums[head] + i, sum, dim - i);
            }
    }
    float *output = step->output + (step->query_starts[sequence] * step->heads + kv_head * group) * dim;
    for (int64_t head = 0; head < group; head++)
        for (int64_t i = 0; i < dim; i++) output[head * dim + i] = sums[head][i] / totals[head];
}

int rows(void) { return ROWS; }

static int within(const Step *step) {
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

/* Writes the new keys and values, then attends. Returns 1; or 0, having done nothing, for a slot or a page that the
 * cache doesn't have, or a page table that is too short. */
int paged_attention(const Step *step) {
    if (!within(step)) return 0;
    int64_t ones = step->num_decodes * step->kv_heads, tasks = ones + step->num_tiles * step->kv_heads;
    int64_t width = step->kv_heads * step->dim;
#pragma omp parallel
    {
#pragma omp for
        for (int64_t token = 0; token < step->num_tokens; token++) {
            int64_t slot = step->slots[token];
            memcpy(step->keys + slot * step->cache_stride, step->key + token * step->key_stride, width * sizeof(float));
            memcpy(step->values + slot * step->cache_stride, step->value + token * step->value_stride,
                   width * sizeof(float));
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            int64_t kv_head = task % step->kv_heads, which = task / step->kv_heads;
            if (task < ones) {
                attend_one(step, step->decodes[which], kv_head);
            } else {
                /* a prompt's last tiles see most: they go first */
                const int64_t *tile = step->tiles + 2 * (step->num_tiles - 1 - (which - step->num_decodes));
                attend_several(step, tile[0], tile[1], kv_head);
            }
        }
    }
    return 1;
}

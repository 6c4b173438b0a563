/* Attention over a paged KV cache, in float32: new tokens read their sequence's history in place. The cache may be in
 * half precision or int8 (kv_cache.h): keys and values, including the new ones, are then rounded before they are used.
 *
 * Tiles may multiply in bfloat16, where the processor has instructions for it: queries, keys, softmax weights and values
 * are rounded to it, and sums are float32. Two values are then adjacent, a pair: of dimensions for scores, of keys for
 * outputs. A pair has the size of a float, so that tiles and loops are the same. Where the operating system grants AMX,
 * its tiles multiply them; keys and values of segments, which are new and all tokens' of a sequence, are then rounded
 * once for all tiles.
 *
 * A tile of new tokens (a chunk of a prompt, also of one token) reads its keys once for a group of query heads that share
 * a kv head; a generated token (decode) reads a span of keys, row by row, for all its heads. Each keeps a running maximum
 * and sum of the softmax (Milakov and Gimelshein, arXiv:1805.02867). A token's output depends, to the bit, on its own
 * sequence and on whether it decodes (single_token.c), but not on its chunk or the rest of the step.
 * Built by native.py.
 */
#include <omp.h>
#include <stdlib.h>

#include "attention.h"
#include "kv_cache.h"
#include "query_tile.h"
#include "single_token.h"
#include "vectors.h"

#define MAX_GROUP 16 /* query heads per group */
#define TOGETHER 16  /* maximum number of a sequence's tiles that share gathered keys */
#define ON_STACK (1024 * 1024) /* bytes of their queries and sums: threads may have stacks of 2 MiB */

#ifdef __AVX512BF16__
const int attention_has_bf16 = 1;
#else
const int attention_has_bf16 = 0;
#endif
const int attention_group = MAX_GROUP, attention_dim = MAX_DIM, attention_rows = ROWS;

/* Prefetches one kv head's keys, or values, from ``start`` to ``end``. Heads are interleaved in the cache, so rows may be
 * on different memory pages, where hardware prefetchers stop. */
inlined void prefetch(const char *cache, const int64_t *pages, int64_t start, int64_t end, const Step *step) {
    int64_t bytes = head_bytes(step->dim, step->format);
    for (int64_t key = start; key < end; key++) {
        const char *row = cache + row_of(pages, key, step);
        for (int64_t i = 0; i < bytes; i += LINE) __builtin_prefetch(row + i, 0, 2);
    }
}

/* Copies them to consecutive rows: at their own addresses they would evict each other from the CPU's caches. */
inlined void gather(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                    const Step *step, const int format) {
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key++) {
        const char *row = cache + row_of(pages, start + key, step);
        float scale = stored_scale(row, dim, format);
        if (format == KV_FLOAT) memcpy(rows + key * dim, row, dim * sizeof(float));
        else for (int64_t i = 0; i < dim; i += LANES)
            store(rows + key * dim + i, load_stored(row, i, dim - i, format) * scale, dim - i);
    }
}

/* As ``gather``, with pairs of dimensions: [count, depth / 2], padded with zeros. */
inlined void gather_keys(float *rows, int64_t depth, const char *cache, const int64_t *pages, int64_t start,
                         int64_t count, const Step *step, const int format) {
#ifdef __AVX512BF16__
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key++) {
        const char *row = cache + row_of(pages, start + key, step);
        float scale = stored_scale(row, dim, format);
        uint16_t *to = (uint16_t *)rows + key * depth;
        for (int64_t i = 0; i < dim; i += LANES) {
            __m256i rounded = (__m256i)_mm512_cvtneps_pbh((__m512)(load_stored(row, i, dim - i, format) * scale));
            _mm256_mask_storeu_epi16(to + i, (1 << least(LANES, dim - i)) - 1, rounded);
        }
        for (int64_t i = dim; i < depth; i++) to[i] = 0;
    }
#endif
}

/* As ``gather``, with pairs of keys: [count / 2, dim]. The last pair of an odd number of keys has a zero. */
inlined void gather_values(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                           const Step *step, const int format) {
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key += 2) {
        const char *first = cache + row_of(pages, start + key, step);
        const char *second = key + 1 < count ? cache + row_of(pages, start + key + 1, step) : NULL;
        float scale = stored_scale(first, dim, format), other_scale = second ? stored_scale(second, dim, format) : 0;
        for (int64_t i = 0; i < dim; i += LANES) {
            floats one = load_stored(first, i, dim - i, format) * scale;
            floats other = second ? load_stored(second, i, dim - i, format) * other_scale : (floats){};
            store(rows + key / 2 * dim + i, paired(one, other), dim - i);
        }
    }
}

/* As ``gather``, transposed: [depth, TILE] in bfloat16, padded with zeros. */
inlined void gather_columns(float *columns, int64_t depth, const char *cache, const int64_t *pages, int64_t start,
                            int64_t count, const Step *step, const int format) {
#ifdef __AVX512BF16__
    int64_t dim = step->dim;
    for (int64_t key = 0; key < count; key += 2 * LANES) {
        int64_t left = count - key;
        const char *rows[2 * LANES];
        for (int64_t i = 0; i < 2 * LANES; i++)
            rows[i] = cache + row_of(pages, start + key + least(i, left - 1), step);
        for (int64_t i = 0; i < depth; i += LANES) {
            floats low[LANES] = {}, high[LANES] = {};
            for (int64_t lane = 0; lane < LANES && i < dim; lane++) {
                const char *first = rows[lane], *second = rows[lane + LANES];
                if (lane < left) low[lane] = load_stored(first, i, dim - i, format) * stored_scale(first, dim, format);
                if (lane + LANES < left)
                    high[lane] = load_stored(second, i, dim - i, format) * stored_scale(second, dim, format);
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

static void gather_as_floats(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                             const Step *step) {
    IN_FORMAT(gather, rows, cache, pages, start, count, step);
}

static void gather_key_pairs(float *rows, int64_t depth, const char *cache, const int64_t *pages, int64_t start,
                             int64_t count, const Step *step) {
    IN_FORMAT(gather_keys, rows, depth, cache, pages, start, count, step);
}

static void gather_value_pairs(float *rows, const char *cache, const int64_t *pages, int64_t start, int64_t count,
                               const Step *step) {
    IN_FORMAT(gather_values, rows, cache, pages, start, count, step);
}

static void gather_value_columns(float *columns, int64_t depth, const char *cache, const int64_t *pages, int64_t start,
                                 int64_t count, const Step *step) {
    IN_FORMAT(gather_columns, columns, depth, cache, pages, start, count, step);
}

/* Number of keys, from ``start`` on and at most TILE, that a tile processes. */
inlined int64_t keys_for(const Tile *tile, int64_t start) {
    return start < tile->begin ? 0 : most(0, least(TILE, tile->end - start));
}

/* Attends from consecutive tiles of a sequence, for which keys and values are gathered once; uses the first ``halves``
 * halves of their rows. */
inlined void attend_tiles(Tile *tiles, int64_t num_tiles, const Step *step, int64_t sequence, int64_t group,
                          const int halves, const int in_pairs) {
    float gathered[TILE * MAX_DIM];
    int64_t dim = step->dim, value_dim = step->value_dim, depth = in_pairs ? dim / 2 : dim, end = tiles[num_tiles - 1].end;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const char *keys = (char *)step->keys + head_of(group, step), *values = (char *)step->values + head_of(group, step);
    for (int64_t start = tiles[0].begin; start < end; start += TILE) {
        int64_t all = least(TILE, end - start);
        if (in_pairs) gather_key_pairs(gathered, dim, keys, pages, start, all, step);
        else gather_as_floats(gathered, keys, pages, start, all, step);
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start);
            for (int64_t key = 0, some; key < count; key += some) {
                some = next_block(count - key);
                int64_t done = which * all + key;
                prefetch(values, pages, start + done / num_tiles, start + (done + some) / num_tiles, step);
                multiply_all(tile->scores + key * ROWS, NULL, gathered + key * depth, depth, 1, tile->queries, depth,
                             some, halves, in_pairs);
            }
            if (count) weigh_tile(tile, tile->scores, step, start, count, halves, in_pairs);
        }
        if (in_pairs) gather_value_pairs(gathered, values, pages, start, all, step);
        else if (values != keys) gather_as_floats(gathered, values, pages, start, all, step);
        int64_t next = start + TILE, ahead = least(TILE, end - next); /* below 1 when there is none */
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start);
            for (int64_t i = 0, some; i < value_dim && count; i += some) {
                some = next_block(value_dim - i);
                int64_t done = which * value_dim + i, whole = num_tiles * value_dim;
                prefetch(keys, pages, next + ahead * done / whole, next + ahead * (done + some) / whole, step);
                multiply_all(tile->sums + i * ROWS, tile->shrink, gathered + i, 1, dim, tile->scores,
                             in_pairs ? (count + 1) / 2 : count, some, halves, in_pairs);
            }
        }
    }
}

/* As ``attend_tiles``, by AMX. */
inlined void attend_by_amx(Tile *tiles, int64_t num_tiles, const Step *step, int64_t sequence, int64_t group) {
    float gathered[TILE * MAX_DIM / 2] __attribute__((aligned(64)));
    float columns[TILE * MAX_DIM / 2] __attribute__((aligned(64)));
    int64_t depth = whole(step->dim), value_depth = whole(step->value_dim), end = tiles[num_tiles - 1].end;
    const int64_t *pages = step->pages + step->page_starts[sequence];
    const char *keys = (char *)step->keys + head_of(group, step), *values = (char *)step->values + head_of(group, step);
    begin_tiles(WHOLE / 2, TILE_BYTES);
    for (int64_t start = tiles[0].begin; start < end; start += TILE) {
        int64_t all = least(TILE, end - start);
        gather_key_pairs(gathered, depth, keys, pages, start, all, step);
        gather_value_columns(columns, value_depth, values, pages, start, all, step);
        int64_t next = start + TILE, ahead = most(0, least(TILE, end - next));
        for (int64_t which = 0; which < num_tiles; which++) {
            Tile *tile = tiles + which;
            int64_t count = keys_for(tile, start), from = next + ahead * which / num_tiles;
            int64_t to = next + ahead * (which + 1) / num_tiles; /* each tile prefetches its share */
            prefetch(keys, pages, from, to, step);
            prefetch(values, pages, from, to, step);
            if (!count) continue;
            multiply_by_amx(tile->scores, (uint16_t *)gathered, depth, tile->queries, whole(count), depth, 0);
            weigh_tile(tile, tile->scores, step, start, count, 2, 1);
            shrink_sums(tile, value_depth);
            multiply_by_amx(tile->sums, (uint16_t *)columns, TILE, tile->scores, value_depth, whole(count), 1);
        }
    }
    end_tiles();
}

/* The keys and values of segments, rounded once for all their tiles: [kv_heads, blocks of TILE keys], each block's keys as
 * of ``gather_key_pairs``, then its values as of ``gather_columns``. */
typedef struct {
    uint16_t *blocks;
    int64_t *firsts; /* [num_sequences + 1]: number of each sequence's first block */
} Packed;

/* Whether tiles attend to packed keys and values: to those of segments, all of which the step has. */
inlined int is_packed(const Step *step) {
    return tiles_are_granted && step->in_bf16 && !step->causal && step->dim % 2 == 0;
}

/* Values of a block. */
inlined int64_t block_size(const Step *step) { return TILE * (whole(step->dim) + whole(step->value_dim)); }

inlined int64_t blocks_of(const Step *step) {
    int64_t count = 0;
    for (int64_t i = 0; i < step->num_sequences && is_packed(step); i++) count += (step->kv_lens[i] + TILE - 1) / TILE;
    return count;
}

/* Bytes of memory for packed keys and values. */
inlined int64_t packed_room(const Step *step) {
    int64_t blocks = blocks_of(step) * step->kv_heads * block_size(step) * sizeof(uint16_t);
    return is_packed(step) ? blocks + (step->num_sequences + 1) * sizeof(int64_t) + 64 : 0;
}

/* Packs all keys and values; by all threads of a team. */
inlined Packed pack(const Step *step, char *room) {
    room += -(uintptr_t)room % 64;
    int64_t blocks = blocks_of(step), size = block_size(step), depth = whole(step->dim);
    Packed packed = {(uint16_t *)room, (int64_t *)(room + blocks * step->kv_heads * size * sizeof(uint16_t))};
#pragma omp single
    for (int64_t i = packed.firsts[0] = 0; i < step->num_sequences; i++)
        packed.firsts[i + 1] = packed.firsts[i] + (step->kv_lens[i] + TILE - 1) / TILE;
#pragma omp for
    for (int64_t block = 0; block < blocks; block++) {
        int64_t sequence = 0, last = step->num_sequences - 1;
        while (sequence < last) {
            int64_t middle = (sequence + last + 1) / 2;
            if (packed.firsts[middle] <= block) sequence = middle;
            else last = middle - 1;
        }
        const int64_t *pages = step->pages + step->page_starts[sequence];
        int64_t start = (block - packed.firsts[sequence]) * TILE, count = least(TILE, step->kv_lens[sequence] - start);
        for (int64_t head = 0; head < step->kv_heads; head++) {
            uint16_t *to = packed.blocks + (head * blocks + block) * size;
            int64_t place = head * head_bytes(step->dim, step->format);
            gather_key_pairs((float *)to, depth, (char *)step->keys + place, pages, start, count, step);
            gather_value_columns((float *)(to + TILE * depth), whole(step->value_dim), (char *)step->values + place,
                                 pages, start, count, step);
        }
    }
    return packed;
}

/* Attends from the tile of a segment that begins at ``first_token``, for one group. */
static void attend_packed(const Step *step, const Packed *packed, int64_t sequence, int64_t first_token, int64_t group) {
    Tile tile;
    char memory[2 * tile_bytes(step)] __attribute__((aligned(64)));
    float scores[2][TILE * ROWS] __attribute__((aligned(64)));
    int64_t depth = whole(step->dim), value_depth = whole(step->value_dim), size = block_size(step);
    int64_t first = packed->firsts[sequence], head = group * step->kv_heads / step->groups;
    const uint16_t *block = packed->blocks + (head * packed->firsts[step->num_sequences] + first) * size;
    begin_tile(&tile, memory, step, sequence, first_token, group, 1);
    begin_tiles(WHOLE / 2, TILE_BYTES);
    multiply_by_amx(scores[0], block, depth, tile.queries, whole(least(TILE, tile.end)), depth, 0);
    for (int64_t start = 0; start < tile.end; start += TILE, block += size) {
        int64_t count = least(TILE, tile.end - start), next = least(TILE, tile.end - start - TILE);
        float *own = scores[start / TILE % 2], *other = scores[1 - start / TILE % 2];
        weigh_tile(&tile, own, step, start, count, 2, 1);
        /* tiles read what vectors have stored, and vectors what tiles have, only after a while: meanwhile, the others */
        if (next > 0) multiply_by_amx(other, block + size, depth, tile.queries, whole(next), depth, 0);
        shrink_sums(&tile, value_depth);
        multiply_by_amx(tile.sums, block + TILE * depth, TILE, own, value_depth, whole(count), 1);
    }
    end_tiles();
    finish_tile(&tile, step, group);
}

inlined void attend_in(const Step *step, const int64_t *first, int64_t num_tiles, int64_t group,
                       const int in_pairs) {
    Tile tiles[TOGETHER];
    int64_t heads = step->heads / step->groups, sequence = first[0], bytes = 2 * tile_bytes(step);
    char memory[num_tiles * bytes] __attribute__((aligned(64)));
    for (int64_t which = 0; which < num_tiles; which++)
        begin_tile(tiles + which, memory + which * bytes, step, sequence, first[2 * which + 1], group, in_pairs);
    if (in_pairs && tiles_are_granted) attend_by_amx(tiles, num_tiles, step, sequence, group);
    else if (num_tiles * tiles->tokens * heads <= LANES)
        attend_tiles(tiles, num_tiles, step, sequence, group, 1, in_pairs);
    else attend_tiles(tiles, num_tiles, step, sequence, group, 2, in_pairs);
    for (int64_t which = 0; which < num_tiles; which++) finish_tile(tiles + which, step, group);
}

static void attend_in_bf16(const Step *step, const int64_t *first, int64_t num_tiles, int64_t group) {
    attend_in(step, first, num_tiles, group, 1);
}

static void attend_in_float(const Step *step, const int64_t *first, int64_t num_tiles, int64_t group) {
    attend_in(step, first, num_tiles, group, 0);
}

/* Attends from the tiles ``start`` to ``end`` of the step's list, for one group, with those of a sequence together. */
static void attend_between(const Step *step, int64_t start, int64_t end, int64_t group, const Packed *packed) {
    if (is_packed(step)) {
        for (const int64_t *tile = step->tiles + 2 * start; tile < step->tiles + 2 * end; tile += 2)
            attend_packed(step, packed, tile[0], tile[1], group);
        return;
    }
    for (int64_t num_tiles; start < end; start += num_tiles) {
        const int64_t *first = step->tiles + 2 * start;
        for (num_tiles = 1; start + num_tiles < end && first[2 * num_tiles] == first[0];) num_tiles++;
        if (attention_has_bf16 && step->in_bf16 && step->dim % 2 == 0) attend_in_bf16(step, first, num_tiles, group);
        else attend_in_float(step, first, num_tiles, group);
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

inlined void write_row(void *cache, int64_t slot, const float *from, const Step *step, const int format) {
    char *to = (char *)cache + slot * step->cache_stride;
    for (int64_t head = 0; head < step->kv_heads; head++)
        store_head(to + head * head_bytes(step->dim, format), from + head * step->dim, step->dim, format);
}

inlined void write_as(const Step *step, int64_t token, const int format) {
    write_row(step->keys, step->slots[token], step->key + token * step->key_stride, step, format);
    if (step->values == step->keys) return;
    write_row(step->values, step->slots[token], step->value + token * step->value_stride, step, format);
}

static void write_token(const Step *step, int64_t token) { IN_FORMAT(write_as, step, token); }

/* The results of a step from the head ``before`` on, counted over all spans. */
static Parts parts_of(const Step *step, Parts parts, int64_t before) {
    return (Parts){parts.maxima + before, parts.totals + before, parts.sums + before * step->value_dim};
}

int64_t attention_room(const Step *step) {
    if (!within(step)) return -1;
    int64_t num_spans = find_spans(step, NULL);
    int64_t parts = num_spans * sizeof(Span) + num_spans * step->heads * (step->value_dim + 2) * sizeof(float);
    return parts + packed_room(step);
}

void attend_together(const Step *step, void *room) {
    int64_t heads = step->heads, groups = step->groups, size = heads / groups;
    Span *spans = room;
    int64_t num_spans = find_spans(step, NULL), num_parts = num_spans * heads;
    float *numbers = (float *)(spans + num_spans);
    Parts parts = {numbers, numbers + num_parts, numbers + 2 * num_parts};
    /* if there are few spans, threads take groups of a span separately, which doesn't change results */
    int64_t together = least(groups * num_spans / omp_get_num_threads(), least(groups, MAX_HEADS / size));
    together = most(together, 1);
    int64_t shares = (groups + together - 1) / together, ones = num_spans * shares;
    /* likewise, if there are few tiles, threads take them one at a time */
    int64_t tasks = step->num_tiles * groups / omp_get_num_threads();
    int64_t at_once = most(1, least(least(TOGETHER, ON_STACK / (2 * tile_bytes(step))), tasks / 8));
    int64_t num_runs = (step->num_tiles + at_once - 1) / at_once;
#pragma omp single nowait
    find_spans(step, spans);
#pragma omp for
    for (int64_t token = 0; token < step->num_tokens; token++) write_token(step, token);
    Packed packed = {};
    if (is_packed(step))
        packed = pack(step, (char *)(numbers + num_parts * (step->value_dim + 2)));
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < ones + num_runs * groups; task++) {
        if (task < ones) {
            int64_t span = task / shares, first = task % shares * together;
            Parts own = parts_of(step, parts, span * heads + first * size);
            attend_span(step, spans + span, own, first, least(together, groups - first));
        } else {
            /* the last tiles of a prompt have the most work, so they go first */
            int64_t which = num_runs - 1 - (task - ones) / groups;
            attend_between(step, step->num_tiles * which / num_runs, step->num_tiles * (which + 1) / num_runs,
                           (task - ones) % groups, &packed);
        }
    }
#pragma omp for
    for (int64_t task = 0; task < num_spans * heads; task++) {
        int64_t span = task / heads;
        if (span > 0 && spans[span - 1].sequence == spans[span].sequence) continue;
        add_spans(step, spans + span, parts_of(step, parts, span * heads), task % heads, num_spans - span);
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

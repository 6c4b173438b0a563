/* Decode attention over a paged KV cache, in float32: one new token per sequence reads its whole history in place.
 *
 * Each pair of sequence and kv head is one task. It goes through its pages once, keeps the running maximum and sum of the
 * softmax (Milakov and Gimelshein, arXiv:1805.02867), and serves all query heads that share the kv head, so that keys
 * and values are read once. Built by native.py.
 */
#include <math.h>
#include <stdint.h>

#define MAX_GROUP 16   /* query heads for one kv head */
#define MAX_DIM 256    /* of a head */
#define TILE 16        /* keys scored before their values are added up */

static void attend(const float *query, const float *keys, const float *values, const int64_t *pages, int64_t length,
                   float *output, int group, int dim, int page_size, int64_t stride, float scale) {
    float sums[MAX_GROUP][MAX_DIM];
    float maxima[MAX_GROUP], totals[MAX_GROUP], scores[MAX_GROUP][TILE];
    for (int head = 0; head < group; head++) {
        maxima[head] = -INFINITY;
        totals[head] = 0;
        for (int i = 0; i < dim; i++) sums[head][i] = 0;
    }
    for (int64_t start = 0; start < length;) {
        int64_t offset = start % page_size;
        int64_t count = page_size - offset < length - start ? page_size - offset : length - start;
        if (count > TILE) count = TILE;
        int64_t first = (pages[start / page_size] * page_size + offset) * stride;
        for (int head = 0; head < group; head++) {
            float highest = maxima[head];
            for (int64_t token = 0; token < count; token++) {
                const float *key = keys + first + token * stride, *own = query + (int64_t)head * dim;
                float score = 0;
                for (int i = 0; i < dim; i++) score += own[i] * key[i];
                scores[head][token] = score * scale;
                if (scores[head][token] > highest) highest = scores[head][token];
            }
            float shrink = expf(maxima[head] - highest);
            maxima[head] = highest;
            totals[head] *= shrink;
            for (int i = 0; i < dim; i++) sums[head][i] *= shrink;
            for (int64_t token = 0; token < count; token++) {
                const float *value = values + first + token * stride;
                float weight = expf(scores[head][token] - highest);
                totals[head] += weight;
                for (int i = 0; i < dim; i++) sums[head][i] += weight * value[i];
            }
        }
        start += count;
    }
    for (int head = 0; head < group; head++)
        for (int i = 0; i < dim; i++) output[(int64_t)head * dim + i] = sums[head][i] / totals[head];
}

/* query, output: [sequences, heads, dim]; keys, values: [pages, page_size, kv_heads, dim], stride floats from one token
 * to the next; pages: int64, the sequences' tables one after the other, sequence s's at offsets[s]; lengths: tokens of
 * each sequence, at least 1. heads is a multiple of kv_heads, at most MAX_GROUP of it; dim is at most MAX_DIM. */
void paged_decode(const float *query, const float *keys, const float *values, const int64_t *pages,
                  const int64_t *offsets, const int64_t *lengths, float *output, int64_t sequences, int64_t heads,
                  int64_t kv_heads, int64_t dim, int64_t page_size, int64_t stride, float scale) {
    int64_t group = heads / kv_heads;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t sequence = 0; sequence < sequences; sequence++)
        for (int64_t kv_head = 0; kv_head < kv_heads; kv_head++) {
            int64_t place = (sequence * heads + kv_head * group) * dim;
            attend(query + place, keys + kv_head * dim, values + kv_head * dim, pages + offsets[sequence],
                   lengths[sequence], output + place, group, dim, page_size, stride, scale);
        }
}

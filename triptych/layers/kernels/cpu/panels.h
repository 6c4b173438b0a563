/* What products with panels of float and of bfloat16 weights share. */
#pragma once
#include <omp.h>

#include "products.h"
#include "vectors.h"

#define OUTPUTS FLOAT_OUTPUTS
#define AHEAD 4096           /* prefetch distance in bytes of weights: hardware prefetchers stop at the end of a page */
#define BLOCK 512            /* tokens multiplied by all weights before the next block: few enough to stay in the cache */
#define AT_ONCE (512 * 1024) /* bytes of weights per task when there are few tokens */

inlined int64_t panels_of(const Linear *linear) { return (linear->outputs + OUTPUTS - 1) / OUTPUTS; }

/* Prefetch distance for panels of ``bytes`` bytes. A panel that is used several times leaves time to prefetch a whole
 * panel: the one that this thread will process next if all threads are equally fast. */
inlined int64_t distance_of(int64_t bytes, int is_used_again) {
    return is_used_again ? bytes * omp_get_num_threads() : AHEAD;
}

/* Stores outputs of an incomplete panel. Not inlined, because hundreds of copies would take long to compile. */
static __attribute__((noinline)) void keep_some(floats sum, const Linear *linear, float *outputs, int64_t first) {
    int64_t left = linear->outputs - first;
    if (left <= 0) return;
    if (linear->bias) sum += load(linear->bias + first, left);
    store(outputs + first, sum, left);
}

/* Adds the bias to the sums of ``count`` tokens and stores them as a panel's outputs. */
inlined void keep(floats sums[][2], const Linear *linear, float *outputs, int64_t panel, const int count) {
    int64_t first = panel * OUTPUTS;
    int is_whole = first + OUTPUTS <= linear->outputs;
    floats bias[2] = {};
    if (is_whole && linear->bias) memcpy(bias, linear->bias + first, sizeof bias);
#pragma GCC unroll 12
    for (int token = 0; token < count; token++, outputs += linear->outputs) {
        if (is_whole) {
            *(floats *)(outputs + first) = sums[token][0] + bias[0];
            *(floats *)(outputs + first + LANES) = sums[token][1] + bias[1];
        } else {
            keep_some(sums[token][0], linear, outputs, first);
            keep_some(sums[token][1], linear, outputs, first + LANES);
        }
    }
}

/* What products with panels of weights share: how tokens and panels are divided among threads, and how outputs are
 * stored. */
#pragma once
#include <omp.h>

#include "products.h"
#include "vectors.h"

#define OUTPUTS FLOAT_OUTPUTS
#define AHEAD 4096           /* prefetch distance in bytes of weights: hardware prefetchers stop at the end of a page */
#define BLOCK 512            /* tokens multiplied by all weights before the next block, so that they stay in the cache */
#define TASK (512 * 1024)    /* bytes of weights per task when there are few tokens */
#define FEW 4                /* tokens that each thread rounds itself, which takes less time than waiting for others */
#define LINE 64              /* padding between rows in bytes, so that equal columns don't share a set of the L1 cache */

/* Inputs and outputs of several tokens. */
typedef struct {
    const char *input;
    float *output;
    int64_t stride, tokens; /* stride: bytes between inputs */
    int64_t ahead;          /* prefetch distance in bytes of weights */
} Rows;

/* Computes a panel's outputs for all rows. */
typedef void PanelProduct(const Linear *linear, const Rows *rows, int64_t panel);

/* Rounds a token's inputs, and pads them with zeros. */
typedef void Rounding(const Linear *linear, const float *from, void *to);

inlined int64_t panels_of(const Linear *linear) { return (linear->outputs + OUTPUTS - 1) / OUTPUTS; }

/* ``inputs`` with padding, for values of ``width`` bytes. */
inlined int64_t padded(int64_t inputs, int64_t width) {
    return (inputs * width + INPUT_BYTES - 1) / INPUT_BYTES * INPUT_BYTES / width;
}

/* Prefetch distance for panels of ``bytes`` bytes. A panel that is used several times leaves time to prefetch a whole
 * panel: the one that this thread will process next if all threads are equally fast. */
inlined int64_t distance_of(int64_t bytes, int is_used_again) {
    return is_used_again ? bytes * omp_get_num_threads() : AHEAD;
}

/* Bytes of memory for rounded tokens of ``apart`` bytes each. */
inlined int64_t rounded_room(int64_t tokens, int64_t apart) {
    return apart * (tokens <= FEW ? tokens * omp_get_max_threads() : tokens);
}

/* Rounds all tokens into ``room``, and returns what the calling thread is to read of it. */
inlined char *round_together(const Linear *linear, const float *input, int64_t stride, int64_t tokens, char *room,
                             int64_t apart, Rounding *round) {
    if (tokens <= FEW) {
        room += omp_get_thread_num() * tokens * apart;
        for (int64_t token = 0; token < tokens; token++) round(linear, input + token * stride, room + token * apart);
    } else {
#pragma omp for
        for (int64_t token = 0; token < tokens; token++) round(linear, input + token * stride, room + token * apart);
    }
    return room;
}

/* Multiplies all rows by all panels, of ``bytes`` bytes each, which are loaded once for up to ``once`` tokens; at most
 * ``block`` tokens by all weights before the next ones. ``task``: bytes of weights per task when there are few
 * tokens. */
inlined void multiply_together(const Linear *linear, const Rows *all, int64_t bytes, int64_t once, int64_t block,
                               int64_t task, PanelProduct *multiply_panel) {
    int64_t tokens = all->tokens, blocks = (tokens + block - 1) / block;
    int64_t at_once = tokens > once ? 1 : most(1, task / most(1, bytes));
    for (int64_t done = 0; done < blocks; done++) {
        int64_t first = tokens * done / blocks, count = tokens * (done + 1) / blocks - first;
        Rows rows = {all->input + first * all->stride, all->output + first * linear->outputs, all->stride, count,
                     distance_of(bytes, count > once)};
        /* dynamic, because the machine has other work: a slow core takes fewer panels, and none waits before the end */
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t panel = 0; panel < panels_of(linear); panel++) multiply_panel(linear, &rows, panel);
    }
#pragma omp barrier
}

/* Stores outputs of an incomplete panel. Not inlined, because hundreds of copies would take long to compile. */
static __attribute__((noinline)) void keep_some(floats sum, const Linear *linear, float *outputs, int64_t first) {
    int64_t left = linear->outputs - first;
    if (left <= 0) return;
    if (linear->bias) sum += load(linear->bias + first, left);
    store(outputs + first, sum, left);
}

/* Adds the bias to the sums of ``count`` tokens from ``first`` on and stores them as a panel's outputs. */
inlined void keep(const floats sums[][2], const Linear *linear, const Rows *rows, int64_t panel, int64_t first,
                  const int count) {
    int64_t column = panel * OUTPUTS;
    float *outputs = rows->output + first * linear->outputs;
    int is_whole = column + OUTPUTS <= linear->outputs;
    floats bias[2] = {};
    if (is_whole && linear->bias) memcpy(bias, linear->bias + column, sizeof bias);
#pragma GCC unroll 12
    for (int token = 0; token < count; token++, outputs += linear->outputs) {
        if (is_whole) {
            *(floats *)(outputs + column) = sums[token][0] + bias[0];
            *(floats *)(outputs + column + LANES) = sums[token][1] + bias[1];
        } else {
            keep_some(sums[token][0], linear, outputs, column);
            keep_some(sums[token][1], linear, outputs, column + LANES);
        }
    }
}

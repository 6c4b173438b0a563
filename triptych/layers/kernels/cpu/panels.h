/* What products with panels of weights share: how tokens and panels are divided among threads, and how outputs are
 * stored. */
#pragma once
#include <omp.h>

#include "products.h"
#include "tiles.h"
#include "vectors.h"

#define OUTPUTS FLOAT_OUTPUTS
#define AHEAD 4096           /* prefetch distance in bytes of weights: hardware prefetchers stop at the end of a page */
#define BLOCK 512            /* tokens multiplied by all weights before the next block, so that they stay in the cache */
#define TASK (512 * 1024)    /* bytes of weights per task when there are few tokens */
#define FOURS (LANES / 8)    /* tokens that are multiplied by four panels at a time: their sums stay in registers */
#define TWOS (LANES / 4)     /* by two panels */
#define FEW 4                /* tokens that each thread rounds itself, which takes less time than waiting for others */
#define ROTATED 64           /* inputs of a block that is rotated; see int8_tokens.h */
#define LINE 64              /* padding between rows in bytes, so that equal columns don't share a set of the L1 cache */

/* Inputs and outputs of several tokens. In tiles, INPUT_BYTES of inputs of TILE_ROWS tokens are adjacent, and followed by
 * their next ones. */
typedef struct {
    const char *input;
    Output output;
    int64_t stride, tokens; /* stride: bytes of a token's inputs, with padding */
    int64_t ahead;          /* prefetch distance in bytes of weights; in tiles, in bytes of inputs of panels */
    int64_t in_tiles;
} Rows;

#define MOST_PANELS 4 /* most panels that tokens are multiplied by at a time */
#define PANELS(count, tokens) ((count) * 16 + (tokens)) /* for ``switch``: differs for each choice, of up to 15 tokens */
/* Calls CASE(panels, tokens) for each choice of several panels at a time, up to FOURS and TWOS tokens. */
#if LANES == 16
#define FEW_TOKENS(CASE) CASE(4, 1) CASE(2, 1) CASE(2, 2) CASE(4, 2) CASE(2, 3) CASE(2, 4)
#else
#define FEW_TOKENS(CASE) CASE(4, 1) CASE(2, 1) CASE(2, 2)
#endif

/* Computes the outputs of ``count`` panels for all rows; ``panels`` are their numbers. ``count`` is a power of two, up to
 * what ``multiply_between`` was asked for. */
typedef void PanelProduct(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count);

/* Rounds a token's inputs, and pads them. ``room`` is memory for ``whole_blocks`` of them, and may have them already;
 * ``step``: bytes between parts of INPUT_BYTES. */
typedef void Rounding(const Linear *linear, const float *from, float *room, void *to, int64_t step);

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

inlined int64_t in_whole_tiles(int64_t tokens) { return (tokens + PAIR_ROWS - 1) / PAIR_ROWS * PAIR_ROWS; }

/* Prefetches weights into the L1 cache, which is faster if they are few bytes ahead, or into the L2 cache. */
inlined void prefetch(const char *weights, const int into_l1) {
    if (into_l1) __builtin_prefetch(weights);
    else __builtin_prefetch(weights, 0, 2);
}

/* ``inputs`` with padding to whole blocks of ROTATED. */
inlined int64_t whole_blocks(int64_t inputs) { return (inputs + ROTATED - 1) / ROTATED * ROTATED; }

/* Bytes of memory for one token's values. */
inlined int64_t values_room(int64_t inputs) { return whole_blocks(inputs) * sizeof(float); }

/* Bytes of memory for rounded tokens of ``apart`` bytes each, in whole tiles, and for one token's values of each
 * thread. */
inlined int64_t rounded_room(int64_t inputs, int64_t tokens, int64_t apart) {
    int64_t threads = omp_get_max_threads();
    return apart * (tokens <= FEW ? tokens * threads : in_whole_tiles(tokens)) + threads * values_room(inputs);
}

/* Where a token's inputs begin. */
inlined int64_t place_of(int64_t token, int64_t apart, int64_t in_tiles) {
    if (!in_tiles) return token * apart;
    return token / TILE_ROWS * TILE_ROWS * apart + token % TILE_ROWS * INPUT_BYTES;
}

/* Rounds all tokens into ``room``, and returns what the calling thread is to read of it. */
inlined char *round_together(const Linear *linear, const Input *input, int64_t tokens, char *room, int64_t apart,
                             int64_t in_tiles, Rounding *round) {
    int64_t inputs = linear->inputs;
    float *own = (float *)(room + omp_get_thread_num() * values_room(inputs));
    room += omp_get_num_threads() * values_room(inputs);
    if (tokens <= (input->activation ? 1 : FEW)) { /* an activation takes longer than waiting */
        room += omp_get_thread_num() * tokens * apart;
        for (int64_t token = 0; token < tokens; token++)
            round(linear, values_of(input, inputs, token, own), own, room + token * apart, INPUT_BYTES);
    } else {
        int64_t step = in_tiles ? TILE_ROWS * INPUT_BYTES : INPUT_BYTES;
#pragma omp for
        for (int64_t token = 0; token < tokens; token++)
            round(linear, values_of(input, inputs, token, own), own, room + place_of(token, apart, in_tiles), step);
    }
    return room;
}

/* How many panels tokens are multiplied by at a time: the fewer tokens, the more. */
inlined int64_t panels_for(int64_t tokens, int64_t fours, int64_t twos) {
    return tokens <= fours ? 4 : tokens <= twos ? 2 : 1;
}

/* Multiplies all rows by the panels from ``first`` to ``last``, ``at_once`` of them at a time, a power of two. These are far
 * from each other: memory is read faster in several places, because a processor's own prefetching stops at the end of
 * each page. */
inlined void multiply_between(const Linear *linear, const Rows *rows, int64_t first, int64_t last, int64_t at_once,
                              PanelProduct *multiply_panels) {
    for (; at_once; at_once /= 2) {
        int64_t each = (last - first) / at_once, panels[MOST_PANELS];
        for (int64_t i = first; i < first + each; i++) {
            for (int64_t part = 0; part < at_once; part++) panels[part] = i + part * each;
            multiply_panels(linear, rows, panels, at_once);
        }
        first += at_once * each;
    }
}

/* Multiplies all rows by all panels, of ``bytes`` bytes each, ``at_once`` at a time. A panel is loaded once for up to
 * ``once`` tokens. About ``block`` tokens, a multiple of ``once``, are multiplied by all weights before the next ones.
 * ``task``: bytes of weights per task when there are few tokens. */
inlined void multiply_together(const Linear *linear, const Rows *all, int64_t bytes, int64_t at_once, int64_t once,
                               int64_t block, int64_t task, PanelProduct *multiply_panels) {
    int64_t tokens = all->tokens, blocks = (tokens + block - 1) / block, groups = (tokens + once - 1) / once;
    int64_t panels = panels_of(linear) / (all->output.is_gated ? 2 : 1);
    int64_t per_task = tokens > once ? 1 : most(at_once, task / most(1, bytes)), threads = omp_get_num_threads();
    int64_t tasks = (panels + per_task - 1) / per_task;
    if (per_task > 1) tasks = least(panels, (tasks + threads - 1) / threads * threads); /* as many for each thread */
    for (int64_t done = 0; done < blocks; done++) {
        int64_t first = groups * done / blocks * once, end = groups * (done + 1) / blocks * once;
        int64_t count = least(end, tokens) - first;
        Output output = all->output;
        output.values += first * (output.activation ? output.stride : linear->outputs);
        if (output.added) output.added += first * linear->outputs;
        int64_t ahead = distance_of(bytes, count > once);
        Rows rows = {all->input + first * all->stride, output, all->stride, count, ahead, all->in_tiles};
        /* dynamic, because the machine has other work: a slow core takes fewer panels, and none waits before the end */
#pragma omp for schedule(dynamic) nowait
        for (int64_t i = 0; i < tasks; i++)
            multiply_between(linear, &rows, panels * i / tasks, panels * (i + 1) / tasks, at_once, multiply_panels);
    }
#pragma omp barrier
}

/* Stores one vector of a panel's outputs from ``place`` on, of which ``left`` exist. */
inlined void keep_vector(floats value, const Output *output, int64_t place, int64_t left) {
    if (output->added) value += load(output->added + place, left);
    store(output->values + place, value, left);
}

/* Stores outputs of an incomplete panel. Not inlined, because hundreds of copies would take long to compile. */
static __attribute__((noinline)) void keep_some(floats sum, const Linear *linear, const Output *output, int64_t token,
                                                int64_t column) {
    int64_t left = linear->outputs - column;
    if (left <= 0) return;
    if (linear->bias) sum += load(linear->bias + column, left);
    keep_vector(sum, output, token * linear->outputs + column, left);
}

/* Adds the bias to the sums of ``count`` tokens from ``first`` on and stores them as a panel's outputs. */
inlined void keep(const floats sums[][2], const Linear *linear, const Rows *rows, int64_t panel, int64_t first,
                  const int count) {
    int64_t column = panel * OUTPUTS, place = first * linear->outputs + column;
    int is_whole = column + OUTPUTS <= linear->outputs;
    floats bias[2] = {};
    if (is_whole && linear->bias) memcpy(bias, linear->bias + column, sizeof bias);
#pragma GCC unroll 12
    for (int token = 0; token < count; token++, place += linear->outputs) {
        if (is_whole) {
            keep_vector(sums[token][0] + bias[0], &rows->output, place, LANES);
            keep_vector(sums[token][1] + bias[1], &rows->output, place + LANES, LANES);
        } else {
            keep_some(sums[token][0], linear, &rows->output, first + token, column);
            keep_some(sums[token][1], linear, &rows->output, first + token, column + LANES);
        }
    }
}

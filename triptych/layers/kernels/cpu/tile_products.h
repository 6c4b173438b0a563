/* Products with panels by AMX: a tile of up to 16 tokens times a tile of 16 outputs, 64 bytes of inputs at a time. A
 * panel's lines of 128 bytes, 32 outputs with 4 bytes of inputs each, are two such tiles side by side.
 *
 * A tile's rows don't influence each other, and each of its sums is in the order of inputs. So a token's outputs are
 * bit-identical wherever it is in a tile, and however many tokens there are.
 */
#pragma once
#include "panels.h"
#include "tiles.h"

#define TILE_LINE 128             /* bytes of a panel's 32 outputs with 4 bytes of inputs each */
#define KEPT (1600 * 1024)        /* bytes of tokens per block, next to which panels fit the L2 cache */
#define TILE_STEP (INPUT_BYTES / 4 * TILE_LINE) /* bytes of a panel that are multiplied at a time */
#define NEAR (8 * INPUT_BYTES)    /* bytes of inputs multiplied for all tokens of a block before the next ones: as many
                                     bytes of a panel stay in the L1 cache */
#define BLOCK_OF_TILES 256         /* tokens multiplied by all weights before the next block */
#define AT_ONCE 4                 /* panels whose sums wait for the last inputs together: their outputs are stored in
                                     longer runs, and deep tokens are read less often */
#define SUMS (PAIR_ROWS * TILE_LINE) /* bytes of the sums of a pair of tiles */

/* Stores sums [count, 2] as vectors of float or int32, of tokens from ``first`` on, as a panel's outputs; gates with those
 * of their factors. */
typedef void Keep(const void *sums, const void *factors, const Linear *linear, const Rows *rows, int64_t panel,
                  int64_t first, int64_t count);

#define ADD_PRODUCT(sum, tokens, weights) \
    do { \
        if (in_int8) _tile_dpbssd(sum, tokens, weights); \
        else _tile_dpbf16ps(sum, tokens, weights); \
    } while (0)

/* Where a panel's weights of the inputs from ``at`` bytes on are, of panels of ``depth`` bytes of inputs. */
inlined const char *place_in_panels(const Linear *linear, int64_t panel, int64_t depth, int64_t at) {
    return (const char *)linear->panels + (panel * depth + at) / INPUT_BYTES * TILE_STEP;
}

/* Multiplies a panel's weights by ``depth`` bytes of the inputs of one row after the other, ``apart`` bytes each, or of a
 * pair of tiles. ``sums`` [PAIR_ROWS, 32] are float or int32; without ``is_first`` these products are added to them.
 * Prefetches ``share`` bytes from ``later`` on for each step. */
inlined void multiply_tiles(const char *weights, const char *tokens, int64_t apart, int64_t depth, const char *later,
                            int64_t share, char *sums, int is_first, const int is_pair, const int in_int8) {
#if defined __AMX_BF16__ && defined __AMX_INT8__
    __asm__ volatile("" ::: "memory"); /* the compiler doesn't know that tiles read memory */
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        if (is_pair) {
            _tile_zero(2);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, sums, TILE_LINE);
        _tile_loadd(1, sums + TILE_LINE / 2, TILE_LINE);
        if (is_pair) {
            _tile_loadd(2, sums + TILE_ROWS * TILE_LINE, TILE_LINE);
            _tile_loadd(3, sums + TILE_ROWS * TILE_LINE + TILE_LINE / 2, TILE_LINE);
        }
    }
    int64_t stride = is_pair ? INPUT_BYTES : apart, step = is_pair ? TILE_ROWS * INPUT_BYTES : INPUT_BYTES;
    for (int64_t at = 0; at < depth; at += INPUT_BYTES, weights += TILE_STEP, tokens += step, later += share) {
        _tile_loadd(4, tokens, stride);
        _tile_loadd(6, weights, TILE_LINE);
        for (int64_t line = 0; line < share; line += 64) {
            if (is_pair) __builtin_prefetch(later + line, 0, 2);
            else __builtin_prefetch(later + line); /* into the L1 cache, since they are next */
        }
        ADD_PRODUCT(0, 4, 6);
        _tile_loadd(7, weights + TILE_LINE / 2, TILE_LINE);
        ADD_PRODUCT(1, 4, 7);
        if (is_pair) {
            _tile_loadd(5, tokens + TILE_ROWS * apart, stride);
            ADD_PRODUCT(2, 5, 6);
            ADD_PRODUCT(3, 5, 7);
        }
    }
    _tile_stored(0, sums, TILE_LINE);
    _tile_stored(1, sums + TILE_LINE / 2, TILE_LINE);
    if (is_pair) {
        _tile_stored(2, sums + TILE_ROWS * TILE_LINE, TILE_LINE);
        _tile_stored(3, sums + TILE_ROWS * TILE_LINE + TILE_LINE / 2, TILE_LINE);
    }
#endif
}

/* As ``multiply_tiles`` for one tile of tokens and two panels. Prefetches ``ahead`` bytes ahead. */
inlined void multiply_beside(const char *first, const char *second, const char *tokens, int64_t stride, int64_t depth,
                             int64_t ahead, char sums[2][SUMS / 2], const int in_int8) {
#if defined __AMX_BF16__ && defined __AMX_INT8__
    __asm__ volatile("" ::: "memory"); /* the compiler doesn't know that tiles read memory */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t at = 0; at < depth; at += INPUT_BYTES, first += TILE_STEP, second += TILE_STEP) {
        _tile_loadd(4, tokens + at, stride);
        for (int64_t line = 0; line < TILE_STEP; line += 64) {
            __builtin_prefetch(first + ahead + line);
            __builtin_prefetch(second + ahead + line);
        }
        _tile_loadd(6, first, TILE_LINE);
        ADD_PRODUCT(0, 4, 6);
        _tile_loadd(7, first + TILE_LINE / 2, TILE_LINE);
        ADD_PRODUCT(1, 4, 7);
        _tile_loadd(6, second, TILE_LINE);
        ADD_PRODUCT(2, 4, 6);
        _tile_loadd(7, second + TILE_LINE / 2, TILE_LINE);
        ADD_PRODUCT(3, 4, 7);
    }
    _tile_stored(0, sums[0], TILE_LINE);
    _tile_stored(1, sums[0] + TILE_LINE / 2, TILE_LINE);
    _tile_stored(2, sums[1], TILE_LINE);
    _tile_stored(3, sums[1] + TILE_LINE / 2, TILE_LINE);
#endif
}

/* Prefetches where outputs of ``count`` panels, of up to TILE_ROWS tokens from ``first`` on, will be stored: outputs that
 * aren't in the cache hold up the sums that are stored after them. */
inlined void prefetch_outputs(const Linear *linear, const Rows *rows, int64_t panel, int64_t count, int64_t first) {
    const float *output = rows->output.values + first * linear->outputs + panel * OUTPUTS;
    for (int64_t token = first; token < least(rows->tokens, first + TILE_ROWS); token++, output += linear->outputs)
        for (int64_t i = 0; i < count * OUTPUTS; i += LANES) __builtin_prefetch(output + i, 1, 2);
}

/* Multiplies a panel's weights of ``some`` bytes of inputs from ``at`` on by all tokens. ``sums`` [tokens, 32] are added to
 * unless ``at`` is 0. The weights that are next, for which it prefetches, are ``ahead`` bytes of inputs further, where all
 * panels follow each other. */
typedef void PartProduct(const Linear *linear, const Rows *rows, int64_t panel, int64_t at, int64_t some, int64_t ahead,
                         char *sums);

/* ``depth``: bytes of inputs of a panel. */
inlined void multiply_part(const Linear *linear, const Rows *rows, int64_t panel, int64_t depth, int64_t at, int64_t some,
                           int64_t ahead, char *sums, const int in_int8) {
    const char *from = rows->input + at * TILE_ROWS, *weights = place_in_panels(linear, panel, depth, at);
    const char *later = weights + ahead / INPUT_BYTES * TILE_STEP;
    int64_t pairs = (rows->tokens + PAIR_ROWS - 1) / PAIR_ROWS, share = whole_lines(TILE_STEP / pairs);
    for (int64_t pair = 0; pair < pairs; pair++, later += some / INPUT_BYTES * share) {
        const char *tokens = from + pair * PAIR_ROWS * rows->stride;
        multiply_tiles(weights, tokens, rows->stride, some, later, share, sums + pair * SUMS, at == 0, 1, in_int8);
    }
}

/* Computes the outputs of ``count`` panels from ``panel`` on for all rows, which are in tiles, with ``depth`` bytes of
 * inputs; if they are gates, half as many, with their factors. A part of the panels, ``near`` bytes of inputs, is
 * multiplied by all tokens before the next part, while their sums stay in the L2 cache. */
inlined void multiply_panels_in_parts(const Linear *linear, const Rows *rows, int64_t panel, int64_t count,
                                      int64_t depth, int64_t near, PartProduct *product, Keep *keep_sums) {
    char sums[AT_ONCE][BLOCK_OF_TILES * TILE_LINE] __attribute__((aligned(64)));
    int64_t tokens = rows->tokens, factors = rows->output.is_gated ? panels_of(linear) / 2 : 0;
    int64_t all = factors ? 2 * count : count;
    for (int64_t at = 0; at < depth; at += near) {
        int64_t some = least(near, depth - at);
        /* the next part, or the first one of the panels that this thread will process next if all are equally fast */
        int64_t ahead = at + some < depth ? near : count * rows->ahead - at;
        for (int64_t which = 0; which < all; which++)
            product(linear, rows, panel + which % count + (which < count ? 0 : factors), at, some, ahead, sums[which]);
    }
    for (int64_t first = 0; first < tokens; first += TILE_ROWS) {
        if (!rows->output.activation) prefetch_outputs(linear, rows, panel, count, first + TILE_ROWS);
        for (int64_t which = 0; which < count; which++)
            keep_sums(sums[which] + first * TILE_LINE, factors ? sums[count + which] + first * TILE_LINE : NULL, linear,
                      rows, panel + which, first, least(TILE_ROWS, tokens - first));
    }
}

/* Tokens that are in memory for rounded tokens at a time. */
inlined int64_t rounded_by_tiles(int64_t tokens) {
    return tiles_are_granted && tokens > TILE_ROWS ? least(tokens, BLOCK_OF_TILES) : tokens;
}

/* Multiplies more than TILE_ROWS tokens by all panels, in blocks of them: they are rounded, unless they are, and multiplied
 * before the next ones. Operands as of ``round_together`` and ``multiply_panels_in_parts``. */
inlined void multiply_in_blocks(const Linear *linear, const Input *input, const Output *output, int64_t tokens,
                                char *room, int64_t apart, int64_t depth, int64_t near, Rounding *round,
                                PartProduct *product, Keep *keep_sums) {
    int64_t pairs = (tokens + PAIR_ROWS - 1) / PAIR_ROWS, blocks = (tokens + BLOCK_OF_TILES - 1) / BLOCK_OF_TILES;
    int64_t panels = panels_of(linear) / (output->is_gated ? 2 : 1), per_task = AT_ONCE / (output->is_gated ? 2 : 1);
    int64_t threads = omp_get_num_threads(), tasks = (panels + per_task - 1) / per_task;
    tasks = least(panels, (tasks + threads - 1) / threads * threads); /* as many for each thread */
    begin_tiles(TILE_ROWS, INPUT_BYTES);
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = pairs * block / blocks * PAIR_ROWS, end = pairs * (block + 1) / blocks * PAIR_ROWS;
        int64_t count = least(end, tokens) - first;
        Rows rows = {(const char *)input->values + first * apart, *output, apart, count, threads * depth, 1};
        rows.output.values += first * (output->activation ? output->stride : linear->outputs);
        if (output->added) rows.output.added += first * linear->outputs;
        if (!input->is_rounded) {
            Input own = *input;
            own.values += first * input->stride;
            rows.input = round_together(linear, &own, count, room, apart, 1, round);
        }
#pragma omp for schedule(dynamic) nowait
        for (int64_t task = 0; task < tasks; task++) {
            int64_t panel = panels * task / tasks;
            int64_t some = panels * (task + 1) / tasks - panel;
            multiply_panels_in_parts(linear, &rows, panel, some, depth, near, product, keep_sums);
        }
        if (!input->is_rounded || block + 1 == blocks) {
#pragma omp barrier
        }
    }
    end_tiles();
}

/* Computes the outputs of one panel or two for all rows. */
inlined void multiply_panels_by_tiles(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count,
                                      int64_t depth, const int in_int8, Keep *keep_sums) {
    char sums[2][SUMS / 2] __attribute__((aligned(64)));
    const char *weights = linear->panels;
    int64_t size = depth / 4 * TILE_LINE;
    if (count == 1) {
        weights += panels[0] * size;
        multiply_tiles(weights, rows->input, rows->stride, depth, weights + rows->ahead, TILE_STEP, sums[0], 1, 0, in_int8);
    } else multiply_beside(weights + panels[0] * size, weights + panels[1] * size, rows->input, rows->stride, depth,
                    rows->ahead, sums, in_int8);
    for (int64_t i = 0; i < count; i++) keep_sums(sums[i], NULL, linear, rows, panels[i], 0, rows->tokens);
}

/* As ``multiply_together``, in blocks that stay in the L2 cache. ``step``: bytes of inputs per tile. */
inlined void multiply_together_by_tiles(const Linear *linear, const Rows *rows, int64_t bytes, int64_t step,
                                        int64_t at_once, int64_t task, PanelProduct *multiply_panels) {
    int64_t block = most(2 * PAIR_ROWS, least(BLOCK, KEPT / rows->stride) / PAIR_ROWS * PAIR_ROWS);
    begin_tiles(most(1, least(rows->tokens, TILE_ROWS)), step);
    multiply_together(linear, rows, bytes, at_once, PAIR_ROWS, block, task, multiply_panels);
    end_tiles();
}

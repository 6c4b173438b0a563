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

/* Prefetches where a panel's outputs of ``count`` tokens from ``first`` on will be stored: outputs that aren't in the
 * cache hold up the sums that are stored after them. */
inlined void prefetch_outputs(const Linear *linear, const Rows *rows, int64_t panel, int64_t first, int64_t count) {
    const float *output = rows->output.values + first * linear->outputs + panel * OUTPUTS;
    for (int64_t token = 0; token < count; token++, output += linear->outputs) {
        __builtin_prefetch(output, 1, 2);
        __builtin_prefetch(output + LANES, 1, 2);
    }
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

/* Computes the sums [pairs, PAIR_ROWS, 32] of a panel's products with all pairs of tiles, and calls ``keep_sums``, if any,
 * as soon as a tile's are complete. ``later`` will be the next panel. */
inlined void multiply_pairs(const char *weights, const char *later, const Rows *rows, int64_t depth, char *sums,
                            const char *factors, const Linear *linear, int64_t panel, const int in_int8,
                            Keep *keep_sums) {
    int64_t tokens = rows->tokens, pairs = (tokens + PAIR_ROWS - 1) / PAIR_ROWS;
    int64_t share = (TILE_STEP / pairs + 63) / 64 * 64; /* each pair prefetches its share of the next panel */
    const char *end = later + depth / INPUT_BYTES * TILE_STEP;
    for (int64_t at = 0; at < depth; at += NEAR, weights += NEAR / INPUT_BYTES * TILE_STEP) {
        int64_t some = least(NEAR, depth - at);
        for (int64_t pair = 0; pair < pairs; pair++, later += some / INPUT_BYTES * share) {
            char *own = sums + pair * SUMS;
            int is_last = at + some == depth;
            const char *from = rows->input + pair * PAIR_ROWS * rows->stride + at * TILE_ROWS;
            if (is_last && in_int8) /* in bfloat16 this gains nothing */
                prefetch_outputs(linear, rows, panel, pair * PAIR_ROWS, least(PAIR_ROWS, tokens - pair * PAIR_ROWS));
            multiply_tiles(weights, from, rows->stride, some, later, later < end ? share : 0, own, at == 0, 1, in_int8);
            if (!is_last || !keep_sums) continue;
            for (int64_t first = pair * PAIR_ROWS; first < least(tokens, (pair + 1) * PAIR_ROWS); first += TILE_ROWS)
                keep_sums(sums + first * TILE_LINE, factors + first * TILE_LINE, linear, rows, panel, first,
                          least(TILE_ROWS, tokens - first));
        }
    }
}

/* Computes a panel's outputs for all rows, with ``depth`` bytes of inputs; if they are gates, those of their factors
 * first. */
inlined void multiply_panel_by_tiles(const Linear *linear, const Rows *rows, int64_t panel, int64_t depth,
                                     const int in_int8, Keep *keep_sums) {
    char sums[BLOCK * TILE_LINE] __attribute__((aligned(64))), factors[BLOCK * TILE_LINE] __attribute__((aligned(64)));
    int64_t size = depth / INPUT_BYTES * TILE_STEP;
    const char *weights = (const char *)linear->panels + panel * size, *later = weights + rows->ahead;
    if (!rows->in_tiles) {
        multiply_tiles(weights, rows->input, rows->stride, depth, later, TILE_STEP, sums, 1, 0, in_int8);
        keep_sums(sums, NULL, linear, rows, panel, 0, rows->tokens);
        return;
    }
    if (rows->output.is_gated) {
        const char *others = weights + panels_of(linear) / 2 * size;
        multiply_pairs(others, weights, rows, depth, factors, NULL, linear, panel, in_int8, NULL);
        later = others + rows->ahead;
    }
    multiply_pairs(weights, later, rows, depth, sums, factors, linear, panel, in_int8, keep_sums);
}

/* Computes the outputs of one panel or two for all rows. */
inlined void multiply_panels_by_tiles(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count,
                                      int64_t depth, const int in_int8, Keep *keep_sums) {
    if (count == 1) {
        multiply_panel_by_tiles(linear, rows, panels[0], depth, in_int8, keep_sums);
        return;
    }
    char sums[2][SUMS / 2] __attribute__((aligned(64)));
    const char *weights = linear->panels;
    int64_t size = depth / 4 * TILE_LINE;
    multiply_beside(weights + panels[0] * size, weights + panels[1] * size, rows->input, rows->stride, depth,
                    rows->ahead, sums, in_int8);
    for (int i = 0; i < 2; i++) keep_sums(sums[i], NULL, linear, rows, panels[i], 0, rows->tokens);
}

/* As ``multiply_together``, in blocks that stay in the L2 cache. ``step``: bytes of inputs per tile. */
inlined void multiply_together_by_tiles(const Linear *linear, const Rows *rows, int64_t bytes, int64_t step,
                                        int64_t twos, int64_t task, PanelProduct *multiply_panels) {
    int64_t block = most(2 * PAIR_ROWS, least(BLOCK, KEPT / rows->stride) / PAIR_ROWS * PAIR_ROWS);
    begin_tiles(most(1, least(rows->tokens, TILE_ROWS)), step);
    multiply_together(linear, rows, bytes, twos, PAIR_ROWS, block, task, multiply_panels);
    end_tiles();
}

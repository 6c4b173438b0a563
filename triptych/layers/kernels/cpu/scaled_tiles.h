/* Products with panels whose groups of inputs have scales, by AMX. A part of a panel is unpacked to int8 once for a block
 * of tokens. Sums over a group are scaled and added as by vectors, in the same order. */
#pragma once
#include "grouped.h"
#include "tile_products.h"

#define PART 512         /* inputs that are unpacked at a time, so that they stay in the L1 cache */
#define SMALLEST_STEP 16 /* fewest inputs whose sums have a scale */

typedef int8_t fours __attribute__((vector_size(4 * LANES), aligned(4)));

/* Part of a panel by halves of its outputs: numbers without their zero, unless they have offsets, [inputs / 4, LANES, 4]; and
 * for each ``step`` inputs scales and offsets. ``block``: inputs of a token that share a scale, one or two steps. */
typedef struct {
    fours weights[2][PART / 4];
    floats scales[2][PART / SMALLEST_STEP], offsets[2][PART / SMALLEST_STEP];
    int64_t step, block;
    int has_offsets;
} __attribute__((aligned(64))) Unpacked;

/* Adds the products of a tile of tokens and a part's ``count`` steps to the sums of a half of the outputs, which stay in
 * registers; ``blocks``: of the first token. Two steps are being multiplied and one is being stored while another's sums
 * are added, because products take long to finish, and what a tile stores is read late. */
inlined void multiply_steps(const Unpacked *part, const char *tokens, const char *blocks, int64_t count, int half,
                            floats totals[][2], int is_first, const int has_offsets) {
#ifdef __AMX_INT8__
    const char *weights = (const char *)part->weights[half];
    const floats *scale = part->scales[half], *offsets = part->offsets[half];
    int64_t i = 0, input = 0, done = 0, step = part->step, per_block = part->block / step;
    ints sums[4][TILE_ROWS] __attribute__((aligned(64)));
    floats found[TILE_ROWS];
    for (int row = 0; row < TILE_ROWS; row++) found[row] = is_first ? (floats){} : totals[row][half];
    __asm__ volatile("" ::: "memory"); /* the compiler doesn't know that tiles read memory */
#define MULTIPLY(sum, from, by) \
    do { \
        _tile_zero(sum); \
        _tile_loadd(from, tokens + place_in_tiles(input, TILE_ROWS * INPUT_BYTES), INPUT_BYTES); \
        _tile_loadd(by, weights, TILE_BYTES); \
        _tile_dpbssd(sum, from, by); \
        input += step, weights += step * LANES; \
    } while (0)
#define ADD(tile) \
    do { \
        int64_t place = done++ / per_block * sizeof(Block); \
        const char *from = blocks + place_in_tiles(place, TILE_ROWS * INPUT_BYTES); \
        _Pragma("GCC unroll 16") \
        for (int row = 0; row < TILE_ROWS; row++) { \
            const Block *block = (const Block *)(from + row * INPUT_BYTES); \
            found[row] = add_scaled(found[row], sums[tile][row], *scale, block->scale); \
            if (has_offsets) found[row] = add_offsets(found[row], *offsets, block->sum); \
        } \
        scale++, offsets++; \
    } while (0)
#define STORE(tile) _tile_stored(tile, sums[tile], TILE_BYTES)
    if (count >= 4) {
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 5, 7);
        STORE(0);
        MULTIPLY(2, 4, 6);
        STORE(1);
    }
    for (; i + 4 <= count; i += 4) {
        MULTIPLY(3, 5, 7);
        STORE(2);
        ADD(0);
        if (i + 8 <= count) MULTIPLY(0, 4, 6);
        STORE(3);
        ADD(1);
        if (i + 8 <= count) {
            MULTIPLY(1, 5, 7);
            STORE(0);
        }
        ADD(2);
        if (i + 8 <= count) {
            MULTIPLY(2, 4, 6);
            STORE(1);
        }
        ADD(3);
    }
    for (; i < count; i++) {
        MULTIPLY(0, 4, 6);
        STORE(0);
        ADD(0);
    }
#undef STORE
#undef ADD
#undef MULTIPLY
    for (int row = 0; row < TILE_ROWS; row++) totals[row][half] = found[row];
#endif
}

/* Multiplies an unpacked part of ``some`` inputs from ``at`` on by all tokens, as a ``PartProduct`` with ``depth`` inputs.
 * Prefetches ``bytes`` from ``later`` on. */
inlined void multiply_unpacked(const Unpacked *part, const Rows *rows, int64_t at, int64_t some, int64_t depth,
                               const char *later, int64_t bytes, char *sums) {
    int64_t tiles = (rows->tokens + TILE_ROWS - 1) / TILE_ROWS, share = whole_lines(bytes / tiles);
    const char *tokens = rows->input + at * TILE_ROWS;
    const char *blocks = rows->input + (whole_lines(depth) + at / part->block * sizeof(Block)) * TILE_ROWS;
    begin_tiles(TILE_ROWS, part->step);
    for (int64_t tile = 0; tile < tiles; tile++, later += share) {
        int64_t apart = tile * TILE_ROWS * rows->stride;
        floats(*totals)[2] = (floats(*)[2])(sums + tile * TILE_ROWS * TILE_LINE);
        for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(later + line, 0, 2);
        for (int half = 0; half < 2; half++) {
            if (part->has_offsets)
                multiply_steps(part, tokens + apart, blocks + apart, some / part->step, half, totals, at == 0, 1);
            else multiply_steps(part, tokens + apart, blocks + apart, some / part->step, half, totals, at == 0, 0);
        }
    }
}

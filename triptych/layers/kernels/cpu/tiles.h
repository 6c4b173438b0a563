/* Products by AMX: a tile of up to 16 tokens times a tile of 16 outputs, 64 bytes of inputs at a time. A panel's lines of
 * 128 bytes, 32 outputs with 4 bytes of inputs each, are two such tiles side by side.
 *
 * A tile's rows don't influence each other, and each of its sums is in the order of inputs, 64 bytes at a time. So a
 * token's outputs are bit-identical wherever it is in a tile.
 */
#pragma once
#include "products.h"
#include "vectors.h"

#define TILE_ROWS 16         /* tokens per tile */
#define BLOCK_ROWS (2 * TILE_ROWS)
#define TILE_LINE 128        /* bytes of a panel's 32 outputs with 4 bytes of inputs each */
#define TILE_STEP (INPUT_BYTES / 4 * TILE_LINE) /* bytes of a panel that are multiplied at a time */

#if defined __AMX_BF16__ && defined __AMX_INT8__
/* Whether the kernel has granted this process the tiles; set when the library is loaded. */
extern int tiles_are_granted;
#else
#define tiles_are_granted 0
#endif

/* A panel's weights, and the tokens to multiply by them. */
typedef struct {
    const char *weights, *tokens;
    int64_t depth;         /* bytes of inputs, a multiple of INPUT_BYTES */
    int64_t stride, count; /* bytes between tokens; number of tokens */
    int64_t ahead;         /* prefetch distance in bytes of weights */
} Tiles;

/* Configures the calling thread's tiles for this many tokens; they must be released before other work. */
inlined void begin_tiles(int64_t tokens) {
#ifdef __AMX_TILE__
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = INPUT_BYTES;
        shape.rows[tile] = tile < 6 ? least(tokens, TILE_ROWS) : TILE_ROWS;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
#endif
}

inlined void end_tiles(void) {
#ifdef __AMX_TILE__
    _tile_release();
#endif
}

/* First tokens of a block's two tiles. The last tiles begin early enough to be whole: some tokens are then computed twice,
 * to the same bits. */
inlined int64_t low_tile(int64_t block, int64_t count) { return least(block * BLOCK_ROWS, most(0, count - BLOCK_ROWS)); }
inlined int64_t high_tile(int64_t low, int64_t count) { return least(low + TILE_ROWS, count - TILE_ROWS); }

/* Multiplies a block's tokens; of one tile if there are no more tokens. ``sums`` [BLOCK_ROWS, 32] are float or int32. */
inlined void multiply_tiles(const Tiles *tiles, int64_t block, void *sums, const int is_whole, const int in_int8) {
#if defined __AMX_BF16__ && defined __AMX_INT8__
#define DOT(sum, tokens, weights) \
    if (in_int8) _tile_dpbssd(sum, tokens, weights); \
    else _tile_dpbf16ps(sum, tokens, weights)
    int64_t blocks = (tiles->count + BLOCK_ROWS - 1) / BLOCK_ROWS, stride = tiles->stride;
    int64_t size = tiles->depth / 4 * TILE_LINE, low = low_tile(block, tiles->count);
    const char *weights = tiles->weights, *first = tiles->tokens + low * stride;
    const char *second = tiles->tokens + high_tile(low, tiles->count) * stride;
    /* each block prefetches its share of the next panel */
    const char *later = weights + tiles->ahead + size * block / blocks;
    int64_t share = (TILE_STEP / blocks + 63) / 64 * 64;
    __asm__ volatile("" ::: "memory"); /* the compiler doesn't know that tiles read memory */
    _tile_zero(0);
    _tile_zero(1);
    if (is_whole) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t at = 0; at < tiles->depth; at += INPUT_BYTES, weights += TILE_STEP, later += share) {
        _tile_loadd(4, first + at, stride);
        _tile_loadd(6, weights, TILE_LINE);
        for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(later + line, 0, 2);
        DOT(0, 4, 6);
        _tile_loadd(7, weights + TILE_LINE / 2, TILE_LINE);
        DOT(1, 4, 7);
        if (is_whole) {
            _tile_loadd(5, second + at, stride);
            DOT(2, 5, 6);
            DOT(3, 5, 7);
        }
    }
    _tile_stored(0, sums, TILE_LINE);
    _tile_stored(1, (char *)sums + TILE_LINE / 2, TILE_LINE);
    if (is_whole) {
        _tile_stored(2, (char *)sums + TILE_ROWS * TILE_LINE, TILE_LINE);
        _tile_stored(3, (char *)sums + TILE_ROWS * TILE_LINE + TILE_LINE / 2, TILE_LINE);
    }
#undef DOT
#endif
}

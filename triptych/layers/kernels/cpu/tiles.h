/* The tiles of AMX: two-dimensional registers, and their products. */
#pragma once
#include "vectors.h"

#define TILE_ROWS 16  /* rows of a tile */
#define TILE_BYTES 64 /* bytes of a row */
#define PAIR_ROWS (2 * TILE_ROWS) /* rows of two tiles, which are multiplied together */

#if defined __AMX_BF16__ && defined __AMX_INT8__
/* Whether the operating system has granted the tiles to this process; set when the library is loaded. */
extern int tiles_are_granted;
#else
#define tiles_are_granted 0
#endif

/* Configures the calling thread's tiles: numbers 0 to 5 have ``rows`` rows, at most TILE_ROWS, the others all. To be
 * released, since other threads wait longer for a thread's processor while its tiles are in use. */
inlined void begin_tiles(int64_t rows, int64_t bytes) {
#ifdef __AMX_TILE__
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
        shape.bytes[tile] = tile == 4 || tile == 5 ? bytes : TILE_BYTES;
        shape.rows[tile] = tile < 6 ? rows : bytes / 4;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
#endif
}

inlined void end_tiles(void) {
#ifdef __AMX_TILE__
    _tile_release();
#endif
}

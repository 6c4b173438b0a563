/* Products with int8 weights, a part of the outputs at a time: see int8.c. */
#pragma once
#include "panels.h"

/* Rounds tokens, at most 256 (BLOCK_OF_TILES in tile_products.h), to COARSE_LEVELS. Called by all threads of a team; what a
 * thread gets is for it alone. ``room`` has ``int8_room`` bytes. */
Rows int8_rounded(const Linear *linear, const Input *input, int64_t tokens, void *room);

/* Computes the outputs of a layer, or of a part of its panels, for rows that ``int8_rounded`` has returned; by one
 * thread. */
void int8_part(const Linear *linear, const Rows *rows);

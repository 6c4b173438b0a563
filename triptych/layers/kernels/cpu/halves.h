/* Products with weights in half precision by AMX: see halves.c. */
#pragma once
#include "products.h"

/* Computes one token's outputs of one panel of weights, as ``bf16_panel``. The token has been split by ``halves_split``
 * into ``halves_row`` bytes at a multiple of 32. */
void halves_panel(const Linear *linear, const void *parts, float *output, int64_t panel);
void halves_split(const float *from, void *to, int64_t inputs);
int64_t halves_row(int64_t inputs);

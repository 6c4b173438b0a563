/* A layer's products with packed weights: y = W x + b for several tokens. */
#pragma once
#include <stdint.h>

#include "vectors.h"

#define FLOAT_OUTPUTS (2 * LANES) /* of a panel of float weights */
/* How tokens are rounded to int8. */
#define SMALLEST 1e-30f      /* a token's largest value, at least: 127 / it is finite */
#define ROUNDING 12582912.0f /* 1.5 * 2^23: of a float beside it the low bits are the nearest whole number */

enum Kind { HALF, FLOAT, INT8 };

/* A linear layer's weights, as its kind has them. */
typedef struct {
    const void *panels;  /* see floats.c and int8.c */
    const float *scales; /* [outputs]; of int8 alone */
    const float *bias;   /* [outputs], or NULL */
    int64_t inputs, outputs, kind;
} Linear;

/* Bytes of memory to work in for so many tokens; the others need none. */
int64_t int8_room(const Linear *linear, int64_t tokens);

/* input [tokens, inputs], stride floats from one token to the next, to output [tokens, outputs]; the team's threads share
 * the work, and all of it is done when they return. */
void float_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens);
void int8_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens, void *room);

/* One token's outputs of one panel of float weights, to where they belong in output [outputs]; by one thread. */
void float_panel(const Linear *linear, const float *input, float *output, int64_t panel);

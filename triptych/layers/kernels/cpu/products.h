/* A linear layer with packed weights: y = W x + b for several tokens. */
#pragma once
#include <stdint.h>

#include "vectors.h"

#define FLOAT_OUTPUTS (2 * LANES) /* outputs per panel of float and bfloat16 weights */
#define INPUT_BYTES 64 /* panels of bfloat16 and int8 weights are padded to a multiple of as many bytes of inputs */
/* Quantization of tokens to int8. */
#define SMALLEST 1e-30f      /* lower bound of a token's largest value: 127 / SMALLEST is finite */
#define ROUNDING 12582912.0f /* 1.5 * 2^23: adding it leaves the nearest integer in a float's low bits */

enum Kind { HALF, FLOAT, INT8, BF16 };

/* A linear layer's weights in the format ``kind``. */
typedef struct {
    const void *panels;  /* see floats.c, bf16.c and int8.c */
    const float *scales; /* [outputs]; int8 only */
    const float *bias;   /* [outputs], or NULL */
    int64_t inputs, outputs, kind;
} Linear;

/* Bytes of working memory for ``tokens`` tokens; other kinds need none. */
int64_t int8_room(const Linear *linear, int64_t tokens);
int64_t bf16_room(const Linear *linear, int64_t tokens);

/* input [tokens, inputs], with stride floats between tokens, to output [tokens, outputs]. Called by all threads of a
 * team, which share the work; all of it is done when they return. */
void float_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens);
void int8_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens, void *room);
void bf16_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens, void *room);

/* Computes one token's outputs of one panel of weights and writes them into output [outputs]; by one thread. For
 * bfloat16 the token has been rounded by ``bf16_round`` to ``bf16_row`` bytes at a multiple of 32. */
void float_panel(const Linear *linear, const float *input, float *output, int64_t panel);
void bf16_panel(const Linear *linear, const void *rounded, float *output, int64_t panel);
void bf16_round(const float *from, void *to, int64_t inputs);
int64_t bf16_row(int64_t inputs);

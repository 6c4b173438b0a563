/* A linear layer with packed weights: y = W x + b for several tokens. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "pointwise.h"
#include "vectors.h"

#define FLOAT_OUTPUTS (2 * LANES) /* outputs per panel of float and bfloat16 weights */
#define INPUT_BYTES 64 /* panels of bfloat16 and int8 weights are padded to a multiple of as many bytes of inputs */
/* Quantization of tokens to int8. */
#define SMALLEST 1e-30f      /* lower bound of a token's largest value: 127 / SMALLEST is finite */
#define ROUNDING 12582912.0f /* 1.5 * 2^23: adding it leaves the nearest integer in a float's low bits */

enum Kind { HALF, FLOAT, INT8, BF16, INT4, SPLIT_HALF, BLOCKS };

/* Where groups of 4-bit weights have their zero: 8 in all of them, a zero point of their own, or an offset. */
enum Zeros { MIDDLE, ZEROS, OFFSETS };

/* A linear layer's weights in the format ``kind``. */
typedef struct {
    const void *panels;  /* see the kinds' files: floats.c, bf16.c, … */
    const float *scales; /* [outputs]; int8 only */
    const float *bias;   /* [outputs], or NULL */
    int64_t inputs, outputs, kind;
    int64_t group, zeros;     /* inputs per group, and one of Zeros; int4 only */
    int64_t is_rotated;       /* whether blocks of inputs are rotated, as the weights have been; int8 only */
} Linear;

/* What a product takes: values [tokens, inputs] after a norm, if any, or after an activation. The activated values may
 * be followed by as many factors. Or what another product stored rounded. */
typedef struct {
    const float *values;
    int64_t stride;               /* floats between tokens */
    const Norm *norm;             /* or NULL */
    const Activation *activation; /* or NULL */
    int is_gated, is_rounded;
} Input;

inlined int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Returns a token's values after the norm or the activation; ``room`` [inputs] is memory for them. */
inlined const float *values_of(const Input *input, int64_t inputs, int64_t token, float *room) {
    const float *from = input->values + token * input->stride, *factors = input->is_gated ? from + inputs : NULL;
    if (input->norm) normalise(from, input->norm, room, inputs);
    else if (input->activation) activate(from, factors, room, inputs, input->activation);
    else return from;
    return room;
}

/* Where a product goes, [tokens, outputs], and what is added to it: of the same shape and elsewhere, or NULL. With an
 * activation, outputs are activated, rounded and stored as ``stride`` floats per token for the next product, whose inputs
 * they are; see ``bf16_activated``. */
typedef struct {
    float *values;
    const float *added;
    const Activation *activation; /* or NULL */
    int64_t stride, is_gated;     /* gated: the second half of the outputs are the first half's factors */
} Output;

/* Bytes of working memory for ``tokens`` tokens. */
int64_t float_room(const Linear *linear, int64_t tokens);
int64_t int8_room(const Linear *linear, int64_t tokens);
int64_t int4_room(const Linear *linear, int64_t tokens);
int64_t blocks_room(const Linear *linear, int64_t tokens);
int64_t bf16_room(const Linear *linear, int64_t tokens);
int64_t halves_room(const Linear *linear, int64_t tokens);

/* Called by all threads of a team, which share the work; all of it is done when they return. */
typedef void Together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room);
Together float_together, int8_together, int4_together, blocks_together, bf16_together, halves_together;

/* Bytes of an MLP's values when ``up`` stores them activated and rounded, as ``down`` takes them; 0 if it can't. */
int64_t bf16_activated(const Linear *up, const Linear *down, int64_t tokens);

/* Computes one token's outputs of one panel of weights and writes them into output [outputs]; by one thread. For
 * bfloat16 the token has been rounded by ``bf16_round`` to ``bf16_row`` bytes at a multiple of 32. */
void float_panel(const Linear *linear, const float *input, float *output, int64_t panel);
void bf16_panel(const Linear *linear, const void *rounded, float *output, int64_t panel);
void bf16_round(const float *from, void *to, int64_t inputs);
int64_t bf16_row(int64_t inputs);

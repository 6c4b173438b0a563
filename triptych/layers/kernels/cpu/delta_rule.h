/* The gated delta rule (arXiv:2412.06464): see delta_rule.c. */
#pragma once
#include <stdint.h>

#include "vectors.h"

#define PAST 3 /* tokens before a new one that the convolution sees */

/* A step of S sequences and T new tokens, and one layer's operands; ``DeltaTables`` documents the int64 arrays. A layer's
 * channels are its queries, keys and values, in heads of key_dim or value_dim. */
typedef struct {
    const float *mixed;           /* [T, channels], before the convolution, mixed_stride floats between tokens */
    const float *a, *b;           /* [T, value_heads], a_stride and b_stride floats between tokens */
    const float *taps;            /* [4, channels] */
    const float *rates, *dt_bias; /* [value_heads] */
    float *recurrent;             /* [slots, value_heads, key_dim, value_dim], recurrent_stride floats between slots */
    float *conv;                  /* [slots, 3, channels], conv_stride and past_stride floats between slots and tokens */
    float *output;                /* [T, value_heads, value_dim] */
    const int64_t *starts, *lens, *slots, *fresh, *several, *singles;
    int64_t num_tokens, num_sequences, num_singles, num_several, num_slots;
    int64_t key_heads, value_heads, key_dim, value_dim;
    int64_t mixed_stride, a_stride, b_stride, recurrent_stride, conv_stride, past_stride;
} DeltaStep;

/* What the first phase computes, head by head. */
typedef struct {
    float *queries, *keys; /* [key_heads, T, key_dim], normalised; queries are also divided by the root of key_dim */
    float *values;         /* [value_heads, T, value_dim] */
    float *decays, *betas; /* [value_heads, T] */
} Convolved;

/* A value head of a sequence. */
typedef struct {
    const float *queries, *keys, *values, *decays, *betas; /* of the sequence's first token on */
    float *state;  /* [key_dim, value_dim] */
    float *output; /* of the first token, value_heads * value_dim floats between tokens */
} DeltaHead;

inlined DeltaHead delta_head(const DeltaStep *step, const Convolved *from, int64_t sequence, int64_t head) {
    int64_t tokens = step->num_tokens, start = step->starts[sequence];
    int64_t key = head / (step->value_heads / step->key_heads) * tokens + start, value = head * tokens + start;
    float *state = step->recurrent + step->slots[sequence] * step->recurrent_stride;
    return (DeltaHead){
        from->queries + key * step->key_dim, from->keys + key * step->key_dim, from->values + value * step->value_dim,
        from->decays + value, from->betas + value, state + head * step->key_dim * step->value_dim,
        step->output + (start * step->value_heads + head) * step->value_dim,
    };
}

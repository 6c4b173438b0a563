/* A layer of a decoder or of a tower for T tokens, in two calls: up to attention's output, and the rest. For a single
 * token, the overhead of separate calls would exceed the work between products; for many, separate calls would read all
 * values from memory more often. */
#include <stdlib.h>

#include "attention.h"
#include "pointwise.h"
#include "products.h"

/* Weights of the first half, up to and including attention. */
typedef struct {
    Linear qkv;
    Norm norm;
    const float *heads_norm; /* RMSNorm of queries and keys, [heads + kv_heads, dim], or NULL */
} Before;

/* Weights of the second half. The MLP is gated if ``up`` has twice the outputs that ``down`` has inputs: first the values
 * to activate, then their factors. */
typedef struct {
    Linear output, up, down;
    Norm norm;
    int64_t activation;
} After;

static int64_t room_for(const Linear *linear, int64_t tokens) {
    switch (linear->kind) {
    case INT8: return int8_room(linear, tokens);
    case INT4: return int4_room(linear, tokens);
    case BF16: return bf16_room(linear, tokens);
    default: return float_room(linear, tokens);
    }
}

static void *memory(int64_t bytes) { return aligned_alloc(64, whole_lines(bytes + 1)); }

static void multiply(const Linear *linear, Input input, Output output, int64_t tokens, void *room) {
    switch (linear->kind) {
    case INT8: int8_together(linear, &input, &output, tokens, room); break;
    case INT4: int4_together(linear, &input, &output, tokens, room); break;
    case BF16: bf16_together(linear, &input, &output, tokens, room); break;
    default: float_together(linear, &input, &output, tokens, room);
    }
}

/* One linear layer, with stride floats between the input's tokens. Returns 0 if there is no memory. */
int linear(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens) {
    void *room = memory(room_for(linear, tokens));
    if (!room) return 0;
#pragma omp parallel
    multiply(linear, (Input){input, stride}, (Output){output}, tokens, room);
    free(room);
    return 1;
}

/* First half: hidden [T, hidden], cos and sin [T, dim] to given->output. ``given`` has the remaining operands, except for
 * queries, keys and values. Without a cache, tokens attend to the step's own keys and values, and none are written.
 * Returns the same as paged_attention. */
int attend_layer(const Before *layer, const float *hidden, const float *cos, const float *sin, int64_t tokens,
                 const Step *given) {
    int64_t width = layer->qkv.inputs, heads = given->heads + given->kv_heads;
    int64_t dim = given->dim, stride = layer->qkv.outputs, bytes = attention_room(given);
    if (bytes < 0) return 0;
    bytes = whole_lines(most(bytes, room_for(&layer->qkv, tokens)));
    void *room = memory(bytes + tokens * stride * sizeof(float));
    if (!room) return -1;
    float *qkv = (float *)((char *)room + bytes);
    Step step = *given;
    step.query = qkv;
    step.key = qkv + step.heads * dim;
    step.value = qkv + heads * dim;
    step.query_stride = step.key_stride = step.value_stride = stride;
    if (!step.keys) {
        step.keys = (void *)step.key;
        step.values = (void *)step.value;
        step.cache_stride = stride * sizeof(float);
    }
#pragma omp parallel
    {
        multiply(&layer->qkv, (Input){hidden, width, &layer->norm}, (Output){qkv}, tokens, room);
#pragma omp for
        for (int64_t vector = 0; vector < tokens * heads; vector++) {
            int64_t token = vector / heads, head = vector % heads;
            float *own = qkv + token * stride + head * dim;
            if (layer->heads_norm) norm(own, layer->heads_norm + head * dim, own, dim, layer->norm.eps);
            turn(own, cos + token * dim, sin + token * dim, dim);
        }
        attend_together(&step, room);
    }
    free(room);
    return 1;
}

/* Second half: hidden [T, hidden] and attended [T, output.inputs] to output [T, hidden]. Returns 0 if there is no
 * memory. */
int finish_layer(const After *layer, const float *hidden, const float *attended, float *output, int64_t tokens) {
    int64_t width = layer->output.outputs, first = layer->up.outputs, inner = layer->down.inputs;
    int64_t bytes = most(room_for(&layer->output, tokens), room_for(&layer->up, tokens));
    bytes = whole_lines(most(bytes, room_for(&layer->down, tokens)));
    void *room = memory(bytes + tokens * (width + first) * sizeof(float));
    if (!room) return 0;
    float *between = (float *)((char *)room + bytes), *up = between + tokens * width; /* between: attention and MLP */
#pragma omp parallel
    {
        Input activated = {up, first, .is_activated = 1, .is_gated = first != inner, .activation = layer->activation};
        multiply(&layer->output, (Input){attended, layer->output.inputs}, (Output){between, hidden}, tokens, room);
        multiply(&layer->up, (Input){between, width, &layer->norm}, (Output){up}, tokens, room);
        multiply(&layer->down, activated, (Output){output, between}, tokens, room);
    }
    free(room);
    return 1;
}

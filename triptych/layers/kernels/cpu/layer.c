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
    const float *heads_norm; /* RMSNorm of queries, keys and values, [normalised, dim], or NULL */
    int64_t normalised;      /* number of heads, of those the product yields */
} Before;

/* Weights of the second half. The MLP is gated if ``up`` has twice the outputs that ``down`` has inputs: first the values
 * to activate, then their factors. */
typedef struct {
    Linear output, up, down;
    Norm norm;
    Activation activation;
    const float *output_norm, *down_norm; /* RMSNorms of attention's and the MLP's outputs, [hidden], or NULL */
    /* what tokens have for this layer alone, times an activated gate, projected and normalised; unless gate is empty */
    Linear gate, projection;
    const float *projection_norm;
    float factor; /* of the result */
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
 * queries, keys and values. Without a cache, tokens attend to the step's own keys and values, and none are written; nor
 * are they if the product yields queries alone, whose keys and values another layer has written.
 * Returns the same as paged_attention. */
int attend_layer(const Before *layer, const float *hidden, const float *cos, const float *sin, int64_t tokens,
                 const Step *given) {
    int64_t width = layer->qkv.inputs, dim = given->dim, stride = layer->qkv.outputs, bytes = attention_room(given);
    int64_t turned = stride / dim - (stride > given->heads * dim ? given->kv_heads : 0); /* all heads but the values' */
    int64_t heads = most(turned, layer->heads_norm ? layer->normalised : 0);
    if (bytes < 0) return 0;
    bytes = whole_lines(most(bytes, room_for(&layer->qkv, tokens)));
    void *room = memory(bytes + tokens * stride * sizeof(float));
    if (!room) return -1;
    float *qkv = (float *)((char *)room + bytes);
    Step step = *given;
    step.query = qkv;
    step.key = qkv + step.heads * dim;
    step.value = qkv + turned * dim;
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
            if (layer->heads_norm && head < layer->normalised)
                norm(own, layer->heads_norm + head * dim, own, dim, layer->norm.eps);
            if (head < turned) turn(own, cos + token * dim, sin + token * dim, dim);
        }
        attend_together(&step, room);
    }
    free(room);
    return 1;
}

/* to = norm(from) + added, [T, width] each, where ``to`` may be ``added``; by all threads of a team. Changes ``from``. */
static void add_normed(float *from, const float *weight, float eps, const float *added, float *to, int64_t width,
                       int64_t tokens) {
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) {
        int64_t start = token * width;
        norm(from + start, weight, from + start, width, eps);
        for (int64_t i = start; i < start + width; i++) to[i] = from[i] + added[i];
    }
}

/* to = linear(input) + added, where ``weight`` is that of the product's norm or NULL, and ``own`` has room for it */
static void multiply_and_add(const Linear *linear, Input input, const float *weight, float eps, const float *added,
                             float *own, float *to, int64_t tokens, void *room) {
    multiply(linear, input, weight ? (Output){own} : (Output){to, added}, tokens, room);
    if (weight) add_normed(own, weight, eps, added, to, linear->outputs, tokens);
}

/* Second half: hidden [T, hidden] and attended [T, output.inputs] to output [T, hidden]. ``values`` are those that
 * tokens have for this layer alone, [T, gate.outputs], with stride floats between tokens. Returns 0 if there is no
 * memory. */
int finish_layer(const After *layer, const float *hidden, const float *attended, float *output, int64_t tokens,
                 const float *values, int64_t stride) {
    int64_t width = layer->output.outputs, first = layer->up.outputs, inner = layer->down.inputs;
    int64_t size = layer->gate.outputs, bytes = most(room_for(&layer->output, tokens), room_for(&layer->up, tokens));
    bytes = most(bytes, room_for(&layer->down, tokens));
    if (size) bytes = most(bytes, most(room_for(&layer->gate, tokens), room_for(&layer->projection, tokens)));
    bytes = whole_lines(bytes);
    int64_t normed = layer->output_norm || layer->down_norm || size ? tokens * width : 0;
    void *room = memory(bytes + (normed + tokens * (width + most(first, size))) * sizeof(float));
    if (!room) return 0;
    float *between = (float *)((char *)room + bytes), *up = between + tokens * width; /* between: attention and MLP */
    float *own = up + tokens * most(first, size), eps = layer->norm.eps;
#pragma omp parallel
    {
        Input from = {attended, layer->output.inputs};
        Input activated = {up, first, .activation = &layer->activation, .is_gated = first != inner};
        multiply_and_add(&layer->output, from, layer->output_norm, eps, hidden, own, between, tokens, room);
        multiply(&layer->up, (Input){between, width, &layer->norm}, (Output){up}, tokens, room);
        multiply_and_add(&layer->down, activated, layer->down_norm, eps, between, own, output, tokens, room);
        if (size) {
            multiply(&layer->gate, (Input){output, width}, (Output){up}, tokens, room);
#pragma omp for
            for (int64_t token = 0; token < tokens; token++)
                activate(up + token * size, values + token * stride, up + token * size, size, &layer->activation);
            multiply(&layer->projection, (Input){up, size}, (Output){own}, tokens, room);
            add_normed(own, layer->projection_norm, eps, output, output, width, tokens);
        }
        if (layer->factor != 1) {
#pragma omp for
            for (int64_t i = 0; i < tokens * width; i++) output[i] *= layer->factor;
        }
    }
    free(room);
    return 1;
}

/* One expert of a mixture. The first product yields values to activate, then their factors. */
typedef struct {
    Linear up, down;
} Expert;

/* The experts of a mixture. */
typedef struct {
    const Expert *experts;
    int64_t count, weighs_inputs;
    Activation activation;
} Experts;

/* Adds up the outputs of each token's experts: hidden [T, hidden], chosen and weights [T, per_token] to output
 * [T, hidden]. Each expert runs once, for its tokens. Returns 0 if there is no memory. */
int run_experts(const Experts *mixture, const float *hidden, const int64_t *chosen, const float *weights, float *output,
                int64_t tokens, int64_t per_token) {
    const Expert *experts = mixture->experts;
    int64_t width = experts->up.inputs, first = experts->up.outputs, count = mixture->count;
    int64_t assigned = tokens * per_token, largest = 0, bytes = 0;
    int64_t *ends = calloc(count + 1 + assigned, sizeof(int64_t)), *order = ends + count + 1;
    if (!ends) return 0;
    for (int64_t i = 0; i < assigned; i++) ends[chosen[i] + 1]++;
    for (int64_t expert = 0; expert < count; expert++) {
        int64_t rows = ends[expert + 1];
        largest = most(largest, rows);
        if (rows) bytes = most(bytes, room_for(&experts[expert].up, rows));
        if (rows) bytes = most(bytes, room_for(&experts[expert].down, rows));
        ends[expert + 1] += ends[expert];
    }
    for (int64_t i = 0; i < assigned; i++) order[ends[chosen[i]]++] = i; /* what was an expert's start is its end now */
    bytes = whole_lines(bytes);
    void *room = memory(bytes + largest * (2 * width + first) * sizeof(float));
    if (!room) return free(ends), 0;
    float *gathered = (float *)((char *)room + bytes), *added = gathered + largest * width;
    float *up = added + largest * width;
    Input activated = {up, first, .activation = &mixture->activation, .is_gated = 1};
#pragma omp parallel
    {
#pragma omp for
        for (int64_t token = 0; token < tokens; token++) memset(output + token * width, 0, width * sizeof(float));
        for (int64_t expert = 0; expert < count; expert++) {
            int64_t start = expert ? ends[expert - 1] : 0, rows = ends[expert] - start;
            const int64_t *own = order + start;
            if (!rows) continue;
#pragma omp for
            for (int64_t row = 0; row < rows; row++) {
                const float *from = hidden + own[row] / per_token * width;
                float weight = mixture->weighs_inputs ? weights[own[row]] : 1;
                for (int64_t i = 0; i < width; i++) gathered[row * width + i] = from[i] * weight;
            }
            multiply(&experts[expert].up, (Input){gathered, width}, (Output){up}, rows, room);
            multiply(&experts[expert].down, activated, (Output){added}, rows, room);
#pragma omp for
            for (int64_t row = 0; row < rows; row++) {
                float *from = added + row * width, *to = output + own[row] / per_token * width;
                float weight = mixture->weighs_inputs ? 1 : weights[own[row]];
                for (int64_t i = 0; i < width; i++) from[i] *= weight; /* apart, so that it is rounded */
                for (int64_t i = 0; i < width; i++) to[i] += from[i];
            }
        }
    }
    free(room);
    free(ends);
    return 1;
}

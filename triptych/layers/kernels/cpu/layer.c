/* A layer of a decoder or of a tower for T tokens, in two calls: up to attention's output, and the rest; or several layers
 * of a decoder in one. For a single token, the overhead of separate calls would exceed the work between products; for
 * many, separate calls would read all values from memory more often. */
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

/* Weights of the second half. */
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
    case BLOCKS: return blocks_room(linear, tokens);
    case BF16: return bf16_room(linear, tokens);
    case SPLIT_HALF: return halves_room(linear, tokens);
    default: return float_room(linear, tokens);
    }
}

static void *memory(int64_t bytes) { return aligned_alloc(64, whole_lines(bytes + 1)); }

static void multiply(const Linear *linear, Input input, Output output, int64_t tokens, void *room) {
    switch (linear->kind) {
    case INT8: int8_together(linear, &input, &output, tokens, room); break;
    case INT4: int4_together(linear, &input, &output, tokens, room); break;
    case BLOCKS: blocks_together(linear, &input, &output, tokens, room); break;
    case BF16: bf16_together(linear, &input, &output, tokens, room); break;
    case SPLIT_HALF: halves_together(linear, &input, &output, tokens, room); break;
    default: float_together(linear, &input, &output, tokens, room);
    }
}

/* Bytes of memory for what is between the products of an MLP. */
static int64_t between_room(const Linear *up, const Linear *down, int64_t tokens) {
    return whole_lines(most(tokens * up->outputs * sizeof(float), bf16_activated(up, down, tokens)));
}

/* Both products of an MLP, with ``between`` for what is between them. It is gated if ``up`` has twice the outputs that
 * ``down`` has inputs: first the values to activate, then their factors. */
static void multiply_mlp(const Linear *up, const Linear *down, const Activation *activation, Input input, Output output,
                         int64_t tokens, void *room, float *between) {
    int is_gated = up->outputs != down->inputs;
    int64_t rounded = bf16_activated(up, down, tokens);
    if (rounded) {
        int64_t apart = bf16_row(down->inputs);
        multiply(up, input, (Output){between, NULL, activation, apart / sizeof(float), is_gated}, tokens, room);
        multiply(down, (Input){between, .is_rounded = 1}, output, tokens, room);
    } else {
        multiply(up, input, (Output){between}, tokens, room);
        multiply(down, (Input){between, up->outputs, NULL, activation, is_gated}, output, tokens, room);
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

/* An MLP: input [T, up.inputs] to output [T, down.outputs], with stride floats between the input's tokens. Returns 0 if
 * there is no memory. */
int mlp(const Linear *up, const Linear *down, const Activation *activation, const float *input, int64_t stride,
        float *output, int64_t tokens) {
    int64_t bytes = whole_lines(most(room_for(up, tokens), room_for(down, tokens)));
    void *room = memory(bytes + between_room(up, down, tokens));
    if (!room) return 0;
#pragma omp parallel
    multiply_mlp(up, down, activation, (Input){input, stride}, (Output){output}, tokens, room,
                 (float *)((char *)room + bytes));
    free(room);
    return 1;
}

/* Linear layers of one shape, one for each head: input [T, heads, inputs], with stride floats between tokens and apart
 * between heads, to output [heads, T, outputs]. Returns 0 if there is no memory. */
int linear_heads(const Linear *linears, int64_t heads, const float *input, int64_t stride, int64_t apart, float *output,
                 int64_t tokens) {
    int64_t bytes = 0; /* heads' kinds differ where only some have a weight that is too large for halves.c */
    for (int64_t head = 0; head < heads; head++) bytes = most(bytes, room_for(linears + head, tokens));
    void *room = memory(bytes);
    if (!room) return 0;
#pragma omp parallel
    for (int64_t head = 0; head < heads; head++) {
        Input own = {input + head * apart, stride};
        multiply(linears + head, own, (Output){output + head * tokens * linears->outputs}, tokens, room);
    }
    free(room);
    return 1;
}

/* Bytes of working memory of the first half's product and attention; -1 as attention_room. */
static int64_t attend_room(const Before *layer, int64_t tokens, const Step *step) {
    int64_t bytes = attention_room(step);
    return bytes < 0 ? -1 : whole_lines(most(bytes, room_for(&layer->qkv, tokens)));
}

/* The first half, by all threads of a team: hidden [T, hidden], cos and sin [T, dim] to given->output. Without these two
 * nothing is turned. ``qkv`` is memory for queries, keys and values. */
static void attend_half(const Before *layer, const float *hidden, const float *cos, const float *sin, int64_t tokens,
                        const Step *given, void *room, float *qkv) {
    int64_t dim = given->dim, stride = layer->qkv.outputs;
    int64_t turned = stride / dim - (stride > given->heads * dim ? given->kv_heads : 0); /* all heads but the values' */
    int64_t heads = most(cos ? turned : 0, layer->heads_norm ? layer->normalised : 0);
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
    multiply(&layer->qkv, (Input){hidden, layer->qkv.inputs, &layer->norm}, (Output){qkv}, tokens, room);
#pragma omp for
    for (int64_t vector = 0; vector < tokens * heads; vector++) {
        int64_t token = vector / heads, head = vector % heads;
        float *own = qkv + token * stride + head * dim;
        if (layer->heads_norm && head < layer->normalised)
            norm(own, layer->heads_norm + head * dim, own, dim, layer->norm.eps);
        if (cos && head < turned) turn(own, cos + token * dim, sin + token * dim, dim);
    }
    attend_together(&step, room);
}

/* First half: hidden [T, hidden], cos and sin [T, dim] to given->output. ``given`` has the remaining operands, except for
 * queries, keys and values. Without a cache, tokens attend to the step's own keys and values, and none are written; nor
 * are they if the product yields queries alone, whose keys and values another layer has written. Returns the same as
 * paged_attention. */
int attend_layer(const Before *layer, const float *hidden, const float *cos, const float *sin, int64_t tokens,
                 const Step *given) {
    int64_t bytes = attend_room(layer, tokens, given);
    if (bytes < 0) return 0;
    void *room = memory(bytes + tokens * layer->qkv.outputs * sizeof(float));
    if (!room) return -1;
#pragma omp parallel
    attend_half(layer, hidden, cos, sin, tokens, given, room, (float *)((char *)room + bytes));
    free(room);
    return 1;
}

/* Bytes of working memory of the second half's products. */
static int64_t finish_room(const After *layer, int64_t tokens) {
    int64_t bytes = most(room_for(&layer->output, tokens), room_for(&layer->up, tokens));
    bytes = most(bytes, room_for(&layer->down, tokens));
    if (layer->gate.outputs) bytes = most(bytes, most(room_for(&layer->gate, tokens), room_for(&layer->projection, tokens)));
    return whole_lines(bytes);
}

/* Bytes of memory for what is between the MLP's products, and for an activated gate. */
static int64_t inside_room(const After *layer, int64_t tokens) {
    int64_t bytes = between_room(&layer->up, &layer->down, tokens);
    return most(bytes, whole_lines(tokens * layer->gate.outputs * sizeof(float)));
}

/* Bytes of memory for what is between the second half's products. */
static int64_t finish_between(const After *layer, int64_t tokens) {
    int64_t width = whole_lines(tokens * layer->output.outputs * sizeof(float));
    int has_norms = layer->output_norm || layer->down_norm || layer->gate.outputs;
    return inside_room(layer, tokens) + (has_norms ? 2 : 1) * width;
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

/* The second half, by all threads of a team. ``within`` is memory for what is between its products; ``values`` are those
 * that tokens have for this layer alone, [T, gate.outputs], with stride floats between tokens. */
static void finish_half(const After *layer, const float *hidden, const float *attended, float *output, int64_t tokens,
                        const float *values, int64_t stride, void *room, float *within) {
    const Linear *first = &layer->output;
    int64_t width = first->outputs, size = layer->gate.outputs;
    float *between = within + inside_room(layer, tokens) / sizeof(float); /* attention and MLP */
    float *own = between + whole_lines(tokens * width * sizeof(float)) / sizeof(float), eps = layer->norm.eps;
    Output mixed = layer->output_norm ? (Output){own} : (Output){between, hidden};
    Output finished = layer->down_norm ? (Output){own} : (Output){output, between};
    multiply(first, (Input){attended, first->inputs}, mixed, tokens, room);
    if (layer->output_norm) add_normed(own, layer->output_norm, eps, hidden, between, width, tokens);
    multiply_mlp(&layer->up, &layer->down, &layer->activation, (Input){between, width, &layer->norm}, finished, tokens,
                 room, within);
    if (layer->down_norm) add_normed(own, layer->down_norm, eps, between, output, width, tokens);
    if (size) {
        multiply(&layer->gate, (Input){output, width}, (Output){within}, tokens, room);
#pragma omp for
        for (int64_t token = 0; token < tokens; token++) {
            float *gate = within + token * size;
            activate(gate, values + token * stride, gate, size, &layer->activation);
        }
        multiply(&layer->projection, (Input){within, size}, (Output){own}, tokens, room);
        add_normed(own, layer->projection_norm, eps, output, output, width, tokens);
    }
    if (layer->factor != 1) {
#pragma omp for
        for (int64_t i = 0; i < tokens * width; i++) output[i] *= layer->factor;
    }
}

/* Second half: hidden [T, hidden] and attended [T, output.inputs] to output [T, hidden]; ``values`` and ``stride`` as
 * above. Returns 0 if there is no memory. */
int finish_layer(const After *layer, const float *hidden, const float *attended, float *output, int64_t tokens,
                 const float *values, int64_t stride) {
    int64_t bytes = finish_room(layer, tokens);
    void *room = memory(bytes + finish_between(layer, tokens));
    if (!room) return 0;
#pragma omp parallel
    finish_half(layer, hidden, attended, output, tokens, values, stride, room, (float *)((char *)room + bytes));
    free(room);
    return 1;
}

/* One of a decoder's layers, with what Step has of it. */
typedef struct {
    Before before;
    After after;
    void *keys, *values;
    const float *sinks;
    int64_t num_pages, page_size, cache_stride, window, chunked, format, spans;
    float scale, cap;
    int64_t step, rotation; /* which of the steps and rotations the layer takes */
} Layer;

static Step step_of(const Layer *layer, const Step *steps) {
    Step step = steps[layer->step];
    step.keys = layer->keys, step.values = layer->values, step.sinks = layer->sinks;
    step.num_pages = layer->num_pages, step.page_size = layer->page_size, step.cache_stride = layer->cache_stride;
    step.window = layer->window, step.chunked = layer->chunked, step.format = layer->format;
    step.spans = layer->spans, step.scale = layer->scale, step.cap = layer->cap;
    return step;
}

/* ``count`` layers: hidden [T, hidden] to outputs [2, T, hidden], of which the layers use one after the other; the last
 * layer's are those of number (count - 1) % 2. ``cos`` and ``sin`` are those of each rotation. Returns the same as
 * attend_layer. */
int run_layers(const Layer *layers, int64_t count, const float *hidden, float *outputs, const float *const *cos,
               const float *const *sin, int64_t tokens, const Step *steps) {
    int64_t bytes = 0, width = layers->before.qkv.inputs, inside = 0, attended = 0;
    for (int64_t i = 0; i < count; i++) {
        const Before *before = &layers[i].before;
        const After *after = &layers[i].after;
        Step step = step_of(layers + i, steps);
        int64_t needed = attend_room(before, tokens, &step);
        if (needed < 0) return 0;
        bytes = most(bytes, most(needed, finish_room(after, tokens)));
        int64_t qkv = whole_lines(tokens * before->qkv.outputs * sizeof(float));
        inside = most(inside, most(qkv, finish_between(after, tokens)));
        attended = most(attended, after->output.inputs);
    }
    void *room = memory(bytes + inside + tokens * attended * sizeof(float));
    if (!room) return -1;
    float *between = (float *)((char *)room + bytes);
#pragma omp parallel
    for (int64_t i = 0; i < count; i++) {
        const Layer *layer = layers + i;
        const float *from = i ? outputs + (i - 1) % 2 * tokens * width : hidden;
        float *to = outputs + i % 2 * tokens * width;
        Step step = step_of(layer, steps);
        step.output = between + inside / sizeof(float);
        attend_half(&layer->before, from, cos[layer->rotation], sin[layer->rotation], tokens, &step, room, between);
        finish_half(&layer->after, from, step.output, to, tokens, NULL, 0, room, between);
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
    int64_t width = experts->up.inputs, count = mixture->count;
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
    int64_t inside = between_room(&experts->up, &experts->down, largest);
    void *room = memory(bytes + inside + largest * 2 * width * sizeof(float));
    if (!room) return free(ends), 0;
    float *within = (float *)((char *)room + bytes), *gathered = within + inside / sizeof(float);
    float *added = gathered + largest * width;
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
            multiply_mlp(&experts[expert].up, &experts[expert].down, &mixture->activation, (Input){gathered, width},
                         (Output){added}, rows, room, within);
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

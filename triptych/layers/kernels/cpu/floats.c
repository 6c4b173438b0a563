/* Float32 products with weights in half or single precision: halves are converted as they are loaded. An output is summed
 * from the first input to the last, so that a token's outputs are bit-identical in any batch.
 *
 * Weights are in panels of OUTPUTS outputs, [ceil(outputs / OUTPUTS), inputs, OUTPUTS], the last padded with zeros. They
 * are loaded once for up to TOKENS tokens, whose sums stay in registers. With AVX-512 and many tokens, a panel of halves is
 * converted first, since conversions take the place of products in the processor's ports.
 */
#include <stdlib.h>

#include "panels.h"

#ifdef __AVX512F__
#define TOKENS 12
#define WIDEST (512 * 1024) /* bytes of a converted panel, which stay in the L2 cache while it is used again */
#else
#define TOKENS 6
#define WIDEST 0 /* none is converted: here this gains nothing */
#endif

#define MANY 128 /* tokens up to which a panel is converted as it is loaded */

const int float_outputs = OUTPUTS, float_multiple = 1;

/* Computes the outputs of ``num_panels`` panels for ``count`` tokens from ``first`` on. */
inlined void multiply(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t first, const int count,
                      const int num_panels, const int is_half) {
    int64_t line = OUTPUTS * (is_half ? sizeof(uint16_t) : sizeof(float)), size = linear->inputs * line;
    int64_t stride = rows->stride / sizeof(float);
    const char *weights[MOST_PANELS];
    const float *input = (const float *)rows->input + first * stride;
    floats sums[MOST_PANELS][TOKENS][2];
    for (int which = 0; which < num_panels; which++) {
        weights[which] = (const char *)linear->panels + panels[which] * size;
        for (int token = 0; token < count; token++) sums[which][token][0] = sums[which][token][1] = (floats){};
    }
    for (int64_t i = 0; i < linear->inputs; i++) {
#pragma GCC unroll 4
        for (int which = 0; which < num_panels; weights[which++] += line) {
            floats low = load_any(weights[which], 0, LANES, is_half);
            floats high = load_any(weights[which], LANES, LANES, is_half);
            for (int64_t at = 0; at < line; at += 64) __builtin_prefetch(weights[which] + rows->ahead + at);
#pragma GCC unroll 12
            for (int token = 0; token < count; token++) {
                floats value = splat(input[token * stride + i]);
                sums[which][token][0] += low * value;
                sums[which][token][1] += high * value;
            }
        }
    }
    for (int which = 0; which < num_panels; which++) keep(sums[which], linear, rows, panels[which], first, count);
}

inlined void multiply_some(const Linear *linear, const Rows *rows, int64_t panel, int64_t first, int64_t count,
                           const int is_half) {
    switch (count) {
#define SOME(n) case n: multiply(linear, rows, &panel, first, n, 1, is_half); break;
        SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6)
#if TOKENS > 6
        SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#endif
#undef SOME
    }
}

/* Memory of the calling thread for a converted panel, which it keeps for the next ones; NULL if there is none. */
static float *memory_for_panel(void) {
    static _Thread_local float *memory;
    if (!memory) memory = aligned_alloc(64, most(64, WIDEST));
    return memory;
}

/* Converts a panel of halves into ``memory``. Returns the weights for the panel's product; their other panels can't be
 * read. */
static Linear with_converted(const Linear *linear, int64_t panel, float *memory) {
    int64_t size = linear->inputs * OUTPUTS;
    const uint16_t *from = (const uint16_t *)linear->panels + panel * size;
    for (int64_t i = 0; i < size; i += LANES) {
        __builtin_prefetch(from + i + AHEAD / sizeof(uint16_t));
        *(floats *)(memory + i) = load_half(from + i, LANES);
    }
    Linear converted = *linear;
    converted.kind = FLOAT;
    converted.panels = (const void *)((uintptr_t)memory - panel * size * sizeof(float));
    return converted;
}

static void multiply_panel(const Linear *linear, const Rows *rows, int64_t panel) {
    int64_t tokens = rows->tokens, tiles = (tokens + TOKENS - 1) / TOKENS;
    int64_t bytes = linear->inputs * OUTPUTS * sizeof(float); /* of a converted panel */
    float *memory = linear->kind == HALF && tokens > MANY && bytes <= WIDEST ? memory_for_panel() : NULL;
    Linear converted;
    Rows own = *rows;
    if (memory) {
        converted = with_converted(linear, panel, memory);
        linear = &converted;
        own.ahead = 0;
        rows = &own;
    }
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = tokens * tile / tiles, count = tokens * (tile + 1) / tiles - first;
        if (linear->kind == HALF) multiply_some(linear, rows, panel, first, count, 1);
        else multiply_some(linear, rows, panel, first, count, 0);
    }
}

static void multiply_panels(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    int is_half = linear->kind == HALF;
    switch (count > 1 ? 2 * PANELS(count, rows->tokens) + is_half : 0) {
#define SOME_PANELS(many, tokens) \
    case 2 * PANELS(many, tokens): multiply(linear, rows, panels, 0, tokens, many, 0); break; \
    case 2 * PANELS(many, tokens) + 1: multiply(linear, rows, panels, 0, tokens, many, 1); break;
        FEW_TOKENS(SOME_PANELS)
    default:
        for (int64_t i = 0; i < count; i++) multiply_panel(linear, rows, panels[i]);
    }
}

void float_panel(const Linear *linear, const float *input, float *output, int64_t panel) {
    Rows row = {(const char *)input, {output, NULL}, 0, 1, AHEAD};
    multiply_panel(linear, &row, panel);
}

inlined int64_t row_of(int64_t inputs) { return whole_lines(inputs * sizeof(float)); }

int64_t float_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, tokens, row_of(linear->inputs));
}

static void copy(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    memcpy(to, from, linear->inputs * sizeof(float));
}

void float_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    int64_t bytes = linear->inputs * OUTPUTS * (linear->kind == HALF ? sizeof(uint16_t) : sizeof(float));
    Rows rows = {(const char *)input->values, *output, input->stride * sizeof(float), tokens, 0};
    if (input->norm || input->activation) {
        rows.stride = row_of(linear->inputs);
        rows.input = round_together(linear, input, tokens, room, rows.stride, 0, copy);
    }
    multiply_together(linear, &rows, bytes, panels_for(tokens, FOURS, TWOS), TOKENS, BLOCK, TASK, multiply_panels);
}

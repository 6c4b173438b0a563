/* Products with weights in half or single precision, in float32: a half is widened as it is loaded. An output is summed
 * up from the first input to the last, so that what a token comes to is the same, bit by bit, in any batch.
 *
 * Weights lie in panels of OUTPUTS outputs: for every input, that of each output. They are loaded once for up to TOKENS
 * tokens, whose sums stay in registers.
 */
#include "vectors.h"

#ifdef __AVX512F__
#define TOKENS 12
#else
#define TOKENS 6
#endif
#define OUTPUTS (2 * LANES)
#define AHEAD 4096           /* bytes of weights that are on their way: by itself hardware stops at each page's end */
#define AT_ONCE (512 * 1024) /* bytes of weights that a thread takes, if there is little to do with them */

/* A layer's operands for T tokens. */
typedef struct {
    const void *panels;  /* [ceil(outputs / OUTPUTS), inputs, OUTPUTS] halves or floats; zeros fill up the last */
    const float *bias;   /* [outputs], or NULL */
    const float *input;  /* [T, inputs], stride floats from one token to the next */
    float *output;       /* [T, outputs] */
    int64_t inputs, outputs, stride, tokens;
} Step;

const int float_outputs = OUTPUTS;

inlined void keep(floats sum, const Step *step, int64_t token, int64_t output) {
    int64_t left = step->outputs - output;
    if (left <= 0) return;
    if (step->bias) sum += load(step->bias + output, left);
    store(step->output + token * step->outputs + output, sum, left);
}

/* What ``count`` tokens, ``first`` and those after it, come to for a panel's outputs. */
inlined void multiply(const Step *step, int64_t panel, int64_t first, const int count, const int is_half) {
    int64_t line = OUTPUTS * (is_half ? sizeof(uint16_t) : sizeof(float)), size = step->inputs * line;
    /* a panel that is multiplied several times leaves time for the whole next one to come */
    int64_t ahead = step->tokens > TOKENS ? size : AHEAD, stride = step->stride;
    const char *weights = (const char *)step->panels + panel * size;
    const float *input = step->input + first * stride;
    floats sums[TOKENS][2];
    for (int token = 0; token < count; token++) sums[token][0] = sums[token][1] = (floats){};
    for (int64_t i = 0; i < step->inputs; i++, weights += line) {
        floats low = load_any(weights, 0, LANES, is_half), high = load_any(weights, LANES, LANES, is_half);
        for (int64_t at = 0; at < line; at += 64) __builtin_prefetch(weights + ahead + at);
#pragma GCC unroll 12
        for (int token = 0; token < count; token++) {
            floats value = splat(input[token * stride + i]);
            sums[token][0] += low * value;
            sums[token][1] += high * value;
        }
    }
#pragma GCC unroll 12
    for (int token = 0; token < count; token++) {
        keep(sums[token][0], step, first + token, panel * OUTPUTS);
        keep(sums[token][1], step, first + token, panel * OUTPUTS + LANES);
    }
}

inlined void multiply_some(const Step *step, int64_t panel, int64_t first, int64_t count, const int is_half) {
    switch (count) {
#define SOME(n) case n: multiply(step, panel, first, n, is_half); break;
        SOME(1) SOME(2) SOME(3) SOME(4) SOME(5) SOME(6)
#if TOKENS > 6
        SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#endif
    }
}

inlined void multiply_all(const Step *step, const int is_half) {
    int64_t tokens = step->tokens, tiles = (tokens + TOKENS - 1) / TOKENS;
    int64_t panels = (step->outputs + OUTPUTS - 1) / OUTPUTS;
    int64_t bytes = most(1, step->inputs * OUTPUTS * (is_half ? sizeof(uint16_t) : sizeof(float)));
    int64_t at_once = tokens > TOKENS ? 1 : most(1, AT_ONCE / bytes);
    /* dynamic, because the machine has other work: a core that is late gets less */
#pragma omp parallel for schedule(dynamic, at_once)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t first = tokens * tile / tiles;
            multiply_some(step, panel, first, tokens * (tile + 1) / tiles - first, is_half);
        }
}

void half_linear(const Step *step) { multiply_all(step, 1); }
void float_linear(const Step *step) { multiply_all(step, 0); }

/* Operations between products, in float32, each in one pass over memory, where PyTorch makes several. */
#include <math.h>
#include <stddef.h>
#include "pointwise.h"
#include "vectors.h"

#define FEW 16384 /* number of values below which other threads aren't worth waking */
#define SPAN 1024 /* values searched before their maximum is compared with the row's */

/* Applies ``norm`` to each of the ``heads`` vectors [dim] of each token, with ``stride`` floats between tokens; weight
 * [heads, dim]; output [tokens, heads, dim]. */
void rms_norm(const float *input, const float *weight, float *output, int64_t tokens, int64_t heads, int64_t dim,
              int64_t stride, float eps) {
#pragma omp parallel for if (tokens * heads * dim > FEW)
    for (int64_t vector = 0; vector < tokens * heads; vector++) {
        int64_t head = vector % heads;
        norm(input + vector / heads * stride + head * dim, weight + head * dim, output + vector * dim, dim, eps);
    }
}

/* Applies ``turn`` in place by angles given as cos and sin [tokens, dim]; other operands as above. */
void rotate(float *values, const float *cos, const float *sin, int64_t tokens, int64_t heads, int64_t dim,
            int64_t stride) {
#pragma omp parallel for if (tokens * heads * dim > FEW)
    for (int64_t vector = 0; vector < tokens * heads; vector++) {
        int64_t token = vector / heads;
        turn(values + token * stride + vector % heads * dim, cos + token * dim, sin + token * dim, dim);
    }
}

/* Applies ``gate`` to tokens [gate, up] with ``width`` values each: [tokens, 2 width] to [tokens, width]. */
void silu_and_mul(const float *gate_up, float *output, int64_t tokens, int64_t width) {
#pragma omp parallel for if (tokens * width > FEW)
    for (int64_t token = 0; token < tokens; token++)
        gate(gate_up + token * 2 * width, output + token * width, width);
}

/* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which equals x sigmoid(2 sqrt(2 / pi) (...)). */
void gelu_tanh(float *values, int64_t count) {
#pragma omp parallel for if (count > FEW)
    for (int64_t i = 0; i < count; i += LANES) {
        floats x = load(values + i, count - i);
        store(values + i, x * sigmoid(1.59576912f * x * (1.0f + 0.044715f * x * x)), count - i);
    }
}

/* Finds the index of each row's first maximum: first the span that has it, then the value. A NaN exceeds any number, so
 * that the value found reveals a row with NaNs. */
void argmax_rows(const float *logits, int64_t *found, int64_t rows, int64_t width, int64_t stride) {
#pragma omp parallel for if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = logits + row * stride;
        float maximum = -INFINITY;
        int64_t place = 0;
        for (int64_t start = 0, end; start < width; start = end) {
            floats highest = splat(-INFINITY);
            ints nans = {};
            int64_t i = start;
            end = start + SPAN < width ? start + SPAN : width;
            for (; i + LANES <= end; i += LANES) {
                floats x = load(from + i, LANES);
                highest = larger(x, highest);
                nans |= x != x;
            }
            float among = largest_of(highest);
            int has_nan = any_of(nans);
            for (; i < end; i++) {
                if (from[i] > among) among = from[i];
                has_nan |= from[i] != from[i];
            }
            if (has_nan) {
                maximum = NAN;
                place = start;
                break;
            }
            if (among > maximum) {
                maximum = among;
                place = start;
            }
        }
        if (maximum != maximum) while (from[place] == from[place]) place++;
        else while (place + 1 < width && from[place] != maximum) place++;
        found[row] = place;
    }
}

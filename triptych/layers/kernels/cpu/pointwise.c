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

/* Applies RMSNorm to values [tokens, heads, dim] with one weight [dim], and multiplies them by SiLU of gates [heads, dim],
 * ``stride`` floats between tokens. Output [tokens, heads, dim]. */
void gated_norms(const float *values, const float *gates, const float *weight, float *output, int64_t tokens,
                 int64_t heads, int64_t dim, int64_t stride, float eps) {
    const Activation silu = {SILU};
#pragma omp parallel for if (tokens * heads * dim > FEW)
    for (int64_t vector = 0; vector < tokens * heads; vector++) {
        float *to = output + vector * dim;
        norm(values + vector * dim, weight, to, dim, eps);
        activate(gates + vector / heads * stride + vector % heads * dim, to, to, dim, &silu);
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

/* Applies ``layer_norm`` to vectors [count, dim]. */
void layer_norms(const float *input, const float *weight, const float *bias, float *output, int64_t count,
                 int64_t dim, float eps) {
    Norm by = {weight, bias, eps};
#pragma omp parallel for if (count * dim > FEW)
    for (int64_t vector = 0; vector < count; vector++)
        layer_norm(input + vector * dim, &by, output + vector * dim, dim);
}

/* Applies ``activate`` to tokens with ``stride`` values each, of which the first ``width`` are activated; if there are as
 * many more, these are their factors. Output [tokens, width]. */
void activations(const float *input, float *output, int64_t tokens, int64_t width, int64_t stride, int64_t activation) {
    Activation by = {activation};
#pragma omp parallel for if (tokens * width > FEW)
    for (int64_t token = 0; token < tokens; token++) {
        const float *from = input + token * stride;
        activate(from, stride == 2 * width ? from + width : NULL, output + token * width, width, &by);
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

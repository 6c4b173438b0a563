/* What goes on between products, in float32, each in one pass: PyTorch takes up to ten. */
#include <math.h>
#include <stddef.h>
#include "vectors.h"

#define FEW 16384 /* values for which it isn't worth waking other threads */
#define SPAN 1024

/* x / sqrt(mean(x^2) + eps) * weight, for the ``heads`` vectors [dim] of each of ``tokens``, which lie ``stride``
 * floats apart; weight [heads, dim]; output [tokens, heads, dim]. */
void rms_norm(const float *input, const float *weight, float *output, int64_t tokens, int64_t heads, int64_t dim,
              int64_t stride, float eps) {
#pragma omp parallel for if (tokens * heads * dim > FEW)
    for (int64_t vector = 0; vector < tokens * heads; vector++) {
        int64_t head = vector % heads;
        const float *from = input + vector / heads * stride + head * dim, *scale = weight + head * dim;
        float *to = output + vector * dim;
        floats squares = {};
        for (int64_t i = 0; i < dim; i += LANES) {
            floats x = load(from + i, dim - i);
            squares += x * x;
        }
        float factor = 1.0f / sqrtf(sum_of(squares) / dim + eps);
        for (int64_t i = 0; i < dim; i += LANES)
            store(to + i, load(scale + i, dim - i) * (load(from + i, dim - i) * factor), dim - i);
    }
}

/* Values i and i + dim / 2 of each vector turned by an angle whose cos and sin [tokens, dim] are given; the rest as
 * above. */
void rotate(const float *input, const float *cos, const float *sin, float *output, int64_t tokens, int64_t heads,
            int64_t dim, int64_t stride) {
    int64_t half = dim / 2;
#pragma omp parallel for if (tokens * heads * dim > FEW)
    for (int64_t vector = 0; vector < tokens * heads; vector++) {
        int64_t token = vector / heads;
        const float *from = input + token * stride + vector % heads * dim;
        const float *c = cos + token * dim, *s = sin + token * dim;
        float *to = output + vector * dim;
        for (int64_t i = 0; i < half; i += LANES) {
            int64_t left = half - i;
            floats first = load(from + i, left), second = load(from + half + i, left);
            store(to + i, first * load(c + i, left) - second * load(s + i, left), left);
            store(to + half + i, second * load(c + half + i, left) + first * load(s + half + i, left), left);
        }
    }
}

/* silu(gate) * up for tokens [gate, up], each of ``width``. */
void silu_times(const float *gate_up, float *output, int64_t tokens, int64_t width) {
#pragma omp parallel for if (tokens * width > FEW)
    for (int64_t token = 0; token < tokens; token++) {
        const float *gates = gate_up + token * 2 * width, *ups = gates + width;
        for (int64_t i = 0; i < width; i += LANES) {
            floats gate = load(gates + i, width - i);
            store(output + token * width + i, gate * sigmoid(gate) * load(ups + i, width - i), width - i);
        }
    }
}

/* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2, which is x sigmoid(2 sqrt(2 / pi) (...)). */
void gelu_tanh(const float *input, float *output, int64_t count) {
#pragma omp parallel for if (count > FEW)
    for (int64_t i = 0; i < count; i += LANES) {
        floats x = load(input + i, count - i);
        store(output + i, x * sigmoid(1.59576912f * x * (1.0f + 0.044715f * x * x)), count - i);
    }
}

/* Where each row's highest is, the first of them if there are several: first the span that has it. */
void likeliest(const float *logits, int64_t *found, int64_t rows, int64_t width, int64_t stride) {
#pragma omp parallel for if (rows > 1)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = logits + row * stride;
        float maximum = -INFINITY;
        int64_t place = 0;
        for (int64_t start = 0, end; start < width; start = end) {
            floats highest = splat(-INFINITY);
            int64_t i = start;
            end = start + SPAN < width ? start + SPAN : width;
            for (; i + LANES <= end; i += LANES) highest = larger(load(from + i, LANES), highest);
            float among = largest_of(highest);
            for (; i < end; i++) if (from[i] > among) among = from[i];
            if (among > maximum) {
                maximum = among;
                place = start;
            }
        }
        while (place + 1 < width && from[place] != maximum) place++;
        found[row] = place;
    }
}

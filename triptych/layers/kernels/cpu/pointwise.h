/* Operations between products, on one vector each. */
#pragma once
#include <math.h>
#include "vectors.h"

/* x / sqrt(mean(x^2) + eps) * weight; may work in place */
inlined void norm(const float *from, const float *weight, float *to, int64_t dim, float eps) {
    floats squares = {};
    for (int64_t i = 0; i < dim; i += LANES) {
        floats x = load(from + i, dim - i);
        squares += x * x;
    }
    float factor = 1.0f / sqrtf(sum_of(squares) / dim + eps);
    for (int64_t i = 0; i < dim; i += LANES)
        store(to + i, load(weight + i, dim - i) * (load(from + i, dim - i) * factor), dim - i);
}

/* Rotates the pairs of values i and i + dim / 2 by angles given as cos and sin [dim]. */
inlined void turn(float *values, const float *cos, const float *sin, int64_t dim) {
    int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t left = half - i;
        floats first = load(values + i, left), second = load(values + half + i, left);
        store(values + i, first * load(cos + i, left) - second * load(sin + i, left), left);
        store(values + half + i, second * load(cos + half + i, left) + first * load(sin + half + i, left), left);
    }
}

/* silu(gate) * up for [gate, up] with ``width`` values each. */
inlined void gate(const float *gate_up, float *to, int64_t width) {
    for (int64_t i = 0; i < width; i += LANES) {
        floats gate = load(gate_up + i, width - i);
        store(to + i, gate * sigmoid(gate) * load(gate_up + width + i, width - i), width - i);
    }
}

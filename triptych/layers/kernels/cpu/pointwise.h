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

/* Parameters of a norm over vectors: LayerNorm (arXiv:1607.06450), or without a bias RMSNorm (arXiv:1910.07467). */
typedef struct {
    const float *weight, *bias; /* [dim]; bias may be NULL */
    float eps;
} Norm;

/* (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias; may work in place */
inlined void layer_norm(const float *from, const Norm *norm, float *to, int64_t dim) {
    floats sums = {}, squares = {};
    for (int64_t i = 0; i < dim; i += LANES) sums += load(from + i, dim - i);
    float mean = sum_of(sums) / dim;
    for (int64_t i = 0; i < dim; i += LANES) {
        floats x = load(from + i, dim - i) - mean;
        if (dim - i < LANES) x = choose(lanes_below(dim - i), x, (floats){});
        squares += x * x;
    }
    float factor = 1.0f / sqrtf(sum_of(squares) / dim + norm->eps);
    for (int64_t i = 0; i < dim; i += LANES) {
        floats x = (load(from + i, dim - i) - mean) * factor;
        store(to + i, x * load(norm->weight + i, dim - i) + load(norm->bias + i, dim - i), dim - i);
    }
}

inlined void normalise(const float *from, const Norm *by, float *to, int64_t dim) {
    if (by->bias) layer_norm(from, by, to, dim);
    else norm(from, by->weight, to, dim, by->eps);
}

/* What an MLP applies to its first product: as in ``pointwise.Activation``, or ``ClampedSwiGLU`` of specs.py. */
enum { SILU, GELU_TANH, QUICK_GELU, GELU, CLAMPED };

typedef struct {
    int64_t kind;
    float limit, alpha; /* CLAMPED only */
} Activation;

/* The share of a standard normal distribution below x: within 1e-7 (Abramowitz and Stegun, 7.1.26). */
inlined floats below(floats x) {
    floats size = choose(x > 0, x, -x), t = 1.0f / (1.0f + 0.231641888f * size); /* of size / sqrt(2) */
    floats sum = splat(1.061405429f);
    sum = sum * t - 1.453152027f;
    sum = sum * t + 1.421413741f;
    sum = sum * t - 0.284496736f;
    sum = sum * t + 0.254829592f;
    floats above = 0.5f * sum * t * exponential(-0.5f * size * size);
    return choose(x > 0, 1.0f - above, above);
}

/* SiLU: x sigmoid(x). GELU in its tanh approximation (arXiv:1606.08415, section 2): x (1 + tanh(sqrt(2 / pi)
 * (x + 0.044715 x^3))) / 2, which equals x sigmoid(2 sqrt(2 / pi) (...)), in its coarser one: x sigmoid(1.702 x), and
 * exactly: x below(x). */
inlined floats activated(floats x, const int activation) {
    switch (activation) {
    case GELU_TANH: return x * sigmoid(1.59576912f * x * (1.0f + 0.044715f * x * x));
    case QUICK_GELU: return x * sigmoid(1.702f * x);
    case GELU: return x * below(x);
    default: return x * sigmoid(x);
    }
}

/* activated(from), [width], times ``factors`` [width] unless that is NULL; may work in place */
inlined void activate_as(const float *from, const float *factors, float *to, int64_t width, const int activation) {
    for (int64_t i = 0; i < width; i += LANES) {
        floats value = activated(load(from + i, width - i), activation);
        store(to + i, factors ? value * load(factors + i, width - i) : value, width - i);
    }
}

/* (up + 1) gate sigmoid(alpha gate) of clamped gates and ups [width]; may work in place */
inlined void activate_clamped(const float *gates, const float *ups, float *to, int64_t width, float limit,
                              float alpha) {
    for (int64_t i = 0; i < width; i += LANES) {
        floats gate = load(gates + i, width - i), up = load(ups + i, width - i);
        gate = choose(gate > limit, splat(limit), gate);
        up = choose(up > limit, splat(limit), choose(up < -limit, splat(-limit), up));
        store(to + i, (up + 1.0f) * gate * sigmoid(alpha * gate), width - i);
    }
}

/* Applies an activation to ``from`` [width], and its factors [width] unless they are NULL; CLAMPED has them. */
inlined void activate(const float *from, const float *factors, float *to, int64_t width, const Activation *by) {
    switch (by->kind) {
    case GELU_TANH: activate_as(from, factors, to, width, GELU_TANH); break;
    case QUICK_GELU: activate_as(from, factors, to, width, QUICK_GELU); break;
    case GELU: activate_as(from, factors, to, width, GELU); break;
    case CLAMPED: activate_clamped(from, factors, to, width, by->limit, by->alpha); break;
    default: activate_as(from, factors, to, width, SILU);
    }
}

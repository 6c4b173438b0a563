/* Vectors of floats, as wide as the processor has them, and their exponential. */
#pragma once
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define inlined static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

inlined int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inlined int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

inlined floats splat(float value) { return value - (floats){}; }
inlined floats choose(ints which, floats yes, floats no) { return (floats)((which & (ints)yes) | (~which & (ints)no)); }
inlined floats larger(floats a, floats b) { return choose(a > b, a, b); } /* of a NaN and another, b */

/* e^x for x <= 0, to about 2 units in the last place: 2^n e^r, where r is at most half of ln 2 and e^r a Taylor
 * series. */
inlined floats exponential(floats x) {
    x = larger(splat(-87.0f), x); /* a NaN stays one */
    ints n = __builtin_convertvector(x * 1.44269504f - 0.5f, ints); /* rounds towards zero */
    floats whole = __builtin_convertvector(n, floats);
    floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats sum = splat(1.0f / 5040);
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    return (floats)((ints)sum + (n << 23));
}

/* 1 / (1 + e^-x) */
inlined floats sigmoid(floats x) {
    floats small = exponential(choose(x > 0, -x, x));
    return choose(x > 0, splat(1.0f), small) / (1.0f + small);
}

/* The next floats of an array that has so many left; zeros after its end. */
inlined floats load(const float *from, int64_t left) {
    if (left >= LANES) return *(const floats *)from;
    floats found = {};
    memcpy(&found, from, left * sizeof(float));
    return found;
}

inlined void store(float *to, floats value, int64_t left) {
    if (left >= LANES) *(floats *)to = value;
    else memcpy(to, &value, left * sizeof(float));
}

#if LANES == 16
#define EIGHT(n) n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n
#define NEIGHBOURS(n) {EIGHT(n), EIGHT(8 ^ n)}
#else
#define NEIGHBOURS(n) {n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n}
#endif

/* Half of the lanes with the other half, then half of those, … until each has met all others. */
inlined float sum_of(floats value) {
#if LANES == 16
    value += __builtin_shuffle(value, (ints)NEIGHBOURS(8));
#endif
    value += __builtin_shuffle(value, (ints)NEIGHBOURS(4));
    value += __builtin_shuffle(value, (ints)NEIGHBOURS(2));
    value += __builtin_shuffle(value, (ints)NEIGHBOURS(1));
    return value[0];
}

inlined float largest_of(floats value) {
#if LANES == 16
    value = larger(value, __builtin_shuffle(value, (ints)NEIGHBOURS(8)));
#endif
    value = larger(value, __builtin_shuffle(value, (ints)NEIGHBOURS(4)));
    value = larger(value, __builtin_shuffle(value, (ints)NEIGHBOURS(2)));
    value = larger(value, __builtin_shuffle(value, (ints)NEIGHBOURS(1)));
    return value[0];
}

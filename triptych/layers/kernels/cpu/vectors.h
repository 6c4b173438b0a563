/* Vectors of floats, as wide as the processor supports, and functions on them; in memory they may be halves. */
#pragma once
#ifdef __x86_64__
#include <immintrin.h>
#endif
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
typedef uint16_t float16s __attribute__((vector_size(2 * LANES), aligned(2)));

inlined int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inlined int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

inlined floats splat(float value) { return value - (floats){}; }
inlined floats choose(ints which, floats yes, floats no) { return (floats)((which & (ints)yes) | (~which & (ints)no)); }

/* Which lanes are below ``count``. */
inlined ints lanes_below(int64_t count) {
    ints lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return lane < (int32_t)count;
}

/* Whether any lane is set; each has all bits or none. */
inlined int any_of(ints which) {
#if defined __AVX512F__
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#elif defined __AVX__
    return _mm256_movemask_ps((__m256)which) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < LANES; lane++) found |= which[lane];
    return found;
#endif
}

/* The larger of a and b; b if either is NaN. One instruction, which compilers don't generate for a comparison and a
 * choice. */
inlined floats larger(floats a, floats b) {
#if defined __AVX512F__
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX__
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return choose(a > b, a, b);
#endif
}

/* a * b + c, rounded once where the processor has an instruction for it, always. */
inlined floats multiply_add(floats a, floats b, floats c) {
#if defined __AVX512F__
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined __FMA__
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* e^x for x <= 0, to about 2 units in the last place: 2^n e^r, where r is at most half of ln 2 and e^r a Taylor
 * series. */
inlined floats exponential(floats x) {
    x = larger(splat(-87.0f), x); /* NaN stays NaN */
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

/* tanh(x) to about 2 units in the last place: near 0 a Taylor series, since 1 - e^-2x would cancel. */
inlined floats hyperbolic_tangent(floats x) {
    floats size = choose(x > 0, x, -x), square = x * x, small = exponential(-2.0f * size);
    floats sum = splat(62.0f / 2835);
    sum = sum * square - 17.0f / 315;
    sum = sum * square + 2.0f / 15;
    sum = sum * square - 1.0f / 3;
    floats large = (1.0f - small) / (1.0f + small);
    return choose(size < 0.25f, x + x * square * sum, choose(x > 0, large, -large));
}

/* The next floats of an array of which ``left`` remain; zeros beyond its end. */
inlined floats load(const float *from, int64_t left) {
    if (left >= LANES) return *(const floats *)from;
#if defined __AVX512F__
    return (floats)_mm512_maskz_loadu_ps((1 << left) - 1, from);
#else
    floats found = {};
    memcpy(&found, from, left * sizeof(float));
    return found;
#endif
}

inlined void store(float *to, floats value, int64_t left) {
    if (left >= LANES) *(floats *)to = value;
#if defined __AVX512F__
    else _mm512_mask_storeu_ps(to, (1 << left) - 1, (__m512)value);
#else
    else memcpy(to, &value, left * sizeof(float));
#endif
}

#define LARGEST_HALF 65504.0f

inlined floats widened(float16s value) {
#if defined __AVX512F__
    return (floats)_mm512_cvtph_ps((__m256i)value);
#elif defined __F16C__
    return (floats)_mm256_cvtph_ps((__m128i)value);
#else
    ints half = __builtin_convertvector(value, ints), bits = (half & 0x7fff) << 13;
    ints finite = (half & 0x7c00) != 0x7c00;
    floats size = choose(finite, (floats)bits * 0x1p112f, (floats)(bits | 0x7f800000));
    return (floats)((ints)size | half >> 15 << 31);
#endif
}

/* Rounds to the nearest half, ties to even. Values beyond its range become its largest; NaN stays NaN. */
inlined float16s narrowed(floats value) {
    value = choose(value > LARGEST_HALF, splat(LARGEST_HALF), value);
    value = choose(value < -LARGEST_HALF, splat(-LARGEST_HALF), value);
#if defined __AVX512F__
    return (float16s)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined __F16C__
    return (float16s)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    ints size = (ints)value & 0x7fffffff, sign = (ints)value >> 16 & 0x8000;
    ints normal = (size - (112 << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    ints small = (ints)((floats)size + 0.5f) - 0x3f000000; /* 0.5's last place is a half's smallest number */
    ints is_small = size < 113 << 23, is_nan = size > 0x7f800000;
    ints half = (is_small & small) | (~is_small & normal) | (is_nan & 0x7e00);
    return __builtin_convertvector(half | sign, float16s);
#endif
}

/* As ``load`` and ``store``, for an array of halves. */
inlined floats load_half(const uint16_t *from, int64_t left) {
    if (left >= LANES) return widened(*(const float16s *)from);
    float16s found = {};
    memcpy(&found, from, left * sizeof(uint16_t));
    return widened(found);
}

inlined void store_half(uint16_t *to, floats value, int64_t left) {
    float16s half = narrowed(value);
    if (left >= LANES) *(float16s *)to = half;
    else memcpy(to, &half, left * sizeof(uint16_t));
}

/* Loads from the element ``place`` on, from an array of halves or of floats. */
inlined floats load_any(const void *from, int64_t place, int64_t left, const int is_half) {
    return is_half ? load_half((const uint16_t *)from + place, left) : load((const float *)from + place, left);
}

#define EIGHT(n) n, 1 ^ n, 2 ^ n, 3 ^ n, 4 ^ n, 5 ^ n, 6 ^ n, 7 ^ n
#if LANES == 16
#define NEIGHBOURS(n) {EIGHT(n), EIGHT(8 ^ n)}
#else
#define NEIGHBOURS(n) {EIGHT(n)}
#endif

/* Adds one half of the lanes to the other, then halves of those, … until each lane has the sum of all. */
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

/* The largest magnitude of ``count`` floats, at least ``smallest``; NaN if one of them isn't finite. */
inlined float largest_magnitude(const float *from, int64_t count, float smallest) {
    floats highest = splat(smallest), strange = {};
    for (int64_t i = 0; i < count; i += LANES) {
        floats x = load(from + i, count - i);
        highest = larger(choose(x > 0, x, -x), highest);
        strange += x * 0.0f; /* NaN if x is NaN or infinite */
    }
    return largest_of(highest) + sum_of(strange);
}

/* Transposes rows[i][j] in place: swaps two quarters of the square, then two of each quarter, … */
inlined void transpose(floats *rows) {
#pragma GCC unroll 4
    for (int far = LANES / 2; far; far /= 2) {
        /* source lanes of the first row, numbered through both rows */
        ints lane = NEIGHBOURS(0), first = lane + (((lane & far) != 0) & (LANES - far));
#pragma GCC unroll 16
        for (int row = 0; row < LANES; row++) {
            if (row & far) continue;
            floats low = rows[row], high = rows[row + far];
            rows[row] = __builtin_shuffle(low, high, first);
            rows[row + far] = __builtin_shuffle(low, high, first + far);
        }
    }
}

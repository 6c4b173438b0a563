/* The paged KV cache: where a token's heads are, and how one head's key, or value, is stored: as floats, as halves, or as
 * int8 with a scale. In int8 the values are divided by their scale, the largest magnitude / 127, and rounded; the scale
 * follows them. So a head is one run of bytes, and a token of all heads, too. ``layers/attention/kv_format.py`` does the
 * same, to the bit. */
#pragma once
#include "attention.h"
#include "vectors.h"

enum { KV_FLOAT, KV_HALF, KV_INT8 };

/* Calls a function with the cache's format as its last argument, a constant in each call. */
#define IN_FORMAT(function, ...) \
    switch (step->format) { \
    case KV_FLOAT: function(__VA_ARGS__, KV_FLOAT); break; \
    case KV_HALF: function(__VA_ARGS__, KV_HALF); break; \
    default: function(__VA_ARGS__, KV_INT8); \
    }

#define LINE 64 /* bytes of a cache line */
#define LARGEST_INT8 127.0f
#define SMALLEST_MAXIMUM 1e-30f /* 127 divided by it is finite */

typedef int8_t int8s __attribute__((vector_size(LANES), aligned(1)));

inlined int64_t head_bytes(int64_t dim, const int format) {
    if (format == KV_INT8) return dim + (int64_t)sizeof(float);
    return dim * (int64_t)(format == KV_HALF ? sizeof(uint16_t) : sizeof(float));
}

/* Bytes from a token's keys or values to the head that a group of query heads reads. */
inlined int64_t head_of(int64_t group, const Step *step) {
    return group / (step->groups / step->kv_heads) * head_bytes(step->dim, step->format);
}

/* Where a key, or its value, is: bytes from the cache's start. */
inlined int64_t row_of(const int64_t *pages, int64_t key, const Step *step) {
    uint32_t at = key, page_size = step->page_size; /* fewer bits are divided faster */
    return (pages[at / page_size] * page_size + at % page_size) * step->cache_stride;
}

/* The next values of a head from ``place`` on, of which ``left`` remain; they are to be multiplied by its scale. */
inlined floats load_stored(const char *head, int64_t place, int64_t left, const int format) {
    if (format != KV_INT8) return load_any(head, place, left, format == KV_HALF);
    int8s found = {};
    if (left >= LANES) found = *(const int8s *)(head + place);
    else memcpy(&found, head + place, left);
#if defined __AVX512F__
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)found));
#elif defined __AVX2__
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)&found)));
#else
    return __builtin_convertvector(__builtin_convertvector(found, ints), floats);
#endif
}

inlined float stored_scale(const char *head, int64_t dim, const int format) {
    if (format != KV_INT8) return 1;
    float scale;
    memcpy(&scale, head + dim, sizeof scale);
    return scale;
}

/* Rounds to the nearest whole number, ties to even. The processor's own instruction: adding and subtracting a large
 * number could be fused with what comes before, and the result would depend on the processor. */
inlined ints nearest(floats value) {
#if defined __AVX512F__
    return (ints)_mm512_cvtps_epi32((__m512)value);
#elif defined __AVX__
    return (ints)_mm256_cvtps_epi32((__m256)value);
#else
    for (int lane = 0; lane < LANES; lane++) value[lane] = __builtin_rintf(value[lane]);
    return __builtin_convertvector(value, ints);
#endif
}

/* A head with a value that isn't finite has zeros, and NaN as its scale. */
inlined void store_int8(char *head, const float *from, int64_t dim) {
    float maximum = largest_magnitude(from, dim, SMALLEST_MAXIMUM);
    int finite = maximum == maximum;
    /* one NaN of many, so that heads are the same to the bit */
    float scale = finite ? maximum / LARGEST_INT8 : __builtin_nanf(""), factor = LARGEST_INT8 / maximum;
    for (int64_t i = 0; i < dim; i += LANES) {
        ints whole = finite ? nearest(load(from + i, dim - i) * factor) : (ints){};
        int8s low = __builtin_convertvector(whole, int8s);
        memcpy(head + i, &low, least(LANES, dim - i));
    }
    memcpy(head + dim, &scale, sizeof scale);
}

inlined void store_head(char *head, const float *from, int64_t dim, const int format) {
    if (format == KV_INT8) store_int8(head, from, dim);
    else if (format == KV_FLOAT) memcpy(head, from, dim * sizeof(float));
    else for (int64_t i = 0; i < dim; i += LANES)
        store_half((uint16_t *)head + i, load(from + i, dim - i), dim - i);
}

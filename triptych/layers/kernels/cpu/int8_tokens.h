/* What products with quantized weights share: tokens are quantized to int8, each with its own scale or, beside
 * weights in 4 bits, with one for each block of inputs, and instructions multiply their bytes by those of weights. */
#pragma once
#include "panels.h"

#define LEVELS 127.0f /* steps of either sign */

typedef int8_t int8s __attribute__((vector_size(LANES), aligned(1)));

/* A token's inputs from ``i`` on, zeros beyond its end, rounded and added to ROUNDING. ``factor``: LEVELS, or
 * COARSE_LEVELS, divided by the token's largest magnitude. */
inlined floats rounded_inputs(const float *from, int64_t i, int64_t inputs, float factor) {
    return (i < inputs ? load(from + i, inputs - i) : (floats){}) * factor + ROUNDING;
}

/* Multiplies each block of ROTATED inputs by a Hadamard matrix divided by its root: a rotation that is its own inverse. An
 * input that is much larger than others becomes a part of all of its block, so that one scale suits more inputs. Writes
 * ``whole_blocks`` of them, which may be in the same place. The order of sums is the same for vectors of any width. */
inlined void rotate(const float *from, float *to, int64_t inputs) {
    for (int64_t i = 0; i < inputs; i += ROTATED) {
        floats block[ROTATED / LANES];
#pragma GCC unroll 8
        for (int part = 0; part < ROTATED / LANES; part++) {
            int64_t left = inputs - i - part * LANES;
            block[part] = left > 0 ? load(from + i + part * LANES, left) : (floats){};
        }
#define STEP(far) \
    do { \
        const ints lane = NEIGHBOURS(0); \
        const floats sign = choose((lane & (far)) != 0, splat(-1.0f), splat(1.0f)); \
        _Pragma("GCC unroll 8") \
        for (int part = 0; part < ROTATED / LANES; part++) \
            block[part] = __builtin_shuffle(block[part], (ints)NEIGHBOURS(far)) + block[part] * sign; \
    } while (0)
        STEP(1);
        STEP(2);
        STEP(4);
#if LANES == 16
        STEP(8);
#endif
#undef STEP
#pragma GCC unroll 3
        for (int far = 1; far < ROTATED / LANES; far *= 2)
#pragma GCC unroll 8
            for (int part = 0; part < ROTATED / LANES; part++) {
                if (part & far) continue;
                floats low = block[part], high = block[part + far];
                block[part] = low + high;
                block[part + far] = low - high;
            }
#pragma GCC unroll 8
        for (int part = 0; part < ROTATED / LANES; part++) store(to + i + part * LANES, block[part] * 0.125f, LANES);
    }
}

/* The lowest byte of each lane. Compilers convert vectors to bytes one lane at a time. */
inlined int8s lowest(ints value) {
#if defined __AVX512F__
    return (int8s)_mm512_cvtepi32_epi8((__m512i)value);
#else
    typedef int8_t bytes __attribute__((vector_size(4 * LANES)));
    bytes all = __builtin_shuffle((bytes)value, (bytes){0, 4, 8, 12, 16, 20, 24, 28});
    int8s found;
    memcpy(&found, &all, LANES);
    return found;
#endif
}

/* In each lane: sum + the dot product of four unsigned and four signed bytes. */
#if defined __AVX512VNNI__
#define HAS_VNNI 1
inlined ints add_products(ints sum, ints weights, ints four) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)four);
}
#elif defined __AVXVNNI__ && !defined __AVX512F__
#define HAS_VNNI 1
inlined ints add_products(ints sum, ints weights, ints four) {
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)four);
}
#else
#define HAS_VNNI 0
#endif

/* Without VNNI. ``products_of_bytes``: in each half of a lane, the sum of two products of unsigned and signed bytes, which
 * must fit 16 bits. ``sums_of_pairs``: in each lane, the sum of its halves. */
#if defined __AVX512BW__
#define HAS_PAIRS (!HAS_VNNI)
inlined ints products_of_bytes(ints weights, ints four) {
    return (ints)_mm512_maddubs_epi16((__m512i)weights, (__m512i)four);
}
inlined ints sums_of_pairs(ints pairs) { return (ints)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1)); }
#elif defined __AVX2__ && !defined __AVX512F__
#define HAS_PAIRS (!HAS_VNNI)
inlined ints products_of_bytes(ints weights, ints four) {
    return (ints)_mm256_maddubs_epi16((__m256i)weights, (__m256i)four);
}
inlined ints sums_of_pairs(ints pairs) { return (ints)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1)); }
#else
#define HAS_PAIRS 0
#endif

/* Steps of coarse tokens: with int8 weights, the products of any two then fit 16 bits. */
#define COARSE_LEVELS (HAS_PAIRS ? 63.0f : LEVELS)

/* Rounding to bfloat16. Apart from vectors.h, because files without it are the same in variants with AVX512-BF16. */
#pragma once
#include "vectors.h"

/* Rounds to the nearest bfloat16, ties to even, as AVX512-BF16 does: what is smaller than a normal number becomes zero. */
inlined floats rounded_bf16(floats value) {
#ifdef __AVX512BF16__
    __m256i bits = (__m256i)_mm512_cvtneps_pbh((__m512)value);
    return (floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16);
#else
    ints bits = (ints)value, size = bits & 0x7fffffff;
    ints nearest = (bits + 0x7fff + (bits >> 16 & 1)) & (int32_t)0xffff0000;
    ints zero = size < 0x00800000, nan = size > 0x7f800000;
    return (floats)((zero & (bits ^ size)) | (nan & (bits | 0x400000)) | (~zero & ~nan & nearest));
#endif
}

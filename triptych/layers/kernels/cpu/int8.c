/* Products with int8 weights: each token is quantized to int8 with its own scale. Sums in int32 are exact, so that a
 * token's outputs are identical in any batch.
 *
 * Weights are in panels of OUTPUTS outputs with groups of four inputs,
 * [ceil(outputs / OUTPUTS), ceil(inputs / 4), OUTPUTS, 4], padded with zeros. A panel's weights for four inputs are
 * loaded once for up to TOKENS tokens, whose sums stay in registers from the first input to the last.
 */
#include "products.h"
#include "vectors.h"

#ifdef __AVX512VNNI__
#define SUMS 16  /* int32 sums per vector */
#define TOKENS 8 /* 4 or 8: see int8_together */
#else
#define SUMS 8
#define TOKENS 4
#endif
#define OUTPUTS (2 * SUMS)
#define AHEAD 4096           /* prefetch distance in bytes of weights: hardware prefetchers stop at the end of a page */
#define LINE 64              /* padding between rows in bytes, so that equal columns don't share a set of the L1 cache */

typedef int32_t sums __attribute__((vector_size(4 * SUMS), aligned(4)));
typedef int16_t halves __attribute__((vector_size(4 * SUMS), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));

/* In each lane: sum + the dot product of four weights and four activations. UNSIGNED is the offset added to the weights,
 * because VNNI multiplies unsigned by signed values. Without VNNI two products are added in 16 bits, which hold
 * 2 * 127 * 127. */
#if defined __AVX512VNNI__
#define UNSIGNED 128
inlined sums dot(sums sum, sums weights, sums four) {
    return (sums)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)four);
}
#elif defined __AVXVNNI__
#define UNSIGNED 128
inlined sums dot(sums sum, sums weights, sums four) {
    return (sums)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)four);
}
#elif defined __AVX2__
#define UNSIGNED 0
inlined sums dot(sums sum, sums weights, sums four) {
    __m256i signs = _mm256_sign_epi8((__m256i)four, (__m256i)weights), sizes = _mm256_abs_epi8((__m256i)weights);
    return sum + (sums)_mm256_madd_epi16(_mm256_maddubs_epi16(sizes, signs), _mm256_set1_epi16(1));
}
#else
#define UNSIGNED 0
inlined sums dot(sums sum, sums weights, sums four) {
    halves pairs = ((halves)weights << 8 >> 8) * ((halves)four << 8 >> 8) + ((halves)weights >> 8) * ((halves)four >> 8);
    return sum + ((sums)pairs << 16 >> 16) + ((sums)pairs >> 16);
}
#endif

/* Inputs and outputs of T tokens, and the quantized inputs. */
typedef struct {
    const float *input;
    float *output;
    int8_t *rounded;      /* [T + TOKENS, stride], of which the first ``depth`` columns are used */
    float *scales;        /* [T] */
    int32_t *starts;      /* [T]: initial values of the sums, which cancel the weights' offset */
    int64_t tokens, input_stride, depth, stride;
} Rows;

const int int8_outputs = OUTPUTS, int8_multiple = INPUT_BYTES;

inlined void round_row(const Rows *rows, int64_t inputs, int64_t token) {
    const float *from = rows->input + token * rows->input_stride;
    int8_t *to = rows->rounded + token * rows->stride;
    floats highest = splat(SMALLEST), strange = {}, total = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats x = load(from + i, inputs - i);
        highest = larger(choose(x > 0, x, -x), highest);
        strange += x * 0.0f; /* NaN if x is NaN or infinite */
    }
    float maximum = largest_of(highest), factor = 127.0f / maximum;
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats whole = load(from + i, inputs - i) * factor + ROUNDING;
        bytes low = __builtin_convertvector((ints)whole, bytes);
        total += whole - ROUNDING;
        memcpy(to + i, &low, LANES);
    }
    for (int64_t i = (inputs + LANES - 1) / LANES * LANES; i < rows->depth; i++) to[i] = 0;
    float odd = sum_of(strange);
    rows->scales[token] = maximum / 127.0f + odd;
    rows->starts[token] = odd == 0 ? -UNSIGNED * (int32_t)sum_of(total) : 0;
}

/* Computes a panel's outputs for ``count`` tokens from ``first`` on. Results of tokens that don't exist are dropped. */
inlined void multiply(const Linear *linear, const Rows *rows, int64_t panel, int64_t first, const int count) {
    /* a panel that is used several times leaves time to prefetch the whole next one */
    int64_t size = OUTPUTS * rows->depth, ahead = rows->tokens > TOKENS ? size : AHEAD;
    const int8_t *weights = (const int8_t *)linear->panels + panel * size, *from = rows->rounded + first * rows->stride;
    sums found[TOKENS][2];
    for (int token = 0; token < count; token++) found[token][0] = found[token][1] = (sums){};
    for (int64_t input = 0; input < rows->depth; input += 4, weights += 4 * OUTPUTS) {
        sums low = ((const sums *)weights)[0], high = ((const sums *)weights)[1];
        if (UNSIGNED) {
            low ^= (int32_t)0x80808080;
            high ^= (int32_t)0x80808080;
        }
        for (int64_t line = 0; line < 4 * OUTPUTS; line += 64) __builtin_prefetch(weights + ahead + line);
#pragma GCC unroll 8
        for (int token = 0; token < count; token++) {
            int32_t four;
            memcpy(&four, from + token * rows->stride + input, sizeof four);
            found[token][0] = dot(found[token][0], low, four - (sums){});
            found[token][1] = dot(found[token][1], high, four - (sums){});
        }
    }
    int64_t output = panel * OUTPUTS, outputs = least(OUTPUTS, linear->outputs - output);
    const float *scales = linear->scales + output, *bias = linear->bias ? linear->bias + output : NULL;
    for (int64_t token = 0; token < least(count, rows->tokens - first); token++) {
        const int32_t *sum = (const int32_t *)found[token];
        int32_t start = rows->starts[first + token];
        float scale = rows->scales[first + token], *to = rows->output + (first + token) * linear->outputs + output;
        for (int64_t i = 0; i < outputs; i++) to[i] = (float)(sum[i] + start) * scale * scales[i] + (bias ? bias[i] : 0);
    }
}

static int64_t depth_of(const Linear *linear) {
    return (linear->inputs + INPUT_BYTES - 1) / INPUT_BYTES * INPUT_BYTES;
}

int64_t int8_room(const Linear *linear, int64_t tokens) {
    return tokens * (sizeof(float) + sizeof(int32_t)) + (tokens + TOKENS) * (depth_of(linear) + LINE);
}

void int8_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens, void *room) {
    int64_t depth = depth_of(linear), panels = (linear->outputs + OUTPUTS - 1) / OUTPUTS;
    float *scales = room;
    int32_t *starts = (int32_t *)(scales + tokens);
    Rows rows = {input, output, (int8_t *)(starts + tokens), scales, starts, tokens, stride, depth, depth + LINE};
#pragma omp for
    for (int64_t token = 0; token < tokens; token++) round_row(&rows, linear->inputs, token);
#pragma omp for
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t first = 0, left; (left = tokens - first) > 0; first += TOKENS) {
            if (left > 4) multiply(linear, &rows, panel, first, TOKENS);
            else if (left > 2) multiply(linear, &rows, panel, first, 4);
            else if (left > 1) multiply(linear, &rows, panel, first, 2);
            else multiply(linear, &rows, panel, first, 1);
        }
}

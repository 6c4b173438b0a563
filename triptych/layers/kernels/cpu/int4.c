/* Products with 4-bit weights: each token is quantized to int8 with its own scale. Sums over a group of inputs are exact
 * in int32. They are multiplied by the group's scale and added in float32 in the groups' order, so that a token's outputs
 * are identical in any batch.
 *
 * A weight is (q - zero) * scale, where q is 0 to 15 and a group of ``group`` inputs, a multiple of 32, shares zero and
 * scale. Weights are in panels of OUTPUTS outputs, [ceil(outputs / OUTPUTS), ceil(inputs / group)] of
 *     words [group / 8, OUTPUTS], each with the q of eight inputs, the first in the lowest bits,
 *     scales, halves [OUTPUTS],
 *     zeros, uint8 [OUTPUTS], if the weights have them; otherwise each is 8.
 * A word's q are unpacked in registers for up to TOKENS tokens, which takes less time than unpacking a panel into the
 * cache for all.
 */
#include <omp.h>

#include "products.h"
#include "vectors.h"

#if defined __AVX512F__
#define TOKENS 8             /* 4 or 8: see multiply_panel */
#else
#define TOKENS 4
#endif
#define OUTPUTS (2 * LANES)
#define MANY (16 * LANES)    /* tokens multiplied by all weights before the next ones: few enough to stay in the cache */
#define FEW 4                /* tokens that each thread rounds itself, which takes less time than waiting for others */
#define BLOCK 32             /* inputs whose products fit 16 bits: 32 / 2 * 15 * 128 < 2^15 */
#define WORD 8               /* inputs per word */
#define AHEAD 4096           /* prefetch distance in bytes of weights: hardware prefetchers stop at the end of a page */
#define AT_ONCE (64 * 1024)  /* bytes of weights per task when there are few tokens */
#define LINE 64              /* padding between rows in bytes, so that equal columns don't share a set of the L1 cache */

typedef int16_t halves __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t levels __attribute__((vector_size(LANES), aligned(1)));

/* Products of bytes, four per lane of 32 bits: VNNI adds them to an int32, others to two int16, for one block. ``dot``
 * adds those of four weights, 0 to 15, and four activations. */
#if defined __AVX512VNNI__ || (defined __AVXVNNI__ && !defined __AVX512F__)
typedef ints products;
inlined products begin(ints sum) { return sum; }
inlined ints end(ints sum, products block) { return block; }
#else
typedef halves products;
inlined products begin(ints sum) { return (products){}; }
inlined ints end(ints sum, products block) { return sum + ((ints)block << 16 >> 16) + ((ints)block >> 16); }
#endif
#if defined __AVX512VNNI__
inlined products dot(products sum, ints weights, ints four) {
    return (products)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, (__m512i)four);
}
#elif defined __AVXVNNI__ && !defined __AVX512F__
inlined products dot(products sum, ints weights, ints four) {
    return (products)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weights, (__m256i)four);
}
#elif defined __AVX512BW__
inlined products dot(products sum, ints weights, ints four) {
    return sum + (products)_mm512_maddubs_epi16((__m512i)weights, (__m512i)four);
}
#elif defined __AVX2__ && !defined __AVX512F__
inlined products dot(products sum, ints weights, ints four) {
    return sum + (products)_mm256_maddubs_epi16((__m256i)weights, (__m256i)four);
}
#else
inlined products dot(products sum, ints weights, ints four) {
    return sum + ((products)weights & 0xff) * ((products)four << 8 >> 8) + ((products)weights >> 8) * ((products)four >> 8);
}
#endif

/* a * b, where a is in 0 to 255 and b fits 16 bits. */
inlined ints times(ints a, ints b) {
#if defined __AVX512BW__
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined __AVX2__ && !defined __AVX512F__
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return a * b;
#endif
}

/* Dimensions of packed weights. */
typedef struct {
    int64_t panels, groups, depth; /* depth: inputs with padding */
    int64_t bytes;                 /* of a group of a panel */
    int64_t row;                   /* bytes of a rounded token */
} Shape;

/* A rounded token: int8 [depth], int32 [groups] and its scale. The inputs of each word are in the order 0 2 4 6 1 3 5 7,
 * first those in the lower halves of its bytes. The int32 are what the sums of q * input exceed those of the weights by
 * for each unit of zero or, without zeros, in total: to be added, so negative. */
typedef struct {
    char *rounded;
    float *output;
    int64_t tokens;
} Rows;

const int int4_outputs = OUTPUTS;

inlined Shape shape_of(const Linear *linear) {
    Shape shape;
    shape.panels = (linear->outputs + OUTPUTS - 1) / OUTPUTS;
    shape.groups = (linear->inputs + linear->group - 1) / linear->group;
    shape.depth = shape.groups * linear->group;
    shape.bytes = OUTPUTS * (linear->group / 2 + sizeof(uint16_t) + (linear->has_zeros ? 1 : 0));
    shape.row = (shape.depth + (shape.groups + 1) * 4 + LINE - 1) / LINE * LINE + LINE;
    return shape;
}

int64_t int4_room(const Linear *linear, int64_t tokens) {
    return shape_of(linear).row * (tokens <= FEW ? FEW * omp_get_max_threads() : tokens + TOKENS);
}

static void round_token(const Linear *linear, const Shape *shape, const float *from, char *to) {
    int64_t inputs = linear->inputs, group = linear->group;
    int32_t *excess = (int32_t *)(to + shape->depth);
    floats highest = splat(SMALLEST), strange = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats x = load(from + i, inputs - i);
        highest = larger(choose(x > 0, x, -x), highest);
        strange += x * 0.0f; /* NaN if x is NaN or infinite */
    }
    float maximum = largest_of(highest), factor = 127.0f / maximum, odd = sum_of(strange);
    for (int64_t at = 0; at < shape->depth; at += group, excess++) {
        floats total = {};
        for (int64_t i = at; i < at + group; i += LANES) {
            floats whole = (i < inputs ? load(from + i, inputs - i) : (floats){}) * factor + ROUNDING;
            bytes low = __builtin_convertvector((ints)whole, bytes);
#if LANES == 16
            low = __builtin_shuffle(low, (bytes){0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15});
#else
            low = __builtin_shuffle(low, (bytes){0, 2, 4, 6, 1, 3, 5, 7});
#endif
            *(bytes *)(to + i) = low;
            total += whole - ROUNDING;
        }
        *excess = odd == 0 ? (linear->has_zeros ? -1 : -8) * (int32_t)sum_of(total) : 0;
    }
    *(float *)excess = maximum / 127.0f + odd;
}

/* The two halves of each byte of a panel's words: q of inputs 0 2 4 6, and of 1 3 5 7. */
inlined ints lower(ints words) { return words & 0x0f0f0f0f; }
inlined ints upper(ints words) { return words >> 4 & 0x0f0f0f0f; }

/* Adds the products of a block of inputs to the sums of ``count`` tokens. */
inlined void multiply_block(ints sums[][2], const char *weights, const char *from, int64_t row, const int count) {
    products found[TOKENS][2];
    for (int token = 0; token < count; token++)
        for (int half = 0; half < 2; half++) found[token][half] = begin(sums[token][half]);
#pragma GCC unroll 4
    for (int word = 0; word < BLOCK / WORD; word++, weights += WORD / 2 * OUTPUTS) {
        const ints *words = (const ints *)weights;
        for (int64_t line = 0; line < WORD / 2 * OUTPUTS; line += 64) __builtin_prefetch(weights + AHEAD + line);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            ints low = part ? upper(words[0]) : lower(words[0]), high = part ? upper(words[1]) : lower(words[1]);
#pragma GCC unroll 8
            for (int token = 0; token < count; token++) {
                int32_t four;
                memcpy(&four, from + token * row + word * WORD + part * 4, sizeof four);
                found[token][0] = dot(found[token][0], low, four - (ints){});
                found[token][1] = dot(found[token][1], high, four - (ints){});
            }
        }
    }
    for (int token = 0; token < count; token++)
        for (int half = 0; half < 2; half++) sums[token][half] = end(sums[token][half], found[token][half]);
}

/* Computes a panel's outputs for ``count`` tokens from ``first`` on. Results of tokens that don't exist are dropped. */
inlined void multiply(const Linear *linear, const Shape *shape, const Rows *rows, int64_t panel, int64_t first,
                      const int count, const int has_zeros) {
    const char *group = (const char *)linear->panels + panel * shape->groups * shape->bytes;
    const char *from = rows->rounded + first * shape->row, *excess = from + shape->depth;
    floats totals[TOKENS][2] = {};
    for (int64_t i = 0; i < shape->groups; i++, group += shape->bytes) {
        const char *scales = group + linear->group / 2 * OUTPUTS, *words = group;
        ints zeros[2], sums[TOKENS][2];
        if (has_zeros)
            for (int half = 0; half < 2; half++) {
                levels level = ((const levels *)(scales + OUTPUTS * sizeof(uint16_t)))[half];
                zeros[half] = __builtin_convertvector(level, ints);
            }
        for (int token = 0; token < count; token++) {
            ints start = ((const int32_t *)(excess + token * shape->row))[i] - (ints){};
            sums[token][0] = has_zeros ? times(zeros[0], start) : start;
            sums[token][1] = has_zeros ? times(zeros[1], start) : start;
        }
        for (; words < scales; words += BLOCK / 2 * OUTPUTS, from += BLOCK)
            multiply_block(sums, words, from, shape->row, count);
        floats low = widened(((const float16s *)scales)[0]), high = widened(((const float16s *)scales)[1]);
        for (int token = 0; token < count; token++) {
            totals[token][0] += __builtin_convertvector(sums[token][0], floats) * low;
            totals[token][1] += __builtin_convertvector(sums[token][1], floats) * high;
        }
    }
    int64_t output = panel * OUTPUTS, outputs = least(OUTPUTS, linear->outputs - output);
    const float *bias = linear->bias ? linear->bias + output : NULL;
    for (int64_t token = 0; token < least(count, rows->tokens - first); token++) {
        const float *total = (const float *)totals[token];
        float scale = ((const float *)(excess + token * shape->row))[shape->groups];
        float *to = rows->output + (first + token) * linear->outputs + output;
        for (int64_t i = 0; i < outputs; i++) to[i] = total[i] * scale + (bias ? bias[i] : 0);
    }
}

/* Computes a panel's outputs for all tokens. */
inlined void multiply_panel(const Linear *linear, const Shape *shape, const Rows *rows, int64_t panel,
                            const int has_zeros) {
    for (int64_t first = 0, left; (left = rows->tokens - first) > 0; first += TOKENS) {
        if (left > 4) multiply(linear, shape, rows, panel, first, TOKENS, has_zeros);
        else if (left > 2) multiply(linear, shape, rows, panel, first, 4, has_zeros);
        else if (left > 1) multiply(linear, shape, rows, panel, first, 2, has_zeros);
        else multiply(linear, shape, rows, panel, first, 1, has_zeros);
    }
}

void int4_together(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens, void *room) {
    Shape shape = shape_of(linear);
    int64_t blocks = (tokens + MANY - 1) / MANY;
    int64_t at_once = tokens > TOKENS ? 1 : most(1, AT_ONCE / most(1, shape.groups * shape.bytes));
    char *rounded = (char *)room + (tokens <= FEW ? omp_get_thread_num() * FEW * shape.row : 0);
    if (tokens <= FEW) {
        for (int64_t token = 0; token < tokens; token++)
            round_token(linear, &shape, input + token * stride, rounded + token * shape.row);
    } else {
#pragma omp for
        for (int64_t token = 0; token < tokens; token++)
            round_token(linear, &shape, input + token * stride, rounded + token * shape.row);
    }
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = tokens * block / blocks;
        Rows rows = {rounded + first * shape.row, output + first * linear->outputs,
                     tokens * (block + 1) / blocks - first};
        /* dynamic, because the machine has other work: a slow core takes fewer panels, and none waits before the end */
#pragma omp for schedule(dynamic, at_once) nowait
        for (int64_t panel = 0; panel < shape.panels; panel++) {
            if (linear->has_zeros) multiply_panel(linear, &shape, &rows, panel, 1);
            else multiply_panel(linear, &shape, &rows, panel, 0);
        }
    }
#pragma omp barrier
}

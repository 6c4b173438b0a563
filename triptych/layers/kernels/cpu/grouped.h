/* What products with weights in groups share, which are q * scale with or without an offset: words of q, how tokens are
 * rounded, products of bytes, and how scaled sums are added and stored. */
#pragma once
#include "int8_tokens.h"

#undef FOURS
#undef TWOS
#define FOURS 0          /* no faster than two */
#define TWOS (LANES / 8) /* totals take registers, too */
#define WORD 8           /* inputs per word */
/* of a word's inputs, or two words': first those in the lower halves of its bytes */
#if LANES == 16
#define WORD_ORDER {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15}
#else
#define WORD_ORDER {0, 2, 4, 6, 1, 3, 5, 7}
#endif

typedef int16_t halves __attribute__((vector_size(4 * LANES), aligned(4)));

/* What a rounded token has of a block: its inputs' scale, their sum as they are rounded, and sums of its halves' rounded
 * inputs. */
typedef struct {
    float scale, sum;
    int32_t halves[2];
} Block;

/* Bytes of a rounded token with padding: int8 [depth], and blocks of ``size`` inputs from the next whole line on. */
inlined int64_t rounded_bytes(int64_t depth, int64_t size) {
    return whole_lines(depth) + whole_lines(depth / size * sizeof(Block)) + LINE;
}

/* Where bytes are whose parts of INPUT_BYTES are ``step`` bytes apart. */
inlined int64_t place_in_tiles(int64_t at, int64_t step) { return at / INPUT_BYTES * step + at % INPUT_BYTES; }

/* Rounds a token in blocks of ``size`` inputs, 32 or 64. The inputs of each word are in WORD_ORDER. */
inlined void round_blocks(const float *from, int64_t inputs, int64_t depth, int64_t size, char *to, int64_t step) {
    char *blocks = to + whole_lines(depth) / INPUT_BYTES * step;
    for (int64_t at = 0, place = 0; at < depth; at += size, place += sizeof(Block)) {
        Block *block = (Block *)(blocks + place_in_tiles(place, step));
        float maximum = largest_magnitude(from + at, least(size, inputs - at), SMALLEST);
        int8_t *rounded = (int8_t *)to + place_in_tiles(at, step);
        floats total[2] = {};
        for (int64_t i = 0; i < size; i += LANES) {
            floats whole = rounded_inputs(from, at + i, inputs, LEVELS / maximum);
            *(int8s *)(rounded + i) = __builtin_shuffle(lowest((ints)whole), (int8s)WORD_ORDER);
            total[i >= size / 2] += whole - ROUNDING;
        }
        for (int half = 0; half < 2; half++) block->halves[half] = maximum == maximum ? (int32_t)sum_of(total[half]) : 0;
        block->scale = maximum / LEVELS;
        block->sum = block->scale * (float)(block->halves[0] + block->halves[1]);
    }
}

/* Products of bytes, four per lane of 32 bits: VNNI adds them to an int32, others to two int16, for one strip. ``dot``
 * adds those of four weights, 0 to 15, and four activations. */
#if HAS_VNNI
typedef ints products;
inlined products begin(ints sum) { return sum; }
inlined ints end(ints sum, products strip) { return strip; }
#else
typedef halves products;
inlined products begin(ints sum) { return (products){}; }
#endif
#if HAS_VNNI
inlined products dot(products sum, ints weights, ints four) { return add_products(sum, weights, four); }
#elif HAS_PAIRS
inlined products dot(products sum, ints weights, ints four) {
    sum += (products)products_of_bytes(weights, four);
    __asm__("" : "+v"(sum)); /* or GCC changes the order of a strip's additions, for which it stores all products */
    return sum;
}
inlined ints end(ints sum, products strip) { return sum + sums_of_pairs((ints)strip); }
#else
inlined products dot(products sum, ints weights, ints four) {
    return sum + ((products)weights & 0xff) * ((products)four << 8 >> 8) + ((products)weights >> 8) * ((products)four >> 8);
}
inlined ints end(ints sum, products strip) { return sum + ((ints)strip << 16 >> 16) + ((ints)strip >> 16); }
#endif

/* Adds the bias to the totals of ``count`` tokens from ``first`` on and stores them as a panel's outputs. A ``Keep`` of
 * tiles. */
static __attribute__((noinline)) void keep_totals(const void *sums, const void *factors, const Linear *linear,
                                                  const Rows *rows, int64_t panel, int64_t first, int64_t count) {
    const floats (*totals)[2] = sums;
    int64_t column = panel * OUTPUTS, left = linear->outputs - column, second = most(0, left - LANES);
    int64_t place = first * linear->outputs + column;
    floats bias[2] = {};
    if (linear->bias) bias[0] = load(linear->bias + column, left);
    if (linear->bias && second) bias[1] = load(linear->bias + column + LANES, second);
    for (int64_t i = 0; i < count; i++, place += linear->outputs) {
        keep_vector(totals[i][0] + bias[0], &rows->output, place, left);
        if (second) keep_vector(totals[i][1] + bias[1], &rows->output, place + LANES, second);
    }
}

/* The two halves of each byte of a panel's words: q of inputs 0 2 4 6, and of 1 3 5 7. */
inlined ints lower(ints words) { return words & 0x0f0f0f0f; }
inlined ints upper(ints words) { return words >> 4 & 0x0f0f0f0f; }

/* Adds a block's sums, scaled; ``input``: the scale of its inputs. Explicitly fused: what a compiler fuses may differ
 * between bodies. */
inlined floats add_scaled(floats total, ints sum, floats scale, float input) {
    return multiply_add(__builtin_convertvector(sum, floats) * input, scale, total);
}

/* Adds a block's offsets; ``input``: the sum of its inputs. */
inlined floats add_offsets(floats total, floats offsets, float input) {
    return multiply_add(offsets, splat(input), total);
}

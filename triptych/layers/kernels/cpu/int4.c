/* Products with 4-bit weights: each token is quantized to int8 with its own scale. Sums over a group of inputs are exact
 * in int32. They are multiplied by the group's scale and added in float32 in the groups' order, so that a token's outputs
 * are identical in any batch.
 *
 * A weight is (q - zero) * scale, where q is 0 to 15 and a group of ``group`` inputs, 32, 64 or 128, shares zero and
 * scale. Weights are in panels of OUTPUTS outputs, [ceil(outputs / OUTPUTS), ceil(inputs / group)] of
 *     words [group / 8, OUTPUTS], each with the q of eight inputs, the first in the lowest bits,
 *     scales, halves [OUTPUTS],
 *     zeros, uint8 [OUTPUTS], if the weights have them; otherwise each is 8.
 * A word's q are unpacked in registers for up to TOKENS tokens. Processors with AMX multiply more tokens by tiles, for
 * which q - zero are unpacked to int8.
 */
#include "int8_tokens.h"
#include "tile_products.h"

#ifdef __AVX512F__
#define TOKENS 8
#else
#define TOKENS 4
#endif
#undef FOURS
#undef TWOS
#define FOURS 0                /* no faster than two */
#define TWOS (LANES / 8)       /* totals take registers, too */
#define STRIP 32               /* inputs whose products fit 16 bits: 32 / 2 * 15 * 128 < 2^15 */
#define WORD 8                 /* inputs per word */
#define PART 512               /* inputs that are unpacked at a time, so that they stay in the L1 cache */
#define SMALL_TASK (256 * 1024) /* bytes of weights per task when there are few tokens */

typedef int16_t halves __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int8_t fours __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint8_t levels __attribute__((vector_size(LANES), aligned(1)));

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
    int64_t groups, depth; /* depth: inputs with padding */
    int64_t bytes;         /* of a group of a panel */
    int64_t row;           /* bytes of a rounded token */
} Shape;

const int int4_outputs = OUTPUTS;

inlined Shape shape_of(const Linear *linear) {
    Shape shape;
    shape.groups = (linear->inputs + linear->group - 1) / linear->group;
    shape.depth = shape.groups * linear->group;
    shape.bytes = OUTPUTS * (linear->group / 2 + sizeof(uint16_t) + (linear->has_zeros ? 1 : 0));
    shape.row = (shape.depth + (shape.groups + 1) * 4 + LINE - 1) / LINE * LINE + LINE;
    return shape;
}

int64_t int4_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, tokens, shape_of(linear).row);
}

/* Makes of a token int8 [depth], int32 [groups] and its scale. The inputs of each word are in the order 0 2 4 6 1 3 5 7,
 * first those in the lower halves of its bytes. The int32 are what the sums of q * input exceed those of the weights by
 * for each unit of zero or, without zeros, in total: to be added, so negative. */
static void round_token(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    Shape shape = shape_of(linear);
#if LANES == 16
    const int8s order = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
#else
    const int8s order = {0, 2, 4, 6, 1, 3, 5, 7};
#endif
    int8s *rounded = to;
    int32_t *excess = (int32_t *)((char *)to + shape.depth);
    float maximum = largest_magnitude(from, linear->inputs, SMALLEST);
    for (int64_t at = 0; at < shape.depth; at += linear->group) {
        floats total = {};
        for (int64_t i = at; i < at + linear->group; i += LANES) {
            floats whole = rounded_inputs(from, i, linear->inputs, LEVELS / maximum);
            *rounded++ = __builtin_shuffle(lowest((ints)whole), order);
            total += whole - ROUNDING;
        }
        *excess++ = maximum == maximum ? (linear->has_zeros ? -1 : -8) * (int32_t)sum_of(total) : 0;
    }
    *(float *)excess = maximum / LEVELS;
}

/* Scales the totals of ``count`` tokens from ``first`` on, adds the bias and stores them as a panel's outputs. Not
 * inlined, so that outputs have the same bits wherever totals come from. */
static __attribute__((noinline)) void keep_scaled(const floats totals[][2], const Linear *linear, const Rows *rows,
                                                  int64_t panel, int64_t first, int64_t count) {
    Shape shape = shape_of(linear);
    int64_t column = panel * OUTPUTS, left = linear->outputs - column, second = most(0, left - LANES);
    const char *scale = rows->input + first * rows->stride + shape.depth + shape.groups * sizeof(int32_t);
    int64_t place = first * linear->outputs + column;
    floats bias[2] = {};
    if (linear->bias) bias[0] = load(linear->bias + column, left);
    if (linear->bias && second) bias[1] = load(linear->bias + column + LANES, second);
    for (int64_t i = 0; i < count; i++, scale += rows->stride, place += linear->outputs) {
        floats own = splat(*(const float *)scale);
        keep_vector(multiply_add(totals[i][0], own, bias[0]), &rows->output, place, left);
        if (second)
            keep_vector(multiply_add(totals[i][1], own, bias[1]), &rows->output, place + LANES, second);
    }
}

/* The two halves of each byte of a panel's words: q of inputs 0 2 4 6, and of 1 3 5 7. */
inlined ints lower(ints words) { return words & 0x0f0f0f0f; }
inlined ints upper(ints words) { return words >> 4 & 0x0f0f0f0f; }

/* The zeros of a half of a panel's outputs, in the group with these scales. */
inlined ints zeros_of(const char *scales, int half) {
    return __builtin_convertvector(((const levels *)(scales + OUTPUTS * sizeof(uint16_t)))[half], ints);
}

/* Adds a group's sums, scaled. Explicitly fused: what a compiler fuses may differ between bodies. */
inlined floats add_scaled(floats total, ints sum, floats scale) {
    return multiply_add(__builtin_convertvector(sum, floats), scale, total);
}

/* Adds the products of a strip of inputs to the sums of ``count`` tokens. */
inlined void multiply_strip(ints sums[][2], const char *weights, const char *from, const Rows *rows, const int count) {
    products found[TOKENS][2];
    for (int token = 0; token < count; token++)
        for (int half = 0; half < 2; half++) found[token][half] = begin(sums[token][half]);
#pragma GCC unroll 4
    for (int word = 0; word < STRIP / WORD; word++, weights += WORD / 2 * OUTPUTS) {
        const ints *words = (const ints *)weights;
        for (int64_t line = 0; line < WORD / 2 * OUTPUTS; line += 64) __builtin_prefetch(weights + rows->ahead + line);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            ints low = part ? upper(words[0]) : lower(words[0]), high = part ? upper(words[1]) : lower(words[1]);
#pragma GCC unroll 8
            for (int token = 0; token < count; token++) {
                int32_t four;
                memcpy(&four, from + token * rows->stride + word * WORD + part * 4, sizeof four);
                found[token][0] = dot(found[token][0], low, four - (ints){});
                found[token][1] = dot(found[token][1], high, four - (ints){});
            }
        }
    }
    for (int token = 0; token < count; token++)
        for (int half = 0; half < 2; half++) sums[token][half] = end(sums[token][half], found[token][half]);
}

/* Adds a group's products of ``count`` tokens from ``from`` on to their totals; ``excess``: of the first token. */
inlined void multiply_group(floats totals[][2], const Linear *linear, const char *group, const char *from,
                            const char *excess, const Rows *rows, const int count, const int has_zeros) {
    const char *scales = group + linear->group / 2 * OUTPUTS, *words = group;
    ints zeros[2], sums[TOKENS][2];
    for (int half = 0; has_zeros && half < 2; half++) zeros[half] = zeros_of(scales, half);
    for (int token = 0; token < count; token++) {
        ints start = *(const int32_t *)(excess + token * rows->stride) - (ints){};
        sums[token][0] = has_zeros ? times(zeros[0], start) : start;
        sums[token][1] = has_zeros ? times(zeros[1], start) : start;
    }
    for (; words < scales; words += STRIP / 2 * OUTPUTS, from += STRIP) multiply_strip(sums, words, from, rows, count);
    for (int half = 0; half < 2; half++) {
        floats scale = widened(((const float16s *)scales)[half]);
        for (int token = 0; token < count; token++)
            totals[token][half] = add_scaled(totals[token][half], sums[token][half], scale);
    }
}

/* Computes the outputs of ``num_panels`` panels, one or two, for ``count`` tokens from ``first`` on. */
inlined void multiply(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t first, const int count,
                      const int num_panels, const int has_zeros) {
    Shape shape = shape_of(linear);
    const char *groups[2], *from = rows->input + first * rows->stride, *excess = from + shape.depth;
    floats totals[2][TOKENS][2] = {};
    for (int which = 0; which < num_panels; which++)
        groups[which] = (const char *)linear->panels + panels[which] * shape.groups * shape.bytes;
    for (int64_t i = 0; i < shape.groups; i++, from += linear->group, excess += sizeof(int32_t)) {
#pragma GCC unroll 2
        for (int which = 0; which < num_panels; groups[which++] += shape.bytes)
            multiply_group(totals[which], linear, groups[which], from, excess, rows, count, has_zeros);
    }
    for (int which = 0; which < num_panels; which++)
        keep_scaled((const floats(*)[2])totals[which], linear, rows, panels[which], first, count);
}

inlined void multiply_some(const Linear *linear, const Rows *rows, int64_t panel, int64_t first, int64_t count,
                           const int has_zeros) {
    switch (count) {
#define SOME(n) case n: multiply(linear, rows, &panel, first, n, 1, has_zeros); break;
        SOME(1) SOME(2) SOME(3) SOME(4)
#if TOKENS > 4
        SOME(5) SOME(6) SOME(7) SOME(8)
#endif
#undef SOME
    }
}

static void multiply_panel_by_vectors(const Linear *linear, const Rows *rows, int64_t panel) {
    int64_t tokens = rows->tokens, tiles = (tokens + TOKENS - 1) / TOKENS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = tokens * tile / tiles, count = tokens * (tile + 1) / tiles - first;
        if (linear->has_zeros) multiply_some(linear, rows, panel, first, count, 1);
        else multiply_some(linear, rows, panel, first, count, 0);
    }
}

static void multiply_by_vectors(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    switch (count == 2 ? 2 * rows->tokens + linear->has_zeros : 0) {
#define SOME(n) \
    case 2 * n: multiply(linear, rows, panels, 0, n, 2, 0); break; \
    case 2 * n + 1: multiply(linear, rows, panels, 0, n, 2, 1); break;
        SOME(1)
#if TWOS > 1
        SOME(2)
#endif
    default:
        for (int64_t i = 0; i < count; i++) multiply_panel_by_vectors(linear, rows, panels[i]);
    }
}

/* Part of a panel, unpacked for tiles: q - zero by halves of the outputs, [inputs / 4, LANES, 4], and scales. */
typedef struct {
    fours weights[2][PART / 4];
    floats scales[2][PART / STRIP];
} __attribute__((aligned(64))) Part;

inlined void unpack(const Linear *linear, const Shape *shape, const char *group, int64_t groups, Part *part) {
    fours *low = part->weights[0], *high = part->weights[1];
    for (int64_t i = 0; i < groups; i++, group += shape->bytes) {
        const char *scales = group + linear->group / 2 * OUTPUTS;
        fours zeros[2];
        for (int half = 0; half < 2; half++) {
            ints zero = linear->has_zeros ? zeros_of(scales, half) : 8 - (ints){};
            zeros[half] = (fours)(zero * 0x01010101);
            part->scales[half][i] = widened(((const float16s *)scales)[half]);
        }
        for (int64_t word = 0; word < linear->group / WORD; word++, low += 2, high += 2) {
            const ints *words = (const ints *)group + 2 * word;
            ints first = words[0], second = words[1];
            low[0] = (fours)lower(first) - zeros[0];
            low[1] = (fours)upper(first) - zeros[0];
            high[0] = (fours)lower(second) - zeros[1];
            high[1] = (fours)upper(second) - zeros[1];
        }
    }
}

/* Adds the products of a tile of tokens and a part's ``groups`` groups to the totals of a half of the outputs, which stay
 * in registers. Two groups are being multiplied while another's sums are added, because products take long to finish. */
static void multiply_tile(const Part *part, const char *tokens, int64_t stride, int64_t group, int64_t groups, int half,
                          floats totals[][2]) {
#ifdef __AMX_INT8__
    const char *weights = (const char *)part->weights[half];
    const floats *scale = part->scales[half];
    int64_t step = least(group, TILE_BYTES), i = 0;
    ints sums[TILE_ROWS] __attribute__((aligned(64)));
    floats found[TILE_ROWS];
    for (int row = 0; row < TILE_ROWS; row++) found[row] = totals[row][half];
    __asm__ volatile("" ::: "memory"); /* the compiler doesn't know that tiles read memory */
#define MULTIPLY(sum, from, by) \
    do { \
        _tile_zero(sum); \
        for (int64_t at = 0; at < group; at += step, tokens += step, weights += step * LANES) { \
            _tile_loadd(from, tokens, stride); \
            _tile_loadd(by, weights, TILE_BYTES); \
            _tile_dpbssd(sum, from, by); \
        } \
    } while (0)
#define ADD(sum) \
    do { \
        _tile_stored(sum, sums, TILE_BYTES); \
        _Pragma("GCC unroll 16") \
        for (int row = 0; row < TILE_ROWS; row++) found[row] = add_scaled(found[row], sums[row], *scale); \
        scale++; \
    } while (0)
    if (groups >= 4) {
        MULTIPLY(0, 4, 6);
        MULTIPLY(1, 5, 7);
    }
    for (; i + 4 <= groups; i += 4) {
        MULTIPLY(2, 4, 6);
        ADD(0);
        MULTIPLY(3, 5, 7);
        ADD(1);
        if (i + 8 <= groups) MULTIPLY(0, 4, 6);
        ADD(2);
        if (i + 8 <= groups) MULTIPLY(1, 5, 7);
        ADD(3);
    }
    for (; i < groups; i++) {
        MULTIPLY(0, 4, 6);
        ADD(0);
    }
#undef ADD
#undef MULTIPLY
    for (int row = 0; row < TILE_ROWS; row++) totals[row][half] = found[row];
#endif
}

/* One panel at a time. */
static void multiply_by_tiles(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t num_panels) {
    Shape shape = shape_of(linear);
    int64_t tiles = (rows->tokens + TILE_ROWS - 1) / TILE_ROWS, count = least(TILE_ROWS, rows->tokens), groups;
    int64_t panel = panels[0];
    const char *weights = (const char *)linear->panels + panel * shape.groups * shape.bytes;
    floats totals[BLOCK / TILE_ROWS][TILE_ROWS][2];
    memset(totals, 0, tiles * sizeof totals[0]);
    for (int64_t done = 0; done < shape.groups; done += groups, weights += groups * shape.bytes) {
        Part part;
        groups = least(PART / linear->group, shape.groups - done);
        unpack(linear, &shape, weights, groups, &part);
        int64_t bytes = groups * shape.bytes, share = (bytes / tiles + 63) / 64 * 64;
        const char *later = weights + most(bytes, rows->ahead); /* each tile prefetches its share */
        for (int64_t tile = 0; tile < tiles; tile++, later += share) {
            int64_t first = most(0, least(tile * TILE_ROWS, rows->tokens - TILE_ROWS)); /* so that the last one is whole */
            const char *from = rows->input + first * rows->stride + done * linear->group;
            for (int64_t line = 0; line < share; line += 64) __builtin_prefetch(later + line, 0, 2);
            if (done + groups == shape.groups) prefetch_outputs(linear, rows, panel, first, count);
            for (int half = 0; half < 2; half++)
                multiply_tile(&part, from, rows->stride, linear->group, groups, half, totals[tile]);
            if (done + groups == shape.groups)
                keep_scaled((const floats(*)[2])totals[tile], linear, rows, panel, first, count);
        }
    }
}

void int4_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    Shape shape = shape_of(linear);
    int64_t bytes = shape.groups * shape.bytes, step = least(linear->group, TILE_BYTES);
    /* by tiles the sums of 16 rows are added, whatever the tokens, and more often in small groups */
    int64_t few = step < TILE_BYTES ? 12 : TOKENS;
    char *rounded = round_together(linear, input, tokens, room, shape.row, 0, round_token);
    Rows rows = {rounded, *output, shape.row, tokens, 0};
    if (tiles_are_granted && tokens > few)
        multiply_together_by_tiles(linear, &rows, bytes, step, 1, SMALL_TASK, multiply_by_tiles);
    else multiply_together(linear, &rows, bytes, panels_for(tokens, FOURS, TWOS), TOKENS, BLOCK, SMALL_TASK,
                           multiply_by_vectors);
}

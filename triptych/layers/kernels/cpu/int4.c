/* Products with 4-bit weights: each token is quantized to int8 in blocks of inputs, of a scale each. Sums over a block are
 * exact in int32. They are multiplied by the scales of the block and of the weights, and added in float32 in the blocks'
 * order, so that a token's outputs are identical in any batch.
 *
 * A weight is (q - zero) * scale or q * scale + offset, where q is 0 to 15 and a group of ``group`` inputs, 32, 64 or 128,
 * shares zero, scale and offset. A block is a group, or half of one of 128 inputs. Weights are in panels of OUTPUTS
 * outputs, [ceil(outputs / OUTPUTS), ceil(inputs / group)] of
 *     words [group / 8, OUTPUTS], each with the q of eight inputs, the first in the lowest bits,
 *     scales, halves [OUTPUTS],
 *     zeros, uint8 [OUTPUTS], or offsets, halves [OUTPUTS], if the weights have them; otherwise each zero is 8.
 * A word's q are unpacked in registers for up to TOKENS tokens. Processors with AMX multiply more tokens by tiles.
 */
#include "scaled_tiles.h"

#ifdef __AVX512F__
#define TOKENS 6 /* of more, sums don't stay in registers */
#else
#define TOKENS 4
#endif
#define STRIP 32               /* inputs whose products fit 16 bits: 32 / 2 * 15 * 128 < 2^15 */
#define SMALL_TASK (256 * 1024) /* bytes of weights per task when there are few tokens */

typedef uint8_t levels __attribute__((vector_size(LANES), aligned(1)));

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
    int64_t step;          /* inputs of a block */
    int64_t bytes;         /* of a group of a panel */
    int64_t row;           /* bytes of a rounded token */
} Shape;

const int int4_outputs = OUTPUTS;

inlined Shape shape_of(const Linear *linear) {
    Shape shape;
    shape.groups = (linear->inputs + linear->group - 1) / linear->group;
    shape.depth = shape.groups * linear->group;
    shape.step = least(linear->group, TILE_BYTES);
    shape.bytes = OUTPUTS * (linear->group / 2 + sizeof(uint16_t) + linear->zeros); /* as many bytes as ZEROS and OFFSETS */
    shape.row = rounded_bytes(shape.depth, shape.step);
    return shape;
}

int64_t int4_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, rounded_by_tiles(tokens), shape_of(linear).row);
}

static void round_token(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    Shape shape = shape_of(linear);
    round_blocks(from, linear->inputs, shape.depth, shape.step, to, step);
}

/* The zeros of a half of a panel's outputs, in the group with these scales. */
inlined ints zeros_of(const char *scales, int half) {
    return __builtin_convertvector(((const levels *)(scales + OUTPUTS * sizeof(uint16_t)))[half], ints);
}

/* The offsets of a half of a panel's outputs, in the group with these scales. */
inlined floats offsets_of(const char *scales, int half) {
    return widened(((const float16s *)(scales + OUTPUTS * sizeof(uint16_t)))[half]);
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

/* Adds a group's products of ``count`` tokens from ``from`` on to their totals; ``blocks``: of the first token. */
inlined void multiply_group(floats totals[][2], const Linear *linear, const char *group, const char *from,
                            const char *blocks, const Rows *rows, const int count, const int kind) {
    const char *scales = group + linear->group / 2 * OUTPUTS, *words = group;
    int64_t step = least(linear->group, TILE_BYTES);
    floats scale[2], offsets[2];
    ints zeros[2], sums[TOKENS][2];
    for (int half = 0; half < 2; half++) {
        scale[half] = widened(((const float16s *)scales)[half]);
        if (kind == ZEROS) zeros[half] = zeros_of(scales, half);
        if (kind == OFFSETS) offsets[half] = offsets_of(scales, half);
    }
    for (; words < scales; blocks += sizeof(Block)) {
        const char *end = words + step / 2 * OUTPUTS;
        for (int token = 0; token < count; token++) {
            const Block *block = (const Block *)(blocks + token * rows->stride);
            ints start = -block->halves[0] - block->halves[1] - (ints){};
            for (int half = 0; half < 2; half++)
                sums[token][half] = kind == ZEROS ? times(zeros[half], start) : kind == OFFSETS ? (ints){} : start * 8;
        }
        for (; words < end; words += STRIP / 2 * OUTPUTS, from += STRIP) multiply_strip(sums, words, from, rows, count);
        for (int token = 0; token < count; token++) {
            const Block *block = (const Block *)(blocks + token * rows->stride);
            for (int half = 0; half < 2; half++) {
                totals[token][half] = add_scaled(totals[token][half], sums[token][half], scale[half], block->scale);
                if (kind == OFFSETS) totals[token][half] = add_offsets(totals[token][half], offsets[half], block->sum);
            }
        }
    }
}

/* Computes the outputs of ``num_panels`` panels, one or two, for ``count`` tokens from ``first`` on. */
inlined void multiply(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t first, const int count,
                      const int num_panels, const int kind) {
    Shape shape = shape_of(linear);
    const char *groups[2], *from = rows->input + first * rows->stride, *blocks = from + whole_lines(shape.depth);
    int64_t some = linear->group / shape.step * sizeof(Block);
    floats totals[2][TOKENS][2] = {};
    for (int which = 0; which < num_panels; which++)
        groups[which] = (const char *)linear->panels + panels[which] * shape.groups * shape.bytes;
    for (int64_t i = 0; i < shape.groups; i++, from += linear->group, blocks += some) {
#pragma GCC unroll 2
        for (int which = 0; which < num_panels; groups[which++] += shape.bytes)
            multiply_group(totals[which], linear, groups[which], from, blocks, rows, count, kind);
    }
    for (int which = 0; which < num_panels; which++)
        keep_totals(totals[which], NULL, linear, rows, panels[which], first, count);
}

inlined void multiply_some(const Linear *linear, const Rows *rows, int64_t panel, int64_t first, int64_t count,
                           const int kind) {
    switch (count) {
#define SOME(n) case n: multiply(linear, rows, &panel, first, n, 1, kind); break;
        SOME(1) SOME(2) SOME(3) SOME(4)
#if TOKENS > 4
        SOME(5) SOME(6)
#endif
#undef SOME
    }
}

static void multiply_panel_by_vectors(const Linear *linear, const Rows *rows, int64_t panel) {
    int64_t tokens = rows->tokens, tiles = (tokens + TOKENS - 1) / TOKENS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = tokens * tile / tiles, count = tokens * (tile + 1) / tiles - first;
        switch (linear->zeros) {
        case MIDDLE: multiply_some(linear, rows, panel, first, count, MIDDLE); break;
        case ZEROS: multiply_some(linear, rows, panel, first, count, ZEROS); break;
        case OFFSETS: multiply_some(linear, rows, panel, first, count, OFFSETS); break;
        }
    }
}

static void multiply_by_vectors(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    switch (count == 2 ? 4 * rows->tokens + linear->zeros : 0) {
#define SOME(n) \
    case 4 * n + MIDDLE: multiply(linear, rows, panels, 0, n, 2, MIDDLE); break; \
    case 4 * n + ZEROS: multiply(linear, rows, panels, 0, n, 2, ZEROS); break; \
    case 4 * n + OFFSETS: multiply(linear, rows, panels, 0, n, 2, OFFSETS); break;
        SOME(1)
#if TWOS > 1
        SOME(2)
#endif
    default:
        for (int64_t i = 0; i < count; i++) multiply_panel_by_vectors(linear, rows, panels[i]);
    }
}

/* Unpacks groups of a panel from ``group`` on, of ``some`` inputs. */
inlined void unpack(const Linear *linear, const Shape *shape, const char *group, int64_t some, Unpacked *part) {
    fours *low = part->weights[0], *high = part->weights[1];
    int64_t blocks = linear->group / shape->step;
    part->step = part->block = shape->step;
    part->has_offsets = linear->zeros == OFFSETS;
    for (int64_t i = 0; i < some / linear->group; i++, group += shape->bytes) {
        const char *scales = group + linear->group / 2 * OUTPUTS;
        fours zeros[2];
        for (int half = 0; half < 2; half++) {
            ints zero = linear->zeros == ZEROS ? zeros_of(scales, half) : (linear->zeros == OFFSETS ? 0 : 8) - (ints){};
            zeros[half] = (fours)(zero * 0x01010101);
            for (int64_t block = i * blocks; block < (i + 1) * blocks; block++) {
                part->scales[half][block] = widened(((const float16s *)scales)[half]);
                if (linear->zeros == OFFSETS) part->offsets[half][block] = offsets_of(scales, half);
            }
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

static void multiply_part_of_tiles(const Linear *linear, const Rows *rows, int64_t panel, int64_t at, int64_t some,
                                   int64_t ahead, char *sums) {
    Shape shape = shape_of(linear);
    const char *group = (const char *)linear->panels + (panel * shape.groups + at / linear->group) * shape.bytes;
    Unpacked part;
    unpack(linear, &shape, group, some, &part);
    multiply_unpacked(&part, rows, at, some, shape.depth, group + ahead / linear->group * shape.bytes,
                      some / linear->group * shape.bytes, sums);
}

void int4_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    Shape shape = shape_of(linear);
    int64_t bytes = shape.groups * shape.bytes;
    /* by tiles the sums of 16 rows are added, whatever the tokens, and more often in small groups */
    int64_t few = shape.step < TILE_BYTES ? 12 : TOKENS;
    if (tiles_are_granted && tokens > few) {
        multiply_in_blocks(linear, input, output, tokens, room, shape.row, shape.depth, PART, round_token,
                           multiply_part_of_tiles, keep_totals);
        return;
    }
    Rows rows = {round_together(linear, input, tokens, room, shape.row, 0, round_token), *output, shape.row, tokens, 0};
    multiply_together(linear, &rows, bytes, panels_for(tokens, FOURS, TWOS), TOKENS, BLOCK, SMALL_TASK,
                      multiply_by_vectors);
}

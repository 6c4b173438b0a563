/* Products with weights in the blocks of GGUF files, whose values they have exactly: each token is quantized to int8 in
 * blocks of 32 inputs, of a scale each. Sums over a group of weights are exact in int32. They are multiplied by the scales
 * of the block and of the group, and added in float32 in the groups' order, so that a token's outputs are identical in any
 * batch.
 *
 * A weight is (q - zero) * scale or q * scale + offset. A group of 32 inputs, or 16 of Q6_K, shares scale and offset. They
 * are halves, or in super-blocks of 256 inputs (the types with K) bytes, to be multiplied by halves of the super-block.
 * Panels of OUTPUTS outputs may be of unlike types. One has [inputs / 256] of
 *     factors of scales and then of offsets, halves [OUTPUTS] each, if there are super-blocks,
 *     groups, each with
 *         words [group / 8, OUTPUTS]: the low 4 bits of the q of eight inputs; of Q8_0 [group / 4, OUTPUTS]: four q,
 *         int32 [OUTPUTS]: the other bits of q, unless there are none,
 *         scales and then offsets, halves or int8 [OUTPUTS] each.
 * The inputs of words are in the order 0 2 4 6 1 3 5 7, as in int4.c. Four q are in a lane's bytes; their other bits are in
 * the same bytes, those of the first inputs in the lowest bits.
 */
#include "scaled_tiles.h"

#ifdef __AVX512F__
#define TOKENS 6 /* of more, sums don't stay in registers */
#elif defined __AVX2__
#define TOKENS 4
#else
#define TOKENS 2 /* more take long to compile */
#endif
#define INPUTS 32               /* of a token that share a scale */
#define SUPER 256               /* inputs of a super-block */
#define SMALL_TASK (256 * 1024) /* bytes of weights per task when there are few tokens */
#define FEW_ROWS 12             /* tokens that are multiplied by vectors: by tiles the sums of 16 rows are added anyway */

enum Type { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

/* Panels of one type; a layer's parts follow each other, and the last one ends where its panels do. */
typedef struct {
    const char *panels;
    int64_t type, end; /* end: number of the first panel beyond it */
} Part;

const int blocks_outputs = OUTPUTS;

inlined int bits_of(int type) {
    return type == Q8_0 ? 8 : type == Q6_K ? 6 : type == Q5_0 || type == Q5_1 || type == Q5_K ? 5 : 4;
}
inlined int group_of(int type) { return type == Q6_K ? INPUTS / 2 : INPUTS; }
inlined int is_super(int type) { return type >= Q4_K; }
inlined int has_offsets(int type) { return type == Q4_1 || type == Q5_1 || type == Q4_K || type == Q5_K; }
inlined int zero_of(int type) { return has_offsets(type) ? 0 : 1 << (bits_of(type) - 1); }

inlined int64_t words_bytes(int type) { return group_of(type) * (bits_of(type) == 8 ? 8 : 4) / 8 * OUTPUTS; }
inlined int64_t scales_at(int type) { return words_bytes(type) + (bits_of(type) % 4 ? sizeof(int32_t) * OUTPUTS : 0); }
inlined int64_t group_bytes(int type) {
    return scales_at(type) + (has_offsets(type) ? 2 : 1) * (is_super(type) ? 1 : sizeof(uint16_t)) * OUTPUTS;
}
inlined int64_t factors_bytes(int type) {
    return is_super(type) ? (has_offsets(type) ? 2 : 1) * sizeof(uint16_t) * OUTPUTS : 0;
}
inlined int64_t panel_bytes(int type, int64_t inputs) {
    return inputs / group_of(type) * group_bytes(type) + inputs / SUPER * factors_bytes(type);
}

int64_t blocks_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, rounded_by_tiles(tokens), rounded_bytes(linear->inputs, INPUTS));
}

static void round_token(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    round_blocks(from, linear->inputs, linear->inputs, INPUTS, to, step);
}

/* As ``dot`` and ``end`` for four weights of a type. FOURS_AT_ONCE: how many are added between ``begin`` and ``end``, as
 * 16 bits hold sums of products, (2^bits - 1) * 127 * 2 each. Without VNNI, q of 8 bits are multiplied with their sign, one
 * four at a time. */
#define FOURS_AT_ONCE(type) \
    (HAS_VNNI || bits_of(type) == 4 ? group_of(type) / 4 : bits_of(type) == 5 ? 4 : bits_of(type) == 6 ? 2 : 1)
#define IS_SIGNED(type) (bits_of(type) == 8 && !HAS_VNNI)

inlined products dot_of(products sum, ints weights, ints four, const int type) {
#if !HAS_VNNI
    if (IS_SIGNED(type)) {
        halves a = (halves)(weights ^ (int32_t)0x80808080), b = (halves)four;
        return (a << 8 >> 8) * (b << 8 >> 8) + (a >> 8) * (b >> 8);
    }
#endif
    return dot(sum, weights, four);
}

inlined ints end_of(ints sum, products strip, const int type) {
#if !HAS_VNNI
    if (IS_SIGNED(type)) return sum + ((ints)strip << 16 >> 16) + ((ints)strip >> 16);
#endif
    return end(sum, strip);
}

/* The ``number``-th four q of a half of a panel's outputs, of the group that begins at ``words``. */
inlined ints four_of(const char *words, ints more, int number, int half, const int type) {
    const ints *line = (const ints *)words;
    if (bits_of(type) == 8) return line[2 * number + half];
    ints word = line[number / 2 * 2 + half], low = number % 2 ? upper(word) : lower(word);
    if (bits_of(type) == 5) low |= (more >> number & 0x01010101) << 4;
    if (bits_of(type) == 6) low |= (more >> 2 * number & 0x03030303) << 4;
    return low;
}

/* The scales, or after ``skipped`` others the offsets, of a half of a panel's outputs, of a group or its factors. */
inlined floats scales_of(const char *scales, int skipped, int half, const int in_bytes) {
    if (in_bytes) {
        ints whole = __builtin_convertvector(((const int8s *)scales)[2 * skipped + half], ints);
        return __builtin_convertvector(whole, floats);
    }
    return widened(((const float16s *)scales)[2 * skipped + half]);
}

/* Loads a super-block's factors of scales, and those of offsets with their sign; returns what follows them. */
inlined const char *load_factors(const char *from, floats factors[][2], const int type) {
    for (int half = 0; half < 2; half++) {
        factors[0][half] = scales_of(from, 0, half, 0);
        if (has_offsets(type)) factors[1][half] = -scales_of(from, 1, half, 0);
    }
    return from + factors_bytes(type);
}

/* As ``scales_of`` for a group, multiplied by the factors; ``which``: 1 for offsets. */
inlined floats scale_of(const char *scales, int which, int half, const floats factors[][2], const int type) {
    floats found = scales_of(scales, which, half, is_super(type));
    return is_super(type) ? found * factors[which][half] : found;
}

/* Adds a group's products of ``count`` tokens from ``from`` on to their totals. ``block``: of the first token; ``part``:
 * which part of it the group is, if it is in two. */
inlined void multiply_group(floats totals[][2], const char *group, const floats factors[][2], const char *from,
                            const char *blocks, const Rows *rows, int part, const int count, const int type) {
    const char *end = group + group_bytes(type), *scales = group + scales_at(type);
    floats scale[2], offset[2];
    ints more[2] = {}, sums[TOKENS][2];
    for (const char *line = group; line < end; line += 64) __builtin_prefetch(line + rows->ahead);
    for (int half = 0; half < 2 && bits_of(type) % 4; half++)
        more[half] = ((const ints *)(group + words_bytes(type)))[half];
    for (int token = 0; token < count; token++) {
        const Block *block = (const Block *)(blocks + token * rows->stride);
        int32_t sum = type == Q6_K ? block->halves[part] : block->halves[0] + block->halves[1];
        ints start = (IS_SIGNED(type) ? 0 : -zero_of(type) * sum) - (ints){};
        sums[token][0] = sums[token][1] = start;
    }
    products found[TOKENS][2];
#pragma GCC unroll 8
    for (int number = 0; number < group_of(type) / 4; number++) {
        ints low = four_of(group, more[0], number, 0, type), high = four_of(group, more[1], number, 1, type);
#pragma GCC unroll 8
        for (int token = 0; token < count; token++) {
            products *own = found[token];
            int32_t four;
            memcpy(&four, from + token * rows->stride + number * 4, sizeof four);
            for (int half = 0; half < 2; half++) {
                if (number % FOURS_AT_ONCE(type) == 0) own[half] = begin(sums[token][half]);
                own[half] = dot_of(own[half], half ? high : low, four - (ints){}, type);
                if ((number + 1) % FOURS_AT_ONCE(type) == 0) sums[token][half] = end_of(sums[token][half], own[half], type);
            }
        }
    }
    /* not before, because sums take the registers */
    __asm__ volatile("" ::: "memory");
    for (int half = 0; half < 2; half++) {
        scale[half] = scale_of(scales, 0, half, factors, type);
        if (has_offsets(type)) offset[half] = scale_of(scales, 1, half, factors, type);
    }
    for (int token = 0; token < count; token++) {
        const Block *block = (const Block *)(blocks + token * rows->stride);
        for (int half = 0; half < 2; half++) {
            totals[token][half] = add_scaled(totals[token][half], sums[token][half], scale[half], block->scale);
            if (has_offsets(type)) totals[token][half] = add_offsets(totals[token][half], offset[half], block->sum);
        }
    }
}

/* Computes the outputs of a panel, whose weights are at ``weights``, for ``count`` tokens from ``first`` on. */
inlined void multiply(const Linear *linear, const Rows *rows, const char *weights, int64_t panel, int64_t first,
                      const int count, const int type) {
    const char *from = rows->input + first * rows->stride, *blocks = from + whole_lines(linear->inputs);
    floats totals[TOKENS][2] = {}, factors[2][2] = {};
    for (int64_t i = 0; i < linear->inputs; i += INPUTS, from += INPUTS, blocks += sizeof(Block)) {
        if (is_super(type) && i % SUPER == 0) weights = load_factors(weights, factors, type);
        multiply_group(totals, weights, (const floats(*)[2])factors, from, blocks, rows, 0, count, type);
        weights += group_bytes(type);
        if (group_of(type) == INPUTS) continue;
        multiply_group(totals, weights, (const floats(*)[2])factors, from + INPUTS / 2, blocks, rows, 1, count, type);
        weights += group_bytes(type);
    }
    keep_totals(totals, NULL, linear, rows, panel, first, count);
}

inlined void multiply_some(const Linear *linear, const Rows *rows, const char *weights, int64_t panel, int64_t first,
                           int64_t count, const int type) {
    switch (count) {
#define SOME(n) case n: multiply(linear, rows, weights, panel, first, n, type); break;
        SOME(1) SOME(2)
#if TOKENS > 2
        SOME(3) SOME(4)
#endif
#if TOKENS > 4
        SOME(5) SOME(6)
#endif
#undef SOME
    }
}

/* Where a panel begins, and its type. */
inlined const char *place_of_panel(const Linear *linear, int64_t panel, int64_t *type) {
    const Part *part = linear->panels;
    int64_t begin = 0;
    while (panel >= part->end) begin = part++->end;
    *type = part->type;
    return part->panels + (panel - begin) * panel_bytes(*type, linear->inputs);
}

static void multiply_panels(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    int64_t tokens = rows->tokens, tiles = (tokens + TOKENS - 1) / TOKENS, panel = panels[0], type;
    const char *weights = place_of_panel(linear, panel, &type);
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = tokens * tile / tiles, some = tokens * (tile + 1) / tiles - first;
        switch (type) {
#define OF(one) case one: multiply_some(linear, rows, weights, panel, first, some, one); break;
            OF(Q4_0) OF(Q4_1) OF(Q5_0) OF(Q5_1) OF(Q8_0) OF(Q4_K) OF(Q5_K) OF(Q6_K)
#undef OF
        }
    }
}

/* Unpacks groups of a panel from ``weights`` on, of ``some`` inputs. */
inlined void unpack(const char *weights, int64_t some, Unpacked *part, const int type) {
    floats factors[2][2] = {};
    int64_t number = 0;
    part->step = group_of(type);
    part->block = INPUTS;
    part->has_offsets = has_offsets(type);
    for (int64_t at = 0; at < some; at += group_of(type), weights += group_bytes(type), number++) {
        if (is_super(type) && at % SUPER == 0) weights = load_factors(weights, factors, type);
        const char *scales = weights + scales_at(type);
        for (int half = 0; half < 2; half++) {
            fours *to = part->weights[half] + at / 4;
            ints more = bits_of(type) % 4 ? ((const ints *)(weights + words_bytes(type)))[half] : (ints){};
            for (int four = 0; four < group_of(type) / 4; four++)
                to[four] = (fours)four_of(weights, more, four, half, type) - (int8_t)zero_of(type);
            part->scales[half][number] = scale_of(scales, 0, half, factors, type);
            if (has_offsets(type)) part->offsets[half][number] = scale_of(scales, 1, half, factors, type);
        }
    }
}

static void multiply_part_of_tiles(const Linear *linear, const Rows *rows, int64_t panel, int64_t at, int64_t some,
                                   int64_t ahead, char *sums) {
    int64_t type, bytes;
    const char *weights = place_of_panel(linear, panel, &type);
    Unpacked unpacked;
    switch (type) {
#define OF(one) case one: unpack(weights + panel_bytes(one, at), some, &unpacked, one); break;
        OF(Q4_0) OF(Q4_1) OF(Q5_0) OF(Q5_1) OF(Q8_0) OF(Q4_K) OF(Q5_K) OF(Q6_K)
#undef OF
    }
    bytes = panel_bytes(type, linear->inputs);
    multiply_unpacked(&unpacked, rows, at, some, linear->inputs, weights + (at + ahead) * bytes / linear->inputs,
                      some * bytes / linear->inputs, sums);
}

void blocks_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    int64_t apart = rounded_bytes(linear->inputs, INPUTS);
    int64_t bytes = panel_bytes(((const Part *)linear->panels)->type, linear->inputs);
    if (tiles_are_granted && tokens > FEW_ROWS) {
        multiply_in_blocks(linear, input, output, tokens, room, apart, linear->inputs, PART, round_token,
                           multiply_part_of_tiles, keep_totals);
        return;
    }
    Rows rows = {round_together(linear, input, tokens, room, apart, 0, round_token), *output, apart, tokens};
    multiply_together(linear, &rows, bytes, 1, TOKENS, BLOCK, SMALL_TASK, multiply_panels);
}

/* Products with int8 weights: each token is quantized to int8 with its own scale, after its blocks of inputs were rotated, if
 * those of the weights have been, which leaves the product as it is. Sums in int32 are exact, so that a token's outputs are
 * identical in any batch, and on any processor but for the rounding of scales.
 *
 * Weights are in panels of OUTPUTS outputs with groups of four inputs, [ceil(outputs / OUTPUTS), depth / 4, OUTPUTS, 4],
 * padded with zeros. They are loaded once for up to TOKENS tokens, whose sums stay in registers. Processors with AMX
 * multiply more than a few tokens by tiles.
 */
#include "int8.h"
#include "int8_tokens.h"
#include "tile_products.h"

#if defined __AVX512F__
#define TOKENS 12
#elif defined __AVXVNNI__
#define TOKENS 6
#else
#define TOKENS 4
#endif

typedef int16_t halves __attribute__((vector_size(4 * LANES), aligned(4)));

/* In each lane: sum + the dot product of four weights and four activations. UNSIGNED is the offset added to the weights,
 * because instructions multiply unsigned by signed bytes. Without VNNI they add two products in 16 bits, which hold
 * 255 * 128. So no pair of activations may sum to more than LARGEST_PAIR in magnitude. Where their signs differ, so do
 * those of the products, and none exceeds 255 * 127. */
#if HAS_VNNI
#define UNSIGNED 128
#define LARGEST_PAIR 0 /* any */
inlined ints dot(ints sum, ints weights, ints four) { return add_products(sum, weights, four); }
#elif HAS_PAIRS
#define UNSIGNED 128
#define LARGEST_PAIR 128
inlined ints dot(ints sum, ints weights, ints four) { return sum + sums_of_pairs(products_of_bytes(weights, four)); }
#else
#define UNSIGNED 0
#define LARGEST_PAIR 0 /* any: 16 bits hold 2 * 128 * 127; stored weights may be -128 */
inlined ints dot(ints sum, ints weights, ints four) {
    halves pairs = ((halves)weights << 8 >> 8) * ((halves)four << 8 >> 8) + ((halves)weights >> 8) * ((halves)four >> 8);
    return sum + ((ints)pairs << 16 >> 16) + ((ints)pairs >> 16);
}
#endif

/* What was taken off four activations, so that no pair exceeds LARGEST_PAIR. */
typedef struct {
    int32_t at; /* index of the first one's input */
    int8_t four[4];
} Addend;

/* What a token's quantized inputs are followed by; its addends follow it. */
typedef struct {
    float scale;
    int32_t start; /* to be added to the sums, from which it cancels the weights' offset */
    int64_t num_addends;
} Token;

const int int8_outputs = OUTPUTS, int8_multiple = INPUT_BYTES;

inlined int64_t depth_of(int64_t inputs) { return padded(inputs, sizeof(int8_t)); }
inlined int64_t row_of(int64_t inputs) {
    int64_t depth = depth_of(inputs);
    return depth + (LARGEST_PAIR ? whole_lines(depth / 4 * sizeof(Addend)) : 0) + LINE;
}

int64_t int8_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, rounded_by_tiles(tokens), row_of(linear->inputs));
}

/* Halves those fours of LANES rounded inputs, from the ``at``-th on, that have a pair beyond LARGEST_PAIR; the other
 * halves become addends. */
inlined void halve_large(int8_t *rounded, floats whole, int64_t at, Token *token) {
    floats pairs = whole + __builtin_shuffle(whole, (ints)NEIGHBOURS(1));
    ints large = (pairs > LARGEST_PAIR) | (pairs < -LARGEST_PAIR);
    if (!any_of(large)) return;
    for (int64_t first = 0; first < LANES; first += 4, rounded += 4) {
        if (!large[first] && !large[first + 2]) continue;
        Addend *addend = (Addend *)(token + 1) + token->num_addends++;
        addend->at = (int32_t)(at + first);
        for (int i = 0; i < 4; i++) {
            addend->four[i] = rounded[i] >> 1;
            rounded[i] -= addend->four[i];
        }
    }
}

inlined void round_to(float levels, const float *from, int64_t inputs, void *to, int64_t step) {
    int64_t depth = depth_of(inputs);
    Token *token = (Token *)((char *)to + depth / INPUT_BYTES * step);
    float maximum = largest_magnitude(from, inputs, SMALLEST);
    floats total = {};
    token->num_addends = 0;
    for (int64_t i = 0; i < depth; i += LANES) {
        floats whole = rounded_inputs(from, i, inputs, levels / maximum);
        int8_t *rounded = (int8_t *)to + i / INPUT_BYTES * step + i % INPUT_BYTES;
        *(int8s *)rounded = lowest((ints)whole);
        if (LARGEST_PAIR) halve_large(rounded, whole - ROUNDING, i, token);
        total += whole - ROUNDING;
    }
    token->scale = maximum / levels;
    token->start = maximum == maximum ? -UNSIGNED * (int32_t)sum_of(total) : 0;
}

static void round_token(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    int64_t inputs = linear->inputs;
    if (linear->is_rotated) {
        rotate(from, room, inputs);
        from = room;
        inputs = whole_blocks(inputs);
    }
    round_to(LEVELS, from, inputs, to, step);
}

static void round_coarsely(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    round_to(COARSE_LEVELS, from, linear->inputs, to, step);
}

/* Scales the sums of ``count`` tokens from ``first`` on, adds the bias and stores them as a panel's outputs.
 * ``is_offset``: whether weights had the offset. */
inlined void keep_scaled(const void *sums, const Linear *linear, const Rows *rows, int64_t panel, int64_t first,
                         int64_t count, const int is_offset) {
    const ints (*sum)[2] = sums;
    int64_t column = panel * OUTPUTS, left = linear->outputs - column, second = most(0, left - LANES);
    int64_t stride = rows->in_tiles ? INPUT_BYTES : rows->stride;
    const char *tokens = rows->input + first * rows->stride;
    tokens += depth_of(linear->inputs) * (rows->in_tiles ? TILE_ROWS : 1);
    int64_t place = first * linear->outputs + column;
    floats scales[2] = {load(linear->scales + column, left)}, bias[2] = {};
    if (second) scales[1] = load(linear->scales + column + LANES, second);
    if (linear->bias) bias[0] = load(linear->bias + column, left);
    if (linear->bias && second) bias[1] = load(linear->bias + column + LANES, second);
    for (int64_t i = 0; i < count; i++, tokens += stride, place += linear->outputs) {
        Token own = *(const Token *)tokens;
        if (!is_offset) own.start = 0;
        floats low = __builtin_convertvector(sum[i][0] + own.start, floats) * own.scale * scales[0] + bias[0];
        floats high = __builtin_convertvector(sum[i][1] + own.start, floats) * own.scale * scales[1] + bias[1];
        keep_vector(low, &rows->output, place, left);
        if (second) keep_vector(high, &rows->output, place + LANES, second);
    }
}

static void keep_signed(const void *sums, const void *factors, const Linear *linear, const Rows *rows, int64_t panel,
                        int64_t first, int64_t count) {
    keep_scaled(sums, linear, rows, panel, first, count, 0);
}

/* A panel's weights of four inputs, with their offset. */
inlined ints line_of(const char *weights, int half) {
    return ((const ints *)weights)[half] ^ (UNSIGNED ? (int32_t)0x80808080 : 0);
}

/* Adds the products of a token's addends to its sums of one panel. */
inlined void add_addends(ints *sum, const Token *token, const char *panel) {
    const Addend *addends = (const Addend *)(token + 1);
    for (int64_t i = 0; i < token->num_addends; i++) {
        const char *weights = panel + addends[i].at * OUTPUTS;
        int32_t four;
        memcpy(&four, addends[i].four, sizeof four);
        sum[0] = dot(sum[0], line_of(weights, 0), four - (ints){});
        sum[1] = dot(sum[1], line_of(weights, 1), four - (ints){});
    }
}

/* As ``keep_scaled``, of weights with the offset, after addends. Not inlined, because copies for each number of tokens
 * would take long to compile. */
static __attribute__((noinline)) void keep_offset(ints (*sums)[2], const Linear *linear, const Rows *rows, int64_t panel,
                                                  int64_t first, int64_t count) {
    int64_t depth = depth_of(linear->inputs);
    const char *weights = (const char *)linear->panels + panel * OUTPUTS * depth;
    for (int64_t i = 0; LARGEST_PAIR && i < count; i++)
        add_addends(sums[i], (const Token *)(rows->input + (first + i) * rows->stride + depth), weights);
    keep_scaled(sums, linear, rows, panel, first, count, 1);
}

/* Computes the outputs of ``num_panels`` panels for ``count`` tokens from ``first`` on. */
inlined void multiply(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t first, const int count,
                      const int num_panels) {
    const int64_t line = OUTPUTS * 4;
    int64_t depth = depth_of(linear->inputs);
    const char *weights[MOST_PANELS], *input = rows->input + first * rows->stride;
    ints sums[MOST_PANELS][TOKENS][2];
    for (int which = 0; which < num_panels; which++) {
        weights[which] = (const char *)linear->panels + panels[which] * OUTPUTS * depth;
        for (int token = 0; token < count; token++) sums[which][token][0] = sums[which][token][1] = (ints){};
    }
    for (int64_t i = 0; i < depth; i += 4) {
#pragma GCC unroll 4
        for (int which = 0; which < num_panels; weights[which++] += line) {
            ints low = line_of(weights[which], 0), high = line_of(weights[which], 1);
            for (int64_t at = 0; at < line; at += 64) prefetch(weights[which] + rows->ahead + at, num_panels > 1);
#pragma GCC unroll 12
            for (int token = 0; token < count; token++) {
                int32_t four;
                memcpy(&four, input + token * rows->stride + i, sizeof four);
                sums[which][token][0] = dot(sums[which][token][0], low, four - (ints){});
                sums[which][token][1] = dot(sums[which][token][1], high, four - (ints){});
            }
        }
    }
    for (int which = 0; which < num_panels; which++)
        keep_offset(sums[which], linear, rows, panels[which], first, count);
}

static void multiply_panel_by_vectors(const Linear *linear, const Rows *rows, int64_t panel) {
    int64_t tokens = rows->tokens, tiles = (tokens + TOKENS - 1) / TOKENS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = tokens * tile / tiles, count = tokens * (tile + 1) / tiles - first;
        switch (count) {
#define SOME(n) case n: multiply(linear, rows, &panel, first, n, 1); break;
            SOME(1) SOME(2) SOME(3) SOME(4)
#if TOKENS > 4
            SOME(5) SOME(6)
#endif
#if TOKENS > 6
            SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
#endif
        }
    }
}

static void multiply_by_vectors(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    switch (count > 1 ? PANELS(count, rows->tokens) : 0) {
#define SOME_PANELS(many, tokens) case PANELS(many, tokens): multiply(linear, rows, panels, 0, tokens, many); break;
        FEW_TOKENS(SOME_PANELS)
    default:
        for (int64_t i = 0; i < count; i++) multiply_panel_by_vectors(linear, rows, panels[i]);
    }
}

static void multiply_part_of_tiles(const Linear *linear, const Rows *rows, int64_t panel, int64_t at, int64_t some,
                                   int64_t ahead, char *sums) {
    multiply_part(linear, rows, panel, depth_of(linear->inputs), at, some, ahead, sums, 1);
}

static void multiply_by_tiles(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    multiply_panels_by_tiles(linear, rows, panels, count, depth_of(linear->inputs), 1, keep_signed);
}

void int8_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    int64_t apart = row_of(linear->inputs), bytes = depth_of(linear->inputs) * OUTPUTS;
    if (tiles_are_granted && tokens > TILE_ROWS) {
        multiply_in_blocks(linear, input, output, tokens, room, apart, bytes / OUTPUTS, NEAR, round_token,
                           multiply_part_of_tiles, keep_signed);
        return;
    }
    char *rounded = round_together(linear, input, tokens, room, apart, 0, round_token);
    Rows rows = {rounded, *output, apart, tokens, 0, 0};
    if (tiles_are_granted && tokens > FEW)
        multiply_together_by_tiles(linear, &rows, bytes, INPUT_BYTES, 2, TASK, multiply_by_tiles);
    else multiply_together(linear, &rows, bytes, panels_for(tokens, FOURS, TWOS), TOKENS, BLOCK, TASK, multiply_by_vectors);
}

Rows int8_rounded(const Linear *linear, const Input *input, int64_t tokens, void *room) {
    int64_t apart = row_of(linear->inputs), in_tiles = tiles_are_granted && tokens > TILE_ROWS;
    int64_t once = tiles_are_granted ? TILE_ROWS : TOKENS; /* tokens for which a panel is loaded once */
    int64_t depth = depth_of(linear->inputs), ahead = tokens > once ? in_tiles ? depth : depth * OUTPUTS : AHEAD;
    char *rounded = round_together(linear, input, tokens, room, apart, in_tiles, round_coarsely);
    return (Rows){.input = rounded, .stride = apart, .tokens = tokens, .ahead = ahead, .in_tiles = in_tiles};
}

void int8_part(const Linear *linear, const Rows *rows) {
    int64_t panels = panels_of(linear), depth = depth_of(linear->inputs);
    if (!tiles_are_granted || rows->tokens <= FEW) {
        multiply_between(linear, rows, 0, panels, panels_for(rows->tokens, FOURS, TWOS), multiply_by_vectors);
        return;
    }
    begin_tiles(least(rows->tokens, TILE_ROWS), INPUT_BYTES);
    if (rows->in_tiles)
        for (int64_t panel = 0; panel < panels; panel += AT_ONCE)
            multiply_panels_in_parts(linear, rows, panel, least(AT_ONCE, panels - panel), depth, NEAR,
                                     multiply_part_of_tiles, keep_signed);
    else multiply_between(linear, rows, 0, panels, 2, multiply_by_tiles);
    end_tiles();
}

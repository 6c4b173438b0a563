/* Products with weights and activations in bfloat16: a token is rounded once, and its sums are float32. An output is
 * summed from the first inputs to the last, so that a token's outputs are bit-identical in any batch.
 *
 * Weights are in panels of OUTPUTS outputs with pairs of inputs, [ceil(outputs / OUTPUTS), depth / 2, OUTPUTS, 2], padded
 * with zeros. They are loaded once for up to TOKENS tokens, whose sums stay in registers. Processors with AMX multiply by
 * tiles, for all numbers of tokens, since their sums are in another order. Processors without instructions for bfloat16
 * multiply the same values in float32.
 */
#include "bf16.h"
#include "tile_products.h"

#ifdef __AVX512BF16__
#define TOKENS 12
typedef uint16_t value; /* of a rounded token */
const int bf16_is_native = 1;
#else
#ifdef __AVX512F__
#define TOKENS 12
#else
#define TOKENS 4 /* a pair's four vectors of weights take registers, too */
#endif
typedef float value;
const int bf16_is_native = 0;
#endif

const int bf16_outputs = OUTPUTS, bf16_multiple = INPUT_BYTES / 2;

/* In each lane: sum + the dot product of a pair of weights and a pair of activations. */
inlined floats dot(floats sum, ints weights, const value *pair) {
#ifdef __AVX512BF16__
    int32_t both;
    memcpy(&both, pair, sizeof both);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)(both - (ints){}));
#else
    sum += (floats)(weights << 16) * pair[0];
    return sum + (floats)(weights & (int32_t)0xffff0000) * pair[1];
#endif
}

inlined int64_t depth_of(int64_t inputs) { return padded(inputs, sizeof(uint16_t)); }

int64_t bf16_row(int64_t inputs) { return depth_of(inputs) * sizeof(value) + LINE; }

int64_t bf16_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, rounded_by_tiles(tokens), bf16_row(linear->inputs));
}

inlined void round_values(const float *from, void *to, int64_t inputs, int64_t step) {
    int64_t whole = 0;
#ifdef __AVX512BF16__
    for (; whole + 2 * LANES <= inputs; whole += 2 * LANES) { /* a cache line at a time, since lines may be far apart */
        const floats *pair = (const floats *)(from + whole);
        *(__m512i *)((char *)to + whole / (2 * LANES) * step) = (__m512i)_mm512_cvtne2ps_pbh((__m512)pair[1], (__m512)pair[0]);
    }
#endif
    for (int64_t i = whole; i < depth_of(inputs); i += LANES) {
        floats values = i < inputs ? load(from + i, inputs - i) : (floats){};
        char *place = (char *)to + i * sizeof(value) / INPUT_BYTES * step + i * sizeof(value) % INPUT_BYTES;
#ifdef __AVX512BF16__
        *(__m256i *)place = (__m256i)_mm512_cvtneps_pbh((__m512)values);
#else
        *(floats *)place = rounded_bf16(values);
#endif
    }
}

void bf16_round(const float *from, void *to, int64_t inputs) { round_values(from, to, inputs, INPUT_BYTES); }

static void round_token(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    round_values(from, to, linear->inputs, step);
}

/* Computes the outputs of ``num_panels`` panels for ``count`` tokens from ``first`` on. */
inlined void multiply(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t first, const int count,
                      const int num_panels) {
    const int64_t line = OUTPUTS * 2 * sizeof(uint16_t);
    int64_t depth = depth_of(linear->inputs), size = depth / 2 * line, stride = rows->stride / sizeof(value);
    const char *weights[MOST_PANELS];
    const value *input = (const value *)rows->input + first * stride;
    floats sums[MOST_PANELS][TOKENS][2];
    for (int which = 0; which < num_panels; which++) {
        weights[which] = (const char *)linear->panels + panels[which] * size;
        for (int token = 0; token < count; token++) sums[which][token][0] = sums[which][token][1] = (floats){};
    }
    for (int64_t i = 0; i < depth; i += 2) {
#pragma GCC unroll 4
        for (int which = 0; which < num_panels; weights[which++] += line) {
            ints low = ((const ints *)weights[which])[0], high = ((const ints *)weights[which])[1];
            for (int64_t at = 0; at < line; at += 64) prefetch(weights[which] + rows->ahead + at, num_panels > 1);
#pragma GCC unroll 12
            for (int token = 0; token < count; token++) {
                const value *pair = input + token * stride + i;
                sums[which][token][0] = dot(sums[which][token][0], low, pair);
                sums[which][token][1] = dot(sums[which][token][1], high, pair);
            }
        }
    }
    for (int which = 0; which < num_panels; which++)
        keep(sums[which], linear, rows, panels[which], first, count);
}

static void multiply_panel_by_vectors(const Linear *linear, const Rows *rows, int64_t panel) {
    int64_t tokens = rows->tokens, tiles = (tokens + TOKENS - 1) / TOKENS;
    for (int64_t tile = 0; tile < tiles; tile++) {
        int64_t first = tokens * tile / tiles, count = tokens * (tile + 1) / tiles - first;
        switch (count) {
#define SOME(n) case n: multiply(linear, rows, &panel, first, n, 1); break;
            SOME(1) SOME(2) SOME(3) SOME(4)
#if TOKENS > 4
            SOME(5) SOME(6) SOME(7) SOME(8) SOME(9) SOME(10) SOME(11) SOME(12)
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

/* Copies the sums of a tile's panel, and adds the bias of the outputs from ``column`` on. */
inlined void add_bias(const void *sums, const Linear *linear, int64_t column, float *to) {
    const floats (*sum)[2] = sums;
    floats bias[2] = {};
    if (linear->bias) memcpy(bias, linear->bias + column, least(OUTPUTS, linear->outputs - column) * sizeof(float));
    for (int64_t row = 0; row < TILE_ROWS; row++)
        for (int half = 0; half < 2; half++) *(floats *)(to + row * OUTPUTS + half * LANES) = sum[row][half] + bias[half];
}

/* Stores a tile's outputs as INPUT_BYTES of the next product's inputs. */
static __attribute__((noinline)) void keep_activated(const void *sums, const void *factors, const Linear *linear,
                                                     const Rows *rows, int64_t panel, int64_t first) {
    const Output *output = &rows->output;
    float values[TILE_ROWS * OUTPUTS], others[TILE_ROWS * OUTPUTS];
    int64_t column = panel * OUTPUTS;
    add_bias(sums, linear, column, values);
    if (output->is_gated) add_bias(factors, linear, linear->outputs / 2 + column, others);
    activate(values, output->is_gated ? others : NULL, values, TILE_ROWS * OUTPUTS, output->activation);
    char *to = (char *)(output->values + first * output->stride) + panel * TILE_ROWS * INPUT_BYTES;
    for (int64_t row = 0; row < TILE_ROWS; row++)
        round_values(values + row * OUTPUTS, to + row * INPUT_BYTES, OUTPUTS, INPUT_BYTES);
}

static void keep_sums(const void *sums, const void *factors, const Linear *linear, const Rows *rows, int64_t panel,
                      int64_t first, int64_t count) {
    if (rows->output.activation) keep_activated(sums, factors, linear, rows, panel, first);
    else keep(sums, linear, rows, panel, first, count);
}

static void multiply_part_of_tiles(const Linear *linear, const Rows *rows, int64_t panel, int64_t at, int64_t some,
                                   int64_t ahead, char *sums) {
    multiply_part(linear, rows, panel, depth_of(linear->inputs) * sizeof(uint16_t), at, some, ahead, sums, 0);
}

static void multiply_by_tiles(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
    multiply_panels_by_tiles(linear, rows, panels, count, depth_of(linear->inputs) * sizeof(uint16_t), 0, keep_sums);
}

void bf16_panel(const Linear *linear, const void *rounded, float *output, int64_t panel) {
    Rows row = {rounded, {output, NULL}, 0, 1, AHEAD};
    if (!tiles_are_granted) {
        multiply_by_vectors(linear, &row, &panel, 1);
        return;
    }
    begin_tiles(1, TILE_BYTES);
    multiply_by_tiles(linear, &row, &panel, 1);
    end_tiles();
}

void bf16_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    int64_t apart = bf16_row(linear->inputs), bytes = depth_of(linear->inputs) * OUTPUTS * sizeof(uint16_t);
    if (tiles_are_granted && tokens > TILE_ROWS) {
        multiply_in_blocks(linear, input, output, tokens, room, apart, bytes / OUTPUTS, NEAR, round_token,
                           multiply_part_of_tiles, keep_sums);
        return;
    }
    Rows rows = {round_together(linear, input, tokens, room, apart, 0, round_token), *output, apart, tokens, 0, 0};
    if (tiles_are_granted) multiply_together_by_tiles(linear, &rows, bytes, INPUT_BYTES, 2, TASK, multiply_by_tiles);
    else multiply_together(linear, &rows, bytes, panels_for(tokens, FOURS, TWOS), TOKENS, BLOCK, TASK, multiply_by_vectors);
}

int64_t bf16_activated(const Linear *up, const Linear *down, int64_t tokens) {
    int is_gated = up->outputs != down->inputs; /* then a panel of gates needs one of factors */
    if (up->kind != BF16 || down->kind != BF16 || !tiles_are_granted || tokens <= TILE_ROWS) return 0;
    return is_gated && down->inputs % OUTPUTS ? 0 : in_whole_tiles(tokens) * bf16_row(down->inputs);
}

/* Products with weights in half precision by AMX, which multiplies bfloat16: each value is the sum of two bfloat16
 * numbers. A half is exactly that; an activation is to 2^-17, if its magnitude is from 2^-110 to bfloat16's largest,
 * 3.39e38. The product of the two smaller ones, at most 2^-16 of the whole, is left out, and sums are float32. So outputs
 * have 4 bits more than those of activations in half precision.
 *
 * Sums are in one order for all numbers of tokens: for each INPUT_BYTES of inputs, those of the activations' rests with
 * the larger part of the weights, then those of their larger part with both. So a token's outputs are bit-identical in
 * any batch.
 *
 * Weights are in panels as those of bf16.c, but a weight is a code that is split within 16 bits: its sign, the last 3 bits
 * of its fraction, its exponent and the first 7 bits of its fraction. Exponents cover all numbers from the smallest half
 * to the largest below halves_limit, without subnormal ones. They are split as they are used: for few tokens a step
 * ahead of the products, so that memory is read all the time; for many tokens once for all of a block.
 */
#include "halves.h"

#include "bf16.h"
#include "tile_products.h"

#define STEP_INPUTS (INPUT_BYTES / 2) /* inputs of a step, which multiplies one tile of each part */
#define TILE (TILE_ROWS * TILE_BYTES) /* bytes of a tile */
#define PARTS (4 * TILE)              /* bytes of a step's weights when they are split */
#define SLAB 4                        /* steps whose split weights stay in the L1 cache */
#define NEARBY 2560                   /* prefetch distance in bytes of weights when they are split a step ahead */
#define LONG_TASK (4 * TASK)          /* a task begins with a wait for memory, and nothing is split meanwhile */
#define LOWEST 24                     /* the smallest half is 2^-24; its exponent's code is 1 */

const int halves_limit = 128; /* the smallest half without a code */

int halves_are_tiled(void) { return tiles_are_granted; }

/* Replaces halves, all of them smaller in magnitude than the limit, by their codes. */
void encode_halves(uint16_t *halves, int64_t count) {
#pragma omp parallel for if (count > 65536)
    for (int64_t i = 0; i < count; i += LANES) {
        ints value = (ints)load_half(halves + i, count - i), size = value & 0x7fffffff;
        ints exponent = (size >> 23) - (127 - LOWEST - 1), fraction = size >> 13;
        ints code = exponent << 7 | (fraction >> 3 & 0x7f) | (fraction & 7) << 12;
        code = ((code & (size > 0)) | (value >> 16 & 0x8000)) & 0xffff;
        float16s packed = __builtin_convertvector(code, float16s);
        memcpy(halves + i, &packed, least(LANES, count - i) * sizeof(uint16_t));
    }
}

inlined int64_t depth_of(int64_t inputs) { return padded(inputs, sizeof(uint16_t)); }

int64_t halves_row(int64_t inputs) { return 2 * depth_of(inputs) * sizeof(uint16_t) + LINE; }

int64_t halves_room(const Linear *linear, int64_t tokens) {
    return rounded_room(linear->inputs, rounded_by_tiles(tokens), halves_row(linear->inputs));
}

/* Splits a token: ``step`` bytes from ``to`` on, one after the other, are INPUT_BYTES of it and then of their rests. */
inlined void split_values(const float *from, void *to, int64_t inputs, int64_t step) {
#if LANES == 16
    for (int64_t i = 0; i < depth_of(inputs); i += LANES) {
        floats value = i < inputs ? load(from + i, inputs - i) : (floats){}, nearest = rounded_bf16(value);
        char *place = (char *)to + i / STEP_INPUTS * 2 * step + i % STEP_INPUTS * sizeof(uint16_t);
        ints parts[2] = {(ints)nearest, (ints)rounded_bf16(value - nearest)};
        for (int part = 0; part < 2; part++)
            *(__m256i *)(place + part * step) = _mm512_cvtepi32_epi16((__m512i)(parts[part] >> 16));
    }
#endif
}

void halves_split(const float *from, void *to, int64_t inputs) { split_values(from, to, inputs, INPUT_BYTES); }

static void split_token(const Linear *linear, const float *from, float *room, void *to, int64_t step) {
    split_values(from, to, linear->inputs, step);
}

#if defined __AMX_BF16__ && defined __AMX_INT8__

/* bfloat16 bits of a rest, by its last 3 bits and the sign, which is in the code's exponent already; a rest that isn't
 * zero is 2^-10 of the exponent's power of two, times 1 to 7. */
#define REST(exponent, fraction) ((127 - LOWEST - 1 - 10 + exponent) << 7 | fraction << 4)
#define RESTS 0, REST(0, 0), REST(1, 0), REST(1, 4), REST(2, 0), REST(2, 2), REST(2, 4), REST(2, 6)
static const uint16_t rests[32] = {RESTS, RESTS, RESTS, RESTS};

inlined __m512i words(int value) { return _mm512_set1_epi16(value); }

/* Splits ``count`` bytes of a step's weights from ``at`` on into its four tiles, one after the other: the first 8 bits of
 * 16 outputs and of 16 more, and their rests. */
inlined void split_weights(const char *from, char *to, int64_t at, int64_t count, int64_t ahead) {
    const __m512i table = _mm512_loadu_si512(rests);
#pragma GCC unroll 4
    for (int64_t end = at + count; at < end; at += 64) {
        __builtin_prefetch(from + ahead + at);
        __m512i code = _mm512_loadu_si512(from + at), rest = _mm512_permutexvar_epi16(_mm512_srli_epi16(code, 12), table);
        __mmask32 is_some = _mm512_test_epi16_mask(code, words(0x0f80)), has_rest = _mm512_test_epi16_mask(code, words(0x7000));
        __m512i first = _mm512_and_si512(code, words((int16_t)0x8fff)), power = _mm512_and_si512(code, words((int16_t)0x8f80));
        char *place = to + at / TILE_LINE * 64 + at % TILE_LINE / 64 * TILE;
        _mm512_store_si512(place, _mm512_maskz_add_epi16(is_some, first, words((127 - LOWEST - 1) << 7)));
        _mm512_store_si512(place + 2 * TILE, _mm512_maskz_add_epi16(has_rest, power, rest));
    }
}

/* Weights that a thread has split before it multiplies them: the first step of panels, or none of panel -1. They are in
 * parts[turn]. */
typedef struct {
    char parts[2][2][PARTS] __attribute__((aligned(64)));
    int64_t panels[2], turn;
} Split;
static __thread Split split;

/* Multiplies one row after the other, ``apart`` bytes each, by ``count`` panels, one or two. */
inlined void multiply_rows(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t steps,
                           char sums[2][SUMS / 2], const int count) {
    const char *weights[2], *last = (const char *)linear->panels + (panels_of(linear) * steps - 1) * TILE_STEP;
    const char *tokens = rows->input;
    Split *own = &split;
    int64_t turn = own->turn, ahead = NEARBY, apart = rows->stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int which = 0; which < count; which++) {
        weights[which] = (const char *)linear->panels + panels[which] * steps * TILE_STEP;
        if (own->panels[which] == panels[which]) continue;
        for (int64_t at = 0; at < ahead; at += 64) __builtin_prefetch(weights[which] + at);
    }
    for (int which = 0; which < count; which++) {
        if (own->panels[which] != panels[which])
            split_weights(weights[which], own->parts[turn][which], 0, TILE_STEP, ahead);
        own->panels[which] = panels[which] + 1;
    }
    if (count == 1) own->panels[1] = -1; /* nothing is split for it */
    for (int64_t at = 0; at < steps; at++, turn = !turn, tokens += 2 * INPUT_BYTES) {
        char(*now)[PARTS] = own->parts[turn], (*later)[PARTS] = own->parts[!turn];
        for (int which = 0; which < count; which++) /* the next panel follows, except after the last one */
            weights[which] = weights[which] < last ? weights[which] + TILE_STEP : last;
        /* the compiler doesn't know that tiles read memory */
#define SPLIT(part) \
        do { \
            for (int64_t line = 0; line < TILE_STEP / 8; line += 64) \
                for (int which = 0; which < count; which++) \
                    split_weights(weights[which], later[which], (part) * TILE_STEP / 8 + line, 64, ahead); \
            __asm__ volatile("" ::: "memory"); \
        } while (0)
#define LOAD(tile, which, number) _tile_loadd(tile, now[which] + (number) * TILE, 64)
        __asm__ volatile("" ::: "memory");
        _tile_loadd(4, tokens, apart);
        _tile_loadd(5, tokens + INPUT_BYTES, apart);
        SPLIT(0);
        LOAD(6, 0, 0);
        _tile_dpbf16ps(0, 5, 6);
        _tile_dpbf16ps(0, 4, 6);
        SPLIT(1);
        LOAD(7, 0, 1);
        _tile_dpbf16ps(1, 5, 7);
        _tile_dpbf16ps(1, 4, 7);
        SPLIT(2);
        if (count == 2) {
            LOAD(6, 1, 0);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(2, 4, 6);
        }
        SPLIT(3);
        if (count == 2) {
            LOAD(7, 1, 1);
            _tile_dpbf16ps(3, 5, 7);
            _tile_dpbf16ps(3, 4, 7);
        }
        SPLIT(4);
        LOAD(6, 0, 2);
        _tile_dpbf16ps(0, 4, 6);
        SPLIT(5);
        LOAD(7, 0, 3);
        _tile_dpbf16ps(1, 4, 7);
        SPLIT(6);
        if (count == 2) {
            LOAD(6, 1, 2);
            _tile_dpbf16ps(2, 4, 6);
        }
        SPLIT(7);
        if (count == 2) {
            LOAD(7, 1, 3);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    own->turn = turn;
    _tile_stored(0, sums[0], TILE_LINE);
    _tile_stored(1, sums[0] + TILE_LINE / 2, TILE_LINE);
    if (count == 1) return;
    _tile_stored(2, sums[1], TILE_LINE);
    _tile_stored(3, sums[1] + TILE_LINE / 2, TILE_LINE);
}

/* Multiplies ``steps`` steps of split weights by those of two tiles of tokens, the second ``apart`` bytes after the first.
 * Without ``is_first`` the products are added to ``sums``. */
inlined void multiply_pair(const char *weights, const char *tokens, int64_t apart, int64_t steps, char *sums,
                           int is_first) {
    const int64_t second = TILE_ROWS * TILE_LINE;
    __asm__ volatile("" ::: "memory");
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, TILE_LINE);
        _tile_loadd(1, sums + TILE_LINE / 2, TILE_LINE);
        _tile_loadd(2, sums + second, TILE_LINE);
        _tile_loadd(3, sums + second + TILE_LINE / 2, TILE_LINE);
    }
    for (int64_t at = 0; at < steps; at++, weights += PARTS, tokens += 2 * TILE) {
        _tile_loadd(4, tokens + TILE, INPUT_BYTES);
        _tile_loadd(6, weights, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, tokens + TILE + apart, INPUT_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(4, tokens, INPUT_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, tokens + apart, INPUT_BYTES);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(6, weights + 2 * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, weights + 3 * TILE, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, TILE_LINE);
    _tile_stored(1, sums + TILE_LINE / 2, TILE_LINE);
    _tile_stored(2, sums + second, TILE_LINE);
    _tile_stored(3, sums + second + TILE_LINE / 2, TILE_LINE);
}

#endif

static void multiply_part_of_halves(const Linear *linear, const Rows *rows, int64_t panel, int64_t at, int64_t some,
                                    int64_t ahead, char *sums) {
#if defined __AMX_BF16__ && defined __AMX_INT8__
    const char *weights = place_in_panels(linear, panel, depth_of(linear->inputs) * sizeof(uint16_t), at);
    char parts[SLAB * PARTS] __attribute__((aligned(64)));
    int64_t steps = some / INPUT_BYTES;
    for (int64_t step = 0; step < steps; step++)
        split_weights(weights + step * TILE_STEP, parts + step * PARTS, 0, TILE_STEP, ahead / INPUT_BYTES * TILE_STEP);
    for (int64_t pair = 0; pair * PAIR_ROWS < rows->tokens; pair++) {
        const char *tokens = rows->input + pair * PAIR_ROWS * rows->stride + at * 2 * TILE_ROWS;
        multiply_pair(parts, tokens, TILE_ROWS * rows->stride, steps, sums + pair * SUMS, at == 0);
    }
#endif
}

/* Forgets what was split: it may be another layer's. */
inlined void begin_splitting(void) {
#if defined __AMX_BF16__ && defined __AMX_INT8__
    split.panels[0] = split.panels[1] = -1;
#endif
}

/* Computes the outputs of one panel or two for all rows. */
static void multiply_panels(const Linear *linear, const Rows *rows, const int64_t *panels, int64_t count) {
#if defined __AMX_BF16__ && defined __AMX_INT8__
    int64_t steps = depth_of(linear->inputs) / STEP_INPUTS;
    char sums[2][SUMS / 2] __attribute__((aligned(64)));
    if (count == 2) multiply_rows(linear, rows, panels, steps, sums, 2);
    else multiply_rows(linear, rows, panels, steps, sums, 1);
    for (int64_t i = 0; i < count; i++) keep((const floats(*)[2])sums[i], linear, rows, panels[i], 0, rows->tokens);
#endif
}

void halves_panel(const Linear *linear, const void *parts, float *output, int64_t panel) {
    Rows row = {parts, {output, NULL}, 0, 1, AHEAD};
    begin_splitting();
    begin_tiles(1, TILE_BYTES);
    multiply_panels(linear, &row, &panel, 1);
    end_tiles();
}

static void keep_halves(const void *sums, const void *factors, const Linear *linear, const Rows *rows, int64_t panel,
                        int64_t first, int64_t count) {
    keep(sums, linear, rows, panel, first, count);
}

void halves_together(const Linear *linear, const Input *input, const Output *output, int64_t tokens, void *room) {
    int64_t apart = halves_row(linear->inputs), depth = depth_of(linear->inputs) * sizeof(uint16_t);
    if (tokens > TILE_ROWS) {
        multiply_in_blocks(linear, input, output, tokens, room, apart, depth, SLAB * INPUT_BYTES, split_token,
                           multiply_part_of_halves, keep_halves);
        return;
    }
    Rows rows = {round_together(linear, input, tokens, room, apart, 0, split_token), *output, apart, tokens, 0, 0};
    begin_splitting();
    multiply_together_by_tiles(linear, &rows, depth * OUTPUTS, INPUT_BYTES, 2, LONG_TASK, multiply_panels);
}

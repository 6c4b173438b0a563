/* Compares the kernels with plain loops, for processors without PyTorch: see test_aarch64.py. Prints what differs. */
#include <math.h>
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

#include "delta_rule.h"
#include "kv_cache.h"
#include "products.h"

int linear(const Linear *linear, const float *input, int64_t stride, float *output, int64_t tokens);
int paged_attention(const Step *step);
int delta_rule(const DeltaStep *step);
extern const int float_outputs, bf16_outputs, int8_outputs, int4_outputs, attention_rows;
extern const int float_multiple, bf16_multiple, int8_multiple; /* of inputs, padded with zeros */

static int failures;

static void expect(int holds, const char *what, double found, double expected) {
    if (holds) return;
    printf("%s: %.9g, not %.9g\n", what, found, expected);
    failures++;
}

/* Whole numbers of at most ``largest``: products of few of them are exact in float32, in any order. */
static float whole(int largest) { return rand() % (2 * largest + 1) - largest; }

/* Packs weights [outputs, inputs] as in_panels of triptych/layers/products.py. */
static void *packed(const float *weights, int64_t outputs, int64_t inputs, int kind) {
    int64_t rows = kind == INT8 ? int8_outputs : kind == BF16 ? bf16_outputs : float_outputs;
    int64_t group = kind == INT8 ? 4 : kind == BF16 ? 2 : 1;
    int64_t multiple = kind == INT8 ? int8_multiple : kind == BF16 ? bf16_multiple : float_multiple;
    int64_t groups = (inputs + multiple - 1) / multiple * multiple / group;
    int64_t panels = (outputs + rows - 1) / rows;
    void *made = aligned_alloc(64, (panels * groups * group * rows * sizeof(float) + 63) / 64 * 64);
    for (int64_t at = 0; at < panels * groups * rows * group; at++) {
        int64_t input = at / (rows * group) % groups * group + at % group;
        int64_t output = at / (rows * group * groups) * rows + at / group % rows;
        float weight = input < inputs && output < outputs ? weights[output * inputs + input] : 0;
        int32_t bits;
        memcpy(&bits, &weight, sizeof bits);
        if (kind == HALF) ((_Float16 *)made)[at] = weight;
        else if (kind == FLOAT) ((float *)made)[at] = weight;
        else if (kind == BF16) ((uint16_t *)made)[at] = bits >> 16;
        else ((int8_t *)made)[at] = weight;
    }
    return made;
}

/* Packs weights of magnitude 7 or less as _in_panels of triptych/layers/int4.py, in groups of 32, with scales of 1. */
static void *packed_int4(const float *weights, int64_t outputs, int64_t inputs, int zeros) {
    int64_t rows = int4_outputs, groups = (inputs + 31) / 32, bytes = rows * (16 + 2 + zeros);
    int64_t size = (outputs + rows - 1) / rows * groups * bytes;
    unsigned char *made = aligned_alloc(64, (size + 63) / 64 * 64);
    memset(made, 0, size);
    for (int64_t at = 0; at < outputs * groups * 32; at++) {
        int64_t output = at / (groups * 32), input = at % (groups * 32), row = output % rows;
        int zero = 8 - output % 2 * (zeros != MIDDLE);
        unsigned char *group = made + (output / rows * groups + input / 32) * bytes, *scales = group + 16 * rows;
        int level = zero + (input < inputs ? weights[output * inputs + input] : 0);
        group[input % 32 / 8 * 4 * rows + 4 * row + input % 8 / 2] |= level << input % 2 * 4;
        ((_Float16 *)scales)[row] = 1;
        if (zeros == ZEROS) scales[2 * rows + row] = zero;
        if (zeros == OFFSETS) ((_Float16 *)scales)[rows + row] = -zero;
    }
    return made;
}

static void check_products(int kind, const char *name, int64_t outputs, int64_t inputs, int64_t tokens) {
    float weights[outputs * inputs], input[tokens * inputs], output[tokens * outputs], bias[outputs], scales[outputs];
    for (int64_t i = 0; i < outputs * inputs; i++) weights[i] = whole(kind == INT4 ? 7 : 127);
    for (int64_t i = 0; i < tokens * inputs; i++) input[i] = i % inputs % 32 ? whole(127) : 127; /* so that int8 is exact */
    for (int64_t i = 0; i < outputs; i++) bias[i] = whole(50), scales[i] = 1;
    int zeros = tokens % 3;
    void *panels = kind == INT4 ? packed_int4(weights, outputs, inputs, zeros)
                                : packed(weights, outputs, inputs, kind);
    Linear layer = {panels, scales, bias, inputs, outputs, kind, 32, zeros};
    expect(linear(&layer, input, inputs, output, tokens), "memory", 0, 1);
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t row = 0; row < outputs; row++) {
            float sum = bias[row], found = output[token * outputs + row];
            for (int64_t i = 0; i < inputs; i++) sum += weights[row * inputs + i] * input[token * inputs + i];
            expect(found == sum, name, found, sum);
        }
    free(panels);
}

static void multiply(const Linear *layer, Input input, Output output, int64_t tokens, void *room) {
    switch (layer->kind) {
    case INT8: int8_together(layer, &input, &output, tokens, room); break;
    case INT4: int4_together(layer, &input, &output, tokens, room); break;
    case BF16: bf16_together(layer, &input, &output, tokens, room); break;
    default: float_together(layer, &input, &output, tokens, room);
    }
}

/* Compares products after a norm or an activation, to which something is added, with those of one token at a time, bit
 * by bit. A team may have fewer threads than OpenMP allows, by which its memory was sized. */
static void check_fused(int kind, const char *name, int64_t tokens, int threads) {
    enum { ROWS = 41, INPUTS = 37, MOST = 33, GUARD = 64 };
    static float weights[ROWS * INPUTS], values[MOST * 2 * INPUTS], by[INPUTS], scales[ROWS];
    static float added[MOST * ROWS], output[MOST * ROWS], expected[MOST * ROWS];
    for (int i = 0; i < ROWS * INPUTS; i++) weights[i] = whole(7);
    for (int i = 0; i < MOST * 2 * INPUTS; i++) values[i] = whole(50) / 16;
    for (int i = 0; i < INPUTS; i++) by[i] = whole(8) / 8;
    for (int i = 0; i < MOST * ROWS; i++) added[i] = whole(50) / 7;
    for (int i = 0; i < ROWS; i++) scales[i] = 1;
    void *panels = kind == INT4 ? packed_int4(weights, ROWS, INPUTS, OFFSETS) : packed(weights, ROWS, INPUTS, kind);
    Linear layer = {panels, scales, NULL, INPUTS, ROWS, kind, 32, OFFSETS};
    Norm rms = {by, NULL, 1e-5f}, centred = {by, by, 1e-5f};
    Activation silu = {SILU}, clamped = {CLAMPED, 1.5f, 1.7f};
    Input inputs[] = {
        {values, INPUTS, &rms}, {values, INPUTS + 3, &centred}, {values, INPUTS, NULL, &silu},
        {values, 2 * INPUTS, NULL, &silu, 1}, {values, 2 * INPUTS, NULL, &clamped, 1},
    };
    int64_t bytes = kind == INT8 ? int8_room(&layer, tokens) : kind == INT4 ? int4_room(&layer, tokens)
                  : kind == BF16 ? bf16_room(&layer, tokens) : float_room(&layer, tokens);
    char *room = aligned_alloc(64, whole_lines(bytes) + GUARD), *single = aligned_alloc(64, 64 * 1024);
    for (int which = 0; which < 5; which++) {
        memset(room + bytes, 77, GUARD);
#pragma omp parallel num_threads(threads)
        multiply(&layer, inputs[which], (Output){output, added}, tokens, room);
        for (int i = 0; i < GUARD; i++) expect(room[bytes + i] == 77, "beyond the room", room[bytes + i], 77);
        for (int64_t token = 0; token < tokens; token++) {
            Input one = inputs[which];
            one.values += token * one.stride;
            multiply(&layer, one, (Output){expected + token * ROWS}, 1, single);
        }
        for (int64_t i = 0; i < tokens * ROWS; i++) {
            expected[i] += added[i];
            expect(output[i] == expected[i], name, output[i], expected[i]);
        }
    }
    free(single);
    free(room);
    free(panels);
}

/* Two sequences over pages in no order: a single new token after four, and seven new ones after two. */
enum { HEADS = 4, KV_HEADS = 2, DIM = 20, PAGE = 4, PAGES = 6, TOKENS = 8 };

/* Keys and values, with room for the widest format. */
static char cache[2][PAGES * PAGE * KV_HEADS * DIM * sizeof(float)] __attribute__((aligned(64)));

static double stored(int which, int64_t slot, int64_t kv, int i, int format) {
    const char *head = cache[which] + (slot * KV_HEADS + kv) * head_bytes(DIM, format);
    if (format == KV_FLOAT) return ((const float *)head)[i];
    if (format == KV_HALF) return ((const _Float16 *)head)[i];
    return ((const int8_t *)head)[i] * (double)stored_scale(head, DIM, KV_INT8);
}

/* With options and ``chunked``, tokens attend to chunks of three tokens instead of to the last three. With ``in_keys``,
   values are the first of the keys' values, and each query head is a group. */
static void check_attention(int format, int with_options, int chunked, int in_keys, const char *name) {
    static const float sinks[HEADS] = {-1, 0, 1, 2};
    int64_t window = with_options ? 3 : 1 << 30, value_dim = in_keys ? DIM - 3 : DIM;
    static float query[TOKENS][HEADS][DIM], new[2][TOKENS][KV_HEADS][DIM], output[TOKENS * HEADS * DIM];
    int64_t pages[] = {4, 1, 0, 5, 2}, page_starts[] = {0, 2}, starts[] = {0, 1}, lens[] = {1, 7}, kv_lens[] = {5, 9};
    int64_t slots[TOKENS], decodes[] = {0}, tiles[2 * TOKENS], num_tiles = 0;
    for (int64_t i = 0; i < TOKENS * HEADS * DIM; i++) (&query[0][0][0])[i] = whole(8) / 8;
    for (int64_t i = 0; i < 2 * TOKENS * KV_HEADS * DIM; i++) (&new[0][0][0][0])[i] = whole(8) / 8;
    for (int64_t head = 0; head < 2 * PAGES * PAGE * KV_HEADS; head++) {
        float past[DIM];
        for (int i = 0; i < DIM; i++) past[i] = whole(8) / 8;
        char *to = cache[head % 2] + head / 2 * head_bytes(DIM, format);
        store_head(to, past, DIM, format);
    }
    for (int64_t which = 0; which < 2; which++)
        for (int64_t i = 0; i < lens[which]; i++) {
            int64_t place = kv_lens[which] - lens[which] + i;
            slots[starts[which] + i] = pages[page_starts[which] + place / PAGE] * PAGE + place % PAGE;
        }
    for (int64_t first = 0; first < lens[1]; first += attention_rows / (in_keys ? 1 : HEADS / KV_HEADS), num_tiles++)
        tiles[2 * num_tiles] = 1, tiles[2 * num_tiles + 1] = first;
    Step step = {
        .query = &query[0][0][0], .key = &new[0][0][0][0], .value = in_keys ? NULL : &new[1][0][0][0], .output = output,
        .keys = cache[0], .values = cache[!in_keys],
        .slots = slots, .query_starts = starts, .query_lens = lens, .kv_lens = kv_lens, .page_starts = page_starts,
        .decodes = decodes, .tiles = tiles, .pages = pages, .num_tokens = TOKENS, .num_sequences = 2, .num_decodes = 1,
        .num_tiles = num_tiles, .num_entries = 5, .heads = HEADS, .kv_heads = KV_HEADS, .groups = in_keys ? HEADS : KV_HEADS, .dim = DIM,
        .value_dim = value_dim, .num_pages = PAGES, .page_size = PAGE, .query_stride = HEADS * DIM, .key_stride = KV_HEADS * DIM, .value_stride = KV_HEADS * DIM,
        .cache_stride = KV_HEADS * head_bytes(DIM, format), .window = window, .chunked = chunked, .causal = 1, .format = format,
        .scale = 0.25f, .cap = with_options ? 2 : 0, .sinks = with_options ? sinks : NULL,
    };
    expect(paged_attention(&step) == 1, "attention's result", 0, 1);
    for (int64_t token = 0; token < TOKENS; token++)
        for (int64_t head = 0; head < HEADS; head++) {
            int64_t which = token > 0, kv = head / (HEADS / KV_HEADS), seen = kv_lens[which] - lens[which] + 1;
            double total = with_options ? exp(sinks[head]) : 0, sums[DIM] = {0};
            int64_t end = seen + token - starts[which];
            int64_t first = chunked ? (end - 1) / window * window : end > window ? end - window : 0;
            for (int64_t key = first; key < end; key++) {
                int64_t slot = pages[page_starts[which] + key / PAGE] * PAGE + key % PAGE;
                double score = 0;
                for (int i = 0; i < DIM; i++)
                    score += query[token][head][i] * stored(0, slot, kv, i, format);
                score /= 4;
                total += score = exp(with_options ? 2 * tanh(score / 2) : score);
                for (int i = 0; i < DIM; i++) sums[i] += score * stored(!in_keys, slot, kv, i, format);
            }
            for (int i = 0; i < value_dim; i++) {
                double found = output[(token * HEADS + head) * value_dim + i], expected = sums[i] / total;
                expect(fabs(found - expected) < 1e-5, name, found, expected);
            }
        }
}

/* Two sequences, of several new tokens and of one, with two value heads that share a key head. */
enum { KEY = 20, VALUE = 12, CHANNELS = 2 * KEY + 2 * VALUE, NEW = 38, SEVERAL = 37 };

/* Divides a query or key by its length. */
static void shorten(double *values, double scale) {
    double sum = 1e-6;
    for (int i = 0; i < KEY; i++) sum += values[i] * values[i];
    for (int i = 0; i < KEY; i++) values[i] *= scale / sqrt(sum);
}

static void check_delta_rule(void) {
    static float mixed[NEW][CHANNELS], a[NEW][2], b[NEW][2], taps[4][CHANNELS], output[NEW][2][VALUE];
    static float recurrent[2][2][KEY][VALUE], conv[2][PAST][CHANNELS];
    static double state[2][2][KEY][VALUE], history[2][PAST + NEW][CHANNELS];
    float rates[] = {0.5f, 2}, biases[] = {-1, 0.25f};
    for (int i = 0; i < NEW * CHANNELS; i++) mixed[0][i] = whole(16) / 8;
    for (int i = 0; i < 4 * CHANNELS; i++) taps[0][i] = whole(8) / 8;
    for (int i = 0; i < NEW * 2; i++) a[0][i] = whole(16) / 4, b[0][i] = whole(16) / 4;
    for (int i = 0; i < 4 * KEY * VALUE; i++) (&state[0][0][0][0])[i] = (&recurrent[0][0][0][0])[i] = whole(8) / 8;
    for (int i = 0; i < 2 * PAST * CHANNELS; i++) conv[0][0][i] = whole(8) / 8;
    for (int slot = 0; slot < 2; slot++)
        for (int i = 0; i < PAST * CHANNELS; i++) history[slot][0][i] = conv[slot][0][i];
    int64_t starts[] = {0, SEVERAL}, lens[] = {SEVERAL, 1}, slots[] = {1, 0}, fresh[] = {0, 0}, which[] = {0, 1};
    DeltaStep step = {
        .mixed = mixed[0], .a = a[0], .b = b[0], .taps = taps[0], .rates = rates, .dt_bias = biases,
        .recurrent = &recurrent[0][0][0][0], .conv = conv[0][0], .output = output[0][0],
        .starts = starts, .lens = lens, .slots = slots, .fresh = fresh, .several = which, .singles = which + 1,
        .num_tokens = NEW, .num_sequences = 2, .num_singles = 1, .num_several = 1, .num_slots = 2,
        .key_heads = 1, .value_heads = 2, .key_dim = KEY, .value_dim = VALUE, .mixed_stride = CHANNELS,
        .a_stride = 2, .b_stride = 2, .recurrent_stride = 2 * KEY * VALUE, .conv_stride = PAST * CHANNELS,
        .past_stride = CHANNELS,
    };
    expect(delta_rule(&step) == 1, "the delta rule's result", 0, 1);
    for (int token = 0; token < NEW; token++) {
        int slot = token < SEVERAL, place = token < SEVERAL ? token : 0;
        double own[CHANNELS];
        for (int i = 0; i < CHANNELS; i++) {
            double sum = 0;
            history[slot][place + PAST][i] = mixed[token][i];
            for (int tap = 0; tap < 4; tap++) sum += taps[tap][i] * history[slot][place + tap][i];
            own[i] = sum / (1 + exp(-sum));
        }
        shorten(own, 1 / sqrt(KEY));
        shorten(own + KEY, 1);
        for (int head = 0; head < 2; head++) {
            double decay = exp(-rates[head] * log1p(exp(a[token][head] + biases[head])));
            double beta = 1 / (1 + exp(-b[token][head])), (*rows)[VALUE] = state[slot][head];
            for (int i = 0; i < VALUE; i++) {
                double change = own[2 * KEY + head * VALUE + i], sum = 0, found = output[token][head][i];
                for (int row = 0; row < KEY; row++) change -= (rows[row][i] *= decay) * own[KEY + row];
                for (int row = 0; row < KEY; row++) sum += (rows[row][i] += beta * change * own[KEY + row]) * own[row];
                expect(fabs(found - sum) < 1e-5, "delta rule", found, sum);
            }
        }
    }
    for (int i = 0; i < 4 * KEY * VALUE; i++) {
        double found = (&recurrent[0][0][0][0])[i], expected = (&state[0][0][0][0])[i];
        expect(fabs(found - expected) < 1e-5, "state", found, expected);
    }
}

int main(void) {
    const char *names[] = {[HALF] = "half", [FLOAT] = "float", [INT8] = "int8", [BF16] = "bf16", [INT4] = "int4"};
    const int64_t shapes[][3] = {{64, 64, 1}, {41, 37, 3}, {5, 3, 13}, {1, 1, 2}, {70, 130, 24}};
    for (int kind = HALF; kind <= INT4; kind++)
        for (int i = 0; i < 5; i++) check_products(kind, names[kind], shapes[i][0], shapes[i][1], shapes[i][2]);
    const int64_t some[] = {0, 1, 2, 4, 5, 16, 17, 33};
    omp_set_num_threads(3);
    for (int kind = HALF; kind <= INT4; kind++)
        for (int i = 0; i < 8; i++) check_fused(kind, names[kind], some[i], 1 + i % 3);
    check_attention(KV_FLOAT, 0, 0, 0, "attention");
    check_attention(KV_HALF, 0, 0, 0, "attention, halves");
    check_attention(KV_INT8, 0, 0, 0, "attention, int8");
    check_attention(KV_FLOAT, 1, 0, 0, "attention with a window, a cap and sinks");
    check_attention(KV_INT8, 1, 0, 0, "attention with a window, a cap and sinks, int8");
    check_attention(KV_FLOAT, 1, 1, 0, "attention in chunks, with a cap and sinks");
    check_attention(KV_FLOAT, 1, 0, 1, "attention with values in keys");
    check_attention(KV_INT8, 0, 0, 1, "attention with values in keys, int8");
    check_delta_rule();
    return failures != 0;
}

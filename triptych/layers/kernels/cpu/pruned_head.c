/* Products of which only the largest outputs are wanted, exactly: a vocabulary's logits. By int8 weights, of which there
 * are half as many bytes to read as of fp16, each output is known to lie between two bounds; those that may be among the
 * largest are computed in full, the others come out as minus infinity.
 *
 * A token x is high + low: its values rounded to 127 steps of either sign, and what that leaves; high is int8 as it is,
 * low is rounded once more, to low + e. With weights w = v + d, of which int8 keeps v,
 *
 *     w x - v (high + low + e) = d x - v e, which is at most |d| |x| + |v| |e|,
 *
 * and by half a step of low's each value of e. The operands' factors have room for the rounding of all these sums, too.
 */
#include <float.h>
#include <math.h>

#include "products.h"
#include "vectors.h"

#define OUTPUTS FLOAT_OUTPUTS
#define MOST 64              /* outputs that may be wanted of a token */
#define STEPS 127.0f
#define SHORTEST 1e-15f      /* a token that squares of floats still tell the length of */
#define STRETCH 2048         /* outputs that a thread takes the bounds of at a time */

typedef struct {
    Linear exact, rough;
    /* [outputs]: how far apart the two may be, times the token's length and times the largest value of low */
    const float *per_length, *per_low;
} PrunedHead;

/* A token's operands and results. */
typedef struct {
    const float *input;
    float *output;
    float *high, *low;    /* [inputs] */
    float *lower, *upper; /* [outputs]; before they are bounds, what high and low come to */
    int32_t *panels;      /* those that have an output that may be among the largest */
    int64_t num_panels;
    float length, largest_low, threshold; /* a lower bound of the smallest output that is wanted */
} Token;

const int pruned_head_most = MOST;
/* Without VNNI int8 takes long to compute with. */
#if defined __AVX512VNNI__ || defined __AVXVNNI__
const int pruned_head_is_faster = 1;
#else
const int pruned_head_is_faster = 0;
#endif

inlined floats size_of(floats x) { return choose(x > 0, x, -x); }

static void split(Token *token, int64_t inputs) {
    floats highest = splat(SMALLEST), squares = {}, left = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats x = load(token->input + i, inputs - i);
        highest = larger(size_of(x), highest);
        squares += x * x;
    }
    float maximum = largest_of(highest), factor = STEPS / maximum, step = maximum / STEPS;
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats x = load(token->input + i, inputs - i), whole = x * factor + ROUNDING;
        floats high = (whole - ROUNDING) * step, low = x - high;
        left = larger(size_of(low), left);
        store(token->high + i, high, inputs - i);
        store(token->low + i, low, inputs - i);
    }
    token->length = sqrtf(sum_of(squares));
    token->largest_low = largest_of(left);
}

static void bound(const PrunedHead *list, Token *token, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += LANES) {
        int64_t left = last - i;
        floats sum = load(token->lower + i, left) + load(token->upper + i, left);
        floats apart = load(list->per_length + i, left) * token->length + load(list->per_low + i, left) * token->largest_low;
        apart += FLT_MIN; /* what falls below it may have been lost */
        store(token->lower + i, sum - apart, left);
        store(token->upper + i, sum + apart, left);
    }
}

/* The largest of a panel's values; there are so many left. */
inlined float highest_of(const float *values, int64_t left) {
    if (left >= OUTPUTS) return largest_of(larger(load(values, LANES), load(values + LANES, LANES)));
    float highest = values[0];
    for (int64_t i = 1; i < left; i++) highest = values[i] > highest ? values[i] : highest;
    return highest;
}

/* Of all values the ``count``-th largest. */
static float smallest_of_largest(const float *values, int64_t num_values, int64_t count) {
    float largest[MOST]; /* from the smallest on */
    for (int64_t i = 0; i < count; i++) largest[i] = -INFINITY;
    for (int64_t first = 0; first < num_values; first += OUTPUTS) {
        if (!(highest_of(values + first, num_values - first) > largest[0])) continue;
        for (int64_t i = first; i < least(first + OUTPUTS, num_values); i++) {
            if (!(values[i] > largest[0])) continue;
            int64_t place = 0;
            for (; place + 1 < count && largest[place + 1] < values[i]; place++) largest[place] = largest[place + 1];
            largest[place] = values[i];
        }
    }
    return largest[0];
}

/* Which panels are to be computed in full: none, if they are more than ``limit``. */
static void choose_panels(Token *token, int64_t outputs, int64_t wanted, int64_t limit) {
    token->num_panels = 0;
    if (!(token->length >= SHORTEST && token->length < INFINITY)) return;
    token->threshold = smallest_of_largest(token->lower, outputs, wanted);
    for (int64_t first = 0; first < outputs; first += OUTPUTS) {
        if (highest_of(token->upper + first, outputs - first) < token->threshold) continue;
        if (token->num_panels == limit) {
            token->num_panels = 0;
            return;
        }
        token->panels[token->num_panels++] = first / OUTPUTS;
    }
    for (int64_t i = 0; i < outputs; i++) token->output[i] = -INFINITY;
}

static void compute(const PrunedHead *list, const Token *token, int64_t panel) {
    int64_t first = panel * OUTPUTS;
    float_panel(&list->exact, token->input, token->output, panel);
    for (int64_t i = first; i < least(first + OUTPUTS, list->exact.outputs); i++)
        if (token->upper[i] < token->threshold) token->output[i] = -INFINITY;
}

/* What of the memory to work in belongs to what, in bytes from its start. */
typedef struct {
    int64_t tokens, halves, sums, panels, end;
} Places;

static int64_t limit_of(int64_t panels) { return least(panels, most(16, panels / 4)); }

static Places places_for(const PrunedHead *list, int64_t tokens) {
    int64_t inputs = list->exact.inputs, outputs = list->exact.outputs, panels = (outputs + OUTPUTS - 1) / OUTPUTS;
    Places places = {.tokens = (int8_room(&list->rough, 2 * tokens) + 63) / 64 * 64};
    places.halves = places.tokens + tokens * sizeof(Token);
    places.sums = places.halves + 2 * tokens * inputs * sizeof(float);
    places.panels = places.sums + 2 * tokens * outputs * sizeof(float);
    places.end = places.panels + tokens * limit_of(panels) * sizeof(int32_t);
    return places;
}

/* Bytes of memory to work in for so many tokens. */
int64_t pruned_head_room(const PrunedHead *list, int64_t tokens) { return places_for(list, tokens).end; }

/* input [tokens, inputs], stride floats from one token to the next, to output [tokens, outputs]; of each token as many of
 * the largest outputs as ``wanted`` [tokens] says, from 1 to MOST. ``found`` [tokens] tells which are done: not those of
 * which too many outputs may be among the largest, nor any with a NaN or an infinity. */
void pruned_head(const PrunedHead *list, const float *input, int64_t stride, float *output, const int64_t *wanted,
               int64_t *found, int64_t tokens, char *room) {
    int64_t inputs = list->exact.inputs, outputs = list->exact.outputs, panels = (outputs + OUTPUTS - 1) / OUTPUTS;
    int64_t limit = limit_of(panels), stretches = (outputs + STRETCH - 1) / STRETCH;
    Places places = places_for(list, tokens);
    Token *all = (Token *)(room + places.tokens);
    float *halves = (float *)(room + places.halves), *sums = (float *)(room + places.sums);
    for (int64_t i = 0; i < tokens; i++) {
        float *high = halves + 2 * i * inputs, *of_high = sums + 2 * i * outputs;
        all[i] = (Token){.input = input + i * stride, .output = output + i * outputs,
                         .high = high, .low = high + inputs, .lower = of_high, .upper = of_high + outputs,
                         .panels = (int32_t *)(room + places.panels) + i * limit};
    }
#pragma omp parallel
    {
#pragma omp for
        for (int64_t i = 0; i < tokens; i++) split(&all[i], inputs);
        int8_together(&list->rough, halves, inputs, sums, 2 * tokens, room);
#pragma omp for
        for (int64_t i = 0; i < tokens * stretches; i++) {
            int64_t first = i % stretches * STRETCH;
            bound(list, &all[i / stretches], first, least(first + STRETCH, outputs));
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tokens; i++) choose_panels(&all[i], outputs, wanted[i], limit);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < tokens * limit; i++) {
            const Token *token = &all[i % tokens];
            if (i / tokens < token->num_panels) compute(list, token, token->panels[i / tokens]);
        }
    }
    for (int64_t i = 0; i < tokens; i++) found[i] = all[i].num_panels;
}

/* A product of which only the largest outputs are needed, exactly: a vocabulary's logits. Int8 weights, half the bytes of
 * fp16, yield a lower and an upper bound of each output. Outputs that may be among the largest are computed in full, the
 * others become minus infinity.
 *
 * A token is split into x = high + low: high are its values rounded to COARSE_LEVELS steps of either sign, which int8
 * represents exactly, and low is the remainder, which is rounded to low + e. With weights w = v + d, where int8
 * represents v,
 *
 *     w x - v (high + low + e) = d x - v e, whose magnitude is at most |d| |x| + |v| |e|,
 *
 * where each value of e is at most half a step of low. The operands' factors include a margin for rounding in all sums.
 * Where the exact product rounds tokens to bfloat16, all of this is about the rounded token. Where it splits them, the
 * margin is 2^-15 larger: halves.c leaves out 2^-16 of a product at most, and rounding rests changes it by about 2^-18.
 */
#include <float.h>
#include <math.h>

#include "bf16.h"
#include "halves.h"
#include "int8_tokens.h"

#define MOST 64              /* maximum number of largest outputs per token */
#define SHORTEST 1e-15f      /* smallest norm of a token that its squares in float32 still yield */
#define STRETCH 2048         /* outputs per task when bounds are computed */

typedef struct {
    Linear exact, rough;
    /* [outputs]: factors of the error bound, per unit of the token's norm and of the largest value of low */
    const float *per_length, *per_low;
} PrunedHead;

/* A token's operands and results. */
typedef struct {
    const float *input;
    void *rounded;        /* the token as an exact product in bfloat16 or by halves.c takes it */
    float *output;
    float *high, *low;    /* [inputs] */
    float *lower, *upper; /* [outputs]: first the products of high and low, then the bounds */
    int32_t *panels;      /* panels with an output that may be among the largest */
    int64_t num_panels;
    float length, largest_low;
    float threshold;      /* a lower bound of the smallest output needed */
} Token;

const int pruned_head_most = MOST;
const int pruned_head_steps = COARSE_LEVELS;
/* Other variants have no instruction for products of bytes. */
const int pruned_head_is_faster = HAS_VNNI || HAS_PAIRS;

inlined floats size_of(floats x) { return choose(x > 0, x, -x); }

/* The token's values from ``i`` on, as the exact product takes them. */
inlined floats as_exact(const Token *token, int64_t i, int64_t inputs, const int is_rounded) {
    floats x = load(token->input + i, inputs - i);
    return is_rounded ? rounded_bf16(x) : x;
}

inlined void split(Token *token, int64_t inputs, const int is_rounded) {
    floats highest = splat(SMALLEST), squares = {}, left = {};
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats x = as_exact(token, i, inputs, is_rounded);
        highest = larger(size_of(x), highest);
        squares += x * x;
    }
    float maximum = largest_of(highest), factor = COARSE_LEVELS / maximum, step = maximum / COARSE_LEVELS;
    for (int64_t i = 0; i < inputs; i += LANES) {
        floats x = as_exact(token, i, inputs, is_rounded), whole = x * factor + ROUNDING;
        floats high = (whole - ROUNDING) * step, low = x - high;
        left = larger(size_of(low), left);
        store(token->high + i, high, inputs - i);
        store(token->low + i, low, inputs - i);
    }
    token->length = sqrtf(sum_of(squares));
    token->largest_low = largest_of(left);
}

static void bound(const PrunedHead *head, Token *token, int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i += LANES) {
        int64_t left = last - i;
        floats sum = load(token->lower + i, left) + load(token->upper + i, left);
        floats apart = load(head->per_length + i, left) * token->length + load(head->per_low + i, left) * token->largest_low;
        apart += head->exact.inputs * FLT_MIN; /* smaller amounts may have underflowed */
        store(token->lower + i, sum - apart, left);
        store(token->upper + i, sum + apart, left);
    }
}

/* The largest of a panel's values, of which ``left`` remain. */
inlined float highest_of(const float *values, int64_t left) {
    if (left >= OUTPUTS) return largest_of(larger(load(values, LANES), load(values + LANES, LANES)));
    float highest = values[0];
    for (int64_t i = 1; i < left; i++) highest = values[i] > highest ? values[i] : highest;
    return highest;
}

/* The ``count``-th largest of all values. */
static float smallest_of_largest(const float *values, int64_t num_values, int64_t count) {
    float largest[MOST]; /* ascending */
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

/* Chooses the panels to compute in full; none, if there would be more than ``limit``. */
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

static void compute(const PrunedHead *head, const Token *token, int64_t panel) {
    int64_t first = panel * OUTPUTS;
    switch (head->exact.kind) {
    case BF16: bf16_panel(&head->exact, token->rounded, token->output, panel); break;
    case SPLIT_HALF: halves_panel(&head->exact, token->rounded, token->output, panel); break;
    default: float_panel(&head->exact, token->input, token->output, panel);
    }
    for (int64_t i = first; i < least(first + OUTPUTS, head->exact.outputs); i++)
        if (token->upper[i] < token->threshold) token->output[i] = -INFINITY;
}

/* Offsets of the parts of the working memory, in bytes. */
typedef struct {
    int64_t rounded, tokens, halves, sums, panels, end;
} Places;

/* Bytes of a token as the exact product takes it, unless that is as it comes. */
static int64_t row_of(const Linear *exact) {
    switch (exact->kind) {
    case BF16: return bf16_row(exact->inputs);
    case SPLIT_HALF: return halves_row(exact->inputs);
    default: return 0;
    }
}

static int64_t limit_of(int64_t panels) { return least(panels, most(16, panels / 4)); }

static Places places_for(const PrunedHead *head, int64_t tokens) {
    int64_t inputs = head->exact.inputs, outputs = head->exact.outputs, panels = (outputs + OUTPUTS - 1) / OUTPUTS;
    Places places = {.rounded = (int8_room(&head->rough, 2 * tokens) + 63) / 64 * 64};
    places.tokens = places.rounded + whole_lines(tokens * row_of(&head->exact));
    places.halves = places.tokens + tokens * sizeof(Token);
    places.sums = places.halves + 2 * tokens * inputs * sizeof(float);
    places.panels = places.sums + 2 * tokens * outputs * sizeof(float);
    places.end = places.panels + tokens * limit_of(panels) * sizeof(int32_t);
    return places;
}

/* Bytes of working memory for ``tokens`` tokens. */
int64_t pruned_head_room(const PrunedHead *head, int64_t tokens) { return places_for(head, tokens).end; }

/* input [tokens, inputs], with stride floats between tokens, to output [tokens, outputs]. Computes the ``wanted``
 * [tokens] largest outputs of each token, from 1 to MOST. ``found`` [tokens] is nonzero for tokens that are done; not
 * done are tokens with a NaN or an infinity, and those with too many outputs that may be among the largest. */
void pruned_head(const PrunedHead *head, const float *input, int64_t stride, float *output, const int64_t *wanted,
               int64_t *found, int64_t tokens, char *room) {
    int64_t inputs = head->exact.inputs, outputs = head->exact.outputs, panels = (outputs + OUTPUTS - 1) / OUTPUTS;
    int64_t limit = limit_of(panels), stretches = (outputs + STRETCH - 1) / STRETCH;
    Places places = places_for(head, tokens);
    Token *all = (Token *)(room + places.tokens);
    float *halves = (float *)(room + places.halves), *sums = (float *)(room + places.sums);
    for (int64_t i = 0; i < tokens; i++) {
        float *high = halves + 2 * i * inputs, *of_high = sums + 2 * i * outputs;
        all[i] = (Token){.input = input + i * stride, .output = output + i * outputs,
                         .rounded = room + places.rounded + i * row_of(&head->exact),
                         .high = high, .low = high + inputs, .lower = of_high, .upper = of_high + outputs,
                         .panels = (int32_t *)(room + places.panels) + i * limit};
    }
#pragma omp parallel
    {
#pragma omp for
        for (int64_t i = 0; i < tokens; i++) {
            if (head->exact.kind == BF16) split(&all[i], inputs, 1);
            else split(&all[i], inputs, 0);
            if (head->exact.kind == BF16) bf16_round(all[i].input, all[i].rounded, inputs);
            if (head->exact.kind == SPLIT_HALF) halves_split(all[i].input, all[i].rounded, inputs);
        }
        int8_together(&head->rough, &(Input){halves, inputs, .is_coarse = 1}, &(Output){sums}, 2 * tokens, room);
#pragma omp for
        for (int64_t i = 0; i < tokens * stretches; i++) {
            int64_t first = i % stretches * STRETCH;
            bound(head, &all[i / stretches], first, least(first + STRETCH, outputs));
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tokens; i++) choose_panels(&all[i], outputs, wanted[i], limit);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < tokens * limit; i++) {
            const Token *token = &all[i % tokens];
            if (i / tokens < token->num_panels) compute(head, token, token->panels[i / tokens]);
        }
    }
    for (int64_t i = 0; i < tokens; i++) found[i] = all[i].num_panels;
}

/* A product of which only the largest outputs are needed, exactly: a vocabulary's logits. Int8 weights, half the bytes of
 * fp16, yield a lower and an upper bound of each output. Panels with an output that may be among the largest are computed
 * in full. Outputs of other panels, and those too small to be needed, become minus infinity.
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
#include "int8.h"
#include "int8_tokens.h"

#define MOST 64              /* maximum number of largest outputs per token */
#define SHORTEST 1e-15f      /* smallest norm of a token that its squares in float32 still yield */
#define PART 16              /* most panels whose outputs are bounded at a time: their sums stay in a cache */

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
    float *lower, *upper; /* [panels]: the largest of the lower and of the upper bounds of a panel's outputs */
    int32_t *chosen;      /* panels with an output that may be among the largest */
    int64_t num_chosen;
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

/* Sets a token's bounds of one panel. ``first`` is the panel's first output, of which ``left`` remain; ``high`` and
 * ``low`` [left] are its products. */
inlined void bound_panel(const PrunedHead *head, Token *token, int64_t first, int64_t left, const float *high,
                         const float *low) {
    floats lower = splat(-INFINITY), upper = splat(-INFINITY);
    for (int64_t i = 0; i < least(left, OUTPUTS); i += LANES) {
        floats sum = load(high + i, left - i) + load(low + i, left - i);
        floats apart = load(head->per_length + first + i, left - i) * token->length;
        apart += load(head->per_low + first + i, left - i) * token->largest_low;
        apart += head->exact.inputs * FLT_MIN; /* smaller amounts may have underflowed */
        ints exists = lanes_below(least(left - i, LANES));
        lower = larger(choose(exists, sum - apart, lower), lower);
        upper = larger(choose(exists, sum + apart, upper), upper);
    }
    token->lower[first / OUTPUTS] = largest_of(lower);
    token->upper[first / OUTPUTS] = largest_of(upper);
}

/* Bounds the outputs of ``count`` panels, up to PART, from ``panel`` on for all tokens, and sets them to minus infinity.
 * ``sums`` is memory for their products. */
static void bound_part(const PrunedHead *head, Token *all, int64_t tokens, const Rows *rounded, int64_t panel,
                       int64_t count, float *sums) {
    int64_t first = panel * OUTPUTS, outputs = least(count * OUTPUTS, head->rough.outputs - first);
    Linear part = head->rough;
    part.panels = (const char *)part.panels + first * padded(part.inputs, sizeof(int8_t));
    part.scales += first;
    part.outputs = outputs;
    Rows rows = *rounded;
    rows.output.values = sums;
    int8_part(&part, &rows);
    for (Token *token = all; token < all + tokens; token++, sums += 2 * outputs) {
        for (int64_t i = 0; i < outputs; i += OUTPUTS)
            bound_panel(head, token, first + i, outputs - i, sums + i, sums + outputs + i);
        for (int64_t i = first; i < first + outputs; i++) token->output[i] = -INFINITY;
    }
}

/* The ``count``-th largest of all values; minus infinity if there are fewer. */
static float smallest_of_largest(const float *values, int64_t num_values, int64_t count) {
    float largest[MOST]; /* ascending */
    for (int64_t i = 0; i < count; i++) largest[i] = -INFINITY;
    for (int64_t i = 0; i < num_values; i++) {
        if (!(values[i] > largest[0])) continue;
        int64_t place = 0;
        for (; place + 1 < count && largest[place + 1] < values[i]; place++) largest[place] = largest[place + 1];
        largest[place] = values[i];
    }
    return largest[0];
}

/* Chooses the panels to compute in full; none, if there would be more than ``limit``. As many outputs as are wanted, each
 * of another panel, are at least ``threshold``. */
static void choose_panels(Token *token, int64_t panels, int64_t wanted, int64_t limit) {
    token->num_chosen = 0;
    if (!(token->length >= SHORTEST && token->length < INFINITY)) return;
    token->threshold = smallest_of_largest(token->lower, panels, wanted);
    for (int64_t panel = 0; panel < panels; panel++) {
        if (token->upper[panel] < token->threshold) continue;
        if (token->num_chosen == limit) {
            token->num_chosen = 0;
            return;
        }
        token->chosen[token->num_chosen++] = (int32_t)panel;
    }
}

static void compute(const PrunedHead *head, const Token *token, int64_t panel) {
    int64_t first = panel * OUTPUTS;
    switch (head->exact.kind) {
    case BF16: bf16_panel(&head->exact, token->rounded, token->output, panel); break;
    case SPLIT_HALF: halves_panel(&head->exact, token->rounded, token->output, panel); break;
    default: float_panel(&head->exact, token->input, token->output, panel);
    }
    for (int64_t i = first; i < least(first + OUTPUTS, head->exact.outputs); i++)
        if (token->output[i] < token->threshold) token->output[i] = -INFINITY;
}

/* Offsets of the parts of the working memory, in bytes. */
typedef struct {
    int64_t rounded, tokens, halves, sums, bounds, chosen, end;
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

/* Bytes of the products of a part. */
static int64_t sums_of(int64_t tokens) { return 2 * tokens * PART * OUTPUTS * sizeof(float); }

static Places places_for(const PrunedHead *head, int64_t tokens) {
    int64_t inputs = head->exact.inputs, panels = panels_of(&head->exact);
    Places places = {.rounded = (int8_room(&head->rough, 2 * tokens) + 63) / 64 * 64};
    places.tokens = places.rounded + whole_lines(tokens * row_of(&head->exact));
    places.halves = places.tokens + tokens * sizeof(Token);
    places.sums = places.halves + 2 * tokens * inputs * sizeof(float);
    places.bounds = places.sums + omp_get_max_threads() * sums_of(tokens);
    places.chosen = places.bounds + 2 * tokens * panels * sizeof(float);
    places.end = places.chosen + tokens * limit_of(panels) * sizeof(int32_t);
    return places;
}

/* Bytes of working memory for ``tokens`` tokens. */
int64_t pruned_head_room(const PrunedHead *head, int64_t tokens) { return places_for(head, tokens).end; }

/* input [tokens, inputs], with stride floats between tokens, to output [tokens, outputs]. Computes the ``wanted``
 * [tokens] largest outputs of each token, from 1 to MOST. ``found`` [tokens] are the numbers of panels computed in full:
 * 0 for tokens that aren't done, which have a NaN, an infinity, or too many outputs that may be among the largest. */
void pruned_head(const PrunedHead *head, const float *input, int64_t stride, float *output, const int64_t *wanted,
               int64_t *found, int64_t tokens, char *room) {
    int64_t inputs = head->exact.inputs, outputs = head->exact.outputs, panels = panels_of(&head->exact);
    int64_t limit = limit_of(panels);
    Places places = places_for(head, tokens);
    Token *all = (Token *)(room + places.tokens);
    float *halves = (float *)(room + places.halves), *bounds = (float *)(room + places.bounds);
    for (int64_t i = 0; i < tokens; i++) {
        float *high = halves + 2 * i * inputs, *lower = bounds + 2 * i * panels;
        all[i] = (Token){.input = input + i * stride, .output = output + i * outputs,
                         .rounded = room + places.rounded + i * row_of(&head->exact),
                         .high = high, .low = high + inputs, .lower = lower, .upper = lower + panels,
                         .chosen = (int32_t *)(room + places.chosen) + i * limit};
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
        Rows rounded = int8_rounded(&head->rough, &(Input){halves, inputs}, 2 * tokens, room);
        float *sums = (float *)(room + places.sums + omp_get_thread_num() * sums_of(tokens));
        int64_t threads = omp_get_num_threads(), count = most(1, least(PART, (panels + threads - 1) / threads));
#pragma omp for schedule(dynamic)
        for (int64_t panel = 0; panel < panels; panel += count)
            bound_part(head, all, tokens, &rounded, panel, count, sums);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tokens; i++) choose_panels(&all[i], panels, wanted[i], limit);
        int64_t longest = 0;
        for (int64_t i = 0; i < tokens; i++) longest = most(longest, all[i].num_chosen);
#pragma omp for schedule(dynamic, 4)
        for (int64_t i = 0; i < tokens * longest; i++) {
            const Token *token = &all[i % tokens];
            if (i / tokens < token->num_chosen) compute(head, token, token->chosen[i / tokens]);
        }
    }
    for (int64_t i = 0; i < tokens; i++) found[i] = all[i].num_chosen;
}

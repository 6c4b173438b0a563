/* Attention from generated tokens (decode): see single_token.c. */
#pragma once
#include "attention.h"

#define MAX_HEADS 32 /* query heads of a token that are processed together */

/* A range of the keys visible to a single token. The results of its spans are combined at the end. */
typedef struct {
    int64_t sequence, start, end;
} Span;

/* Partial results [heads] of each span: the maximum score, the sum of e^(score - maximum), and the sum of the values with
 * these weights, [heads, value_dim]. */
typedef struct {
    float *maxima, *totals, *sums;
} Parts;

/* Writes the spans of all single tokens, in order, unless ``spans`` is NULL; returns their number. */
int64_t find_spans(const Step *step, Span *spans);

/* Attends to a span from some groups of query heads; ``parts`` are those of the first head. */
void attend_span(const Step *step, const Span *span, Parts parts, int64_t first_group, int64_t num_groups);

/* Combines the results of a sequence's spans, of which ``span`` is the first, for one head. */
void add_spans(const Step *step, const Span *span, Parts parts, int64_t head, int64_t spans_left);

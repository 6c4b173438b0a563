/* Attention over a paged KV cache: see attention.c. */
#pragma once
#include <stdint.h>

#include "vectors.h"

#define NEVER -1e30f /* a score below all others; finite, so that the difference of two is a number */
#define TILE 64      /* keys that are scored before their values are summed */

/* A step of S sequences and T new tokens, and one layer's operands. ``PagedTables`` documents the int64 arrays. */
typedef struct {
    const float *query;        /* [T, heads, dim], query_stride floats between tokens */
    const float *key, *value;  /* [T, kv_heads, dim], key_stride and value_stride floats between tokens */
    void *keys, *values;       /* the cache, [pages, page_size, kv_heads] heads, cache_stride bytes between tokens; if both
                                * are the same, values are the first value_dim of keys, and ``value`` is NULL */
    float *output;             /* [T, heads, value_dim] */
    const int64_t *slots, *query_starts, *query_lens, *kv_lens, *page_starts, *decodes, *tiles, *pages;
    const float *sinks;        /* [heads]: logits that take part in the softmax's sum, without a value; or NULL */
    const int64_t *ends;       /* [T]: where the keys end that each token attends to, with ``spans``; or NULL */
    int64_t num_tokens, num_sequences, num_decodes, num_tiles, num_entries; /* num_entries: length of pages */
    int64_t heads, kv_heads, dim, value_dim, num_pages, page_size; /* value_dim: at most dim, of which values are stored */
    int64_t groups;            /* into which query heads are divided; a multiple of kv_heads. Those of a group share a kv
                                * head, and are processed together */
    int64_t query_stride, key_stride, value_stride, cache_stride;
    int64_t window;            /* tokens that each token attends to, at most 2^30; or length of a chunk */
    int64_t chunked;           /* whether tokens attend to their chunk: chunks follow one another from position 0 on */
    int64_t causal;            /* 0 if new tokens attend to their whole sequence, including later tokens */
    int64_t format;            /* of the cache's heads: KV_FLOAT, KV_HALF or KV_INT8 */
    int64_t in_bf16;           /* whether tiles multiply in bfloat16, where the processor can */
    int64_t spans;             /* whether tokens attend to their ``ends``, if there are any, rather than up to themselves */
    float scale;               /* of the products of queries and keys */
    float cap;                 /* scores become cap * tanh(score / cap), unless it is 0 */
} Step;

/* Limits scores softly: nearly the same where they are small, always between -cap and cap. A call, so that code for
 * models without a cap doesn't depend on it. */
static __attribute__((noinline, unused)) void cap_scores(float *scores, int64_t count, float cap) {
    for (int64_t i = 0; i < count; i += LANES) {
        floats limited = cap * hyperbolic_tangent(load(scores + i, count - i) / cap);
        store(scores + i, limited, count - i);
    }
}

/* First key that a token at this position of its sequence attends to. */
static inline int64_t first_read(const Step *step, int64_t position) {
    return step->chunked ? position - position % step->window : most(0, position - step->window + 1);
}

/* End of the keys that a token attends to, given its index in the step, its position and the length of its sequence. */
static inline int64_t key_end(const Step *step, int64_t token, int64_t position, int64_t kv_len) {
    if (!step->spans || !step->ends) return position + 1;
    return least(most(step->ends[token], position + 1), kv_len);
}

/* Bytes of working memory needed; -1 for a slot or page beyond the cache, or too short a page table. */
int64_t attention_room(const Step *step);

/* Writes the new keys and values, then attends. Called by all threads of a team, which share the work; all of it is done
 * when they return. */
void attend_together(const Step *step, void *room);

/* Attention over a paged KV cache: see attention.c. */
#pragma once
#include <stdint.h>

/* A step of S sequences and T new tokens, and one layer's operands. ``PagedTables`` says what the int64 fields are. */
typedef struct {
    const float *query;        /* [T, heads, dim], query_stride floats from one token to the next; so the next two */
    const float *key, *value;  /* [T, kv_heads, dim] */
    void *keys, *values;       /* [pages, page_size, kv_heads, dim], cache_stride elements from one token to the next */
    float *output;             /* [T, heads, dim] */
    const int64_t *slots, *query_starts, *query_lens, *kv_lens, *page_starts, *decodes, *tiles, *pages;
    int64_t num_tokens, num_sequences, num_decodes, num_tiles, num_entries; /* entries: of pages */
    int64_t heads, kv_heads, dim, num_pages, page_size;
    int64_t query_stride, key_stride, value_stride, cache_stride;
    int64_t window;            /* how many tokens each one sees, at most 2^30 */
    int64_t causal;            /* 0 where each of several new tokens sees all of its sequence, later ones too */
    int64_t is_half;           /* whether keys and values are halves, or else floats */
    float scale;
} Step;

/* Bytes of memory to work in; -1 for a slot or a page that the cache doesn't have, or a page table that is too short. */
int64_t attention_room(const Step *step);

/* Writes the new keys and values, then attends. The team's threads share the work, and all of it is done when they
 * return. */
void attend_together(const Step *step, void *room);

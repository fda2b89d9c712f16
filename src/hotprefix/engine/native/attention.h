/* Paged attention; see attention.c. */
#ifndef HP_ATTENTION_H
#define HP_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

/* A ragged batch: request r's new tokens are rows [query_starts[r], query_starts[r + 1]), the last of
 * its context_lens[r] positions; position p lies in page page_table[r * table_width + p / page_size]. */
struct hp_batch {
    const int32_t *query_starts, *context_lens, *page_table;
    size_t requests, table_width, page_size, pages;
};

struct hp_attention {
    size_t heads, kv_heads, head_dim;
    float scale;
    size_t window; /* 0: none */
    int bf16;
};

/* q, out [tokens, heads, head_dim]; pools [pages * page_size, kv_heads, head_dim]. A token at position
 * p sees positions j <= p and, with a window, j > p - window. Returns 0; 1 if memory ran out; 2 if the
 * batch contradicts itself or names a page that does not exist. */
int hp_attention_run(const struct hp_attention *shape, const struct hp_batch *batch, const void *q,
                     const void *k_pool, const void *v_pool, void *out, int threads);

#endif

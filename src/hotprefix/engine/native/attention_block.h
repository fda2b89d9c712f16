/* One block of keys against some query rows; see attention_block.c. */
#ifndef HP_ATTENTION_BLOCK_H
#define HP_ATTENTION_BLOCK_H

#include "attention.h"
#include "tile.h"

#define BLOCK 128  /* key positions of one block; blocks start at multiples of it */
#define MAX_ROWS 96 /* query rows (tokens times heads of a group) computed together */

/* Whether the memory that will be loaded next is prefetched: see attention_block.c. It was measured with
 * AVX2 only, so AVX-512 does without. */
#define LOAD_HELPED (VL < 16)

/* Keys and values that will be loaded next. asked: rows whose memory has been asked for. */
struct upcoming {
    const char *keys, *values;
    size_t slots[BLOCK], count, stride, asked;
};

/* Per-thread memory, rows padded to `width` floats. q holds `cells` cells a row. */
struct block {
    enum kind kind;
    int bf16;
    size_t dim, cells, width;
    float scale;
    float *q, *keys, *values, *scores, *out;
    char *zeros; /* a row of zeros, for keys past the last one */
    float high[MAX_ROWS], sum[MAX_ROWS];
#if LOAD_HELPED
    struct upcoming next; /* set by the caller before a load; count 0: unknown */
#endif
};

size_t hp_block_bytes(size_t head_dim, int bf16);
void hp_block_init(struct block *block, void *memory, const struct hp_attention *shape);

/* Copies one head of one query, `dim` values of the model's type, into row `row`. */
void hp_block_query(struct block *block, size_t row, const void *query);

/* Loads keys and values from the `count` <= BLOCK pool rows `slots`; a row is `stride` values long. The next
 * `soon` values of each row are prefetched: those of this head and of the heads that follow. If LOAD_HELPED,
 * what `next` names is prefetched instead, until the end of `hp_block_attend`. */
void hp_block_load(struct block *block, const char *keys, const char *values, const size_t *slots, size_t count,
                   size_t stride, size_t soon);

/* For each row r: high[r] = the largest scaled score among keys [low[r], end[r]), sum[r] = the sum of
 * e^(score - high), out[r] = the sum of e^(score - high) * value. If there is no key: -inf, 0 and zeros. */
void hp_block_attend(struct block *block, size_t rows, const size_t *low, const size_t *end, size_t count);

/* Adds one block's result to a running one (arXiv 1805.02867): high and sum one value, out `width`. */
void hp_merge(float *high, float *sum, float *out, float block_high, float block_sum, const float *block_out,
              size_t width);

#endif

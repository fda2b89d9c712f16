/* One block of keys against some query rows. Owns: the packing of keys and values, scores, softmax.
 *
 * Rules: a row's result depends only on its query and on the keys it sees. A masked key has weight exactly
 * 0, and memory past the last key is zero, so what else is in the block adds nothing.
 *
 * With few query rows the work on a block takes some microseconds, which is as long as loading its memory
 * takes. Therefore, if LOAD_HELPED, the next block's memory is prefetched in small portions during the work
 * on this one, and keys lie in panels as wide as the register tile. In rows of BLOCK floats, the cells of
 * one key would all be mapped to an eighth of the first-level cache.
 */
#include "attention_block.h"

#define AHEAD 32  /* keys whose memory is asked for before it is needed */
#define PORTION 5 /* keys whose memory is asked for at a time: 128 in the 28 steps of a full block of heads of 64 */
#define KEY_PANEL (TILE_VECS * VL)
#define KEY_STRIDE (LOAD_HELPED ? KEY_PANEL : BLOCK)

INLINE size_t round_up(size_t n) { return (n + VL - 1) / VL * VL; }

static enum kind kind_of(int is_bf16) { return is_bf16 && HAVE_BF16_DOT ? PAIR : FLOAT; }

static size_t floats_of(size_t cells, size_t width) {
    return MAX_ROWS * cells + cells * BLOCK + BLOCK * width + MAX_ROWS * BLOCK + MAX_ROWS * width + width;
}

size_t hp_block_bytes(size_t head_dim, int is_bf16) {
    size_t cells = kind_of(is_bf16) == PAIR ? head_dim / 2 : head_dim;
    return round_up(floats_of(round_up(cells), round_up(head_dim))) * sizeof(float);
}

void hp_block_init(struct block *block, void *memory, const struct hp_attention *shape) {
    block->kind = kind_of(shape->bf16);
    block->bf16 = shape->bf16;
    block->dim = shape->head_dim;
    block->cells = block->kind == PAIR ? shape->head_dim / 2 : shape->head_dim;
    block->width = round_up(shape->head_dim);
    block->scale = shape->scale;
    block->q = memory;
    block->keys = block->q + MAX_ROWS * round_up(block->cells);
    block->values = block->keys + round_up(block->cells) * BLOCK;
    block->scores = block->values + BLOCK * block->width;
    block->out = block->scores + MAX_ROWS * BLOCK;
    block->zeros = (char *)(block->out + MAX_ROWS * block->width);
    memset(block->zeros, 0, block->width * sizeof(float));
#if LOAD_HELPED
    block->next.count = block->next.asked = 0;
#endif
}

void hp_block_query(struct block *block, size_t row, const void *query) {
    float *to = block->q + row * block->cells;
    if (block->kind == PAIR || !block->bf16)
        memcpy(to, query, block->cells * sizeof(float));
    else
        for (size_t i = 0; i < block->dim; i++) to[i] = bf16_to_float(((const bf16 *)query)[i]);
}

/* VL values from row[at] on as float, zero past `dim`. */
INLINE vf values_at(const void *row, size_t at, size_t dim, int is_bf16) {
    if (at + VL <= dim) return is_bf16 ? vload_bf16((const bf16 *)row + at) : vload((const float *)row + at);
    float part[VL] = {0};
    for (size_t i = at; i < dim; i++)
        part[i - at] = is_bf16 ? bf16_to_float(((const bf16 *)row)[i]) : ((const float *)row)[i];
    return vload(part);
}

/* keys[c][k .. k + VL) = cell c of VL keys; if LOAD_HELPED, in panels of KEY_PANEL keys, one after the
 * other. */
INLINE void load_keys(struct block *block, const char *const *rows, size_t key, enum kind kind, int is_bf16) {
    size_t panel = key / KEY_PANEL * KEY_PANEL * round_up(block->cells);
    float *to = block->keys + (LOAD_HELPED ? panel + key % KEY_PANEL : key);
    for (size_t c = 0; c < block->cells; c += VL, to += VL * KEY_STRIDE) {
        vf square[VL];
        if (c + VL <= block->cells && kind == PAIR)
            UNROLL for (size_t i = 0; i < VL; i++) square[i] = vload((const float *)rows[i] + c);
        else /* cells of PAIR are moved as if they were floats */
            UNROLL for (size_t i = 0; i < VL; i++)
                square[i] = values_at(rows[i], c, block->cells, kind == PAIR ? 0 : is_bf16);
        vtranspose(square);
        UNROLL for (size_t i = 0; i < VL; i++) vstore(to + i * KEY_STRIDE, square[i]);
    }
}

/* values[k][d] of VL keys; in PAIR values[k / 2][d] with keys k and k + 1 side by side in one cell. */
INLINE void load_values(struct block *block, const char *const *rows, size_t key, enum kind kind, int is_bf16) {
    size_t step = kind == PAIR ? 2 : 1;
    float *to = block->values + key / step * block->width;
    for (size_t k = 0; k < VL; k += step, to += block->width) {
        size_t d = 0;
        if (LOAD_HELPED) /* does most of the loop below without branches */
            for (; d + 4 * VL <= block->dim; d += 4 * VL)
                UNROLL for (int i = 0; i < 4 * VL; i += VL)
                    vstore(to + d + i, is_bf16 ? vload_bf16((const bf16 *)rows[k] + d + i)
                                               : vload((const float *)rows[k] + d + i));
        for (; d < block->width; d += VL) {
            vf even = values_at(rows[k], d, block->dim, is_bf16);
            if (kind == PAIR) even = (vf)((vu)even >> 16 | (vu)values_at(rows[k + 1], d, block->dim, is_bf16));
            vstore(to + d, even);
        }
    }
}

INLINE void prefetch(const char *row, size_t bytes) {
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at);
}

/* Prefetches the memory of the next `keys` rows of what will be loaded next. */
INLINE void ask(struct block *block, size_t keys) {
#if LOAD_HELPED
    struct upcoming *next = &block->next;
    size_t element = block->bf16 ? sizeof(bf16) : sizeof(float);
    for (; keys > 0 && next->asked < next->count; keys--, next->asked++) {
        size_t at = next->slots[next->asked] * next->stride * element;
        prefetch(next->keys + at, block->dim * element), prefetch(next->values + at, block->dim * element);
    }
#endif
}

INLINE void load(struct block *block, const char *keys, const char *values, const size_t *slots, size_t count,
                 size_t stride, size_t soon, enum kind kind, int is_bf16) {
    size_t element = is_bf16 ? sizeof(bf16) : sizeof(float), bytes = soon * element;
    const char *key_rows[BLOCK], *value_rows[BLOCK];
    for (size_t k = 0; k < round_up(count); k++) {
        key_rows[k] = k < count ? keys + slots[k] * stride * element : block->zeros;
        value_rows[k] = k < count ? values + slots[k] * stride * element : block->zeros;
    }
    for (size_t k = 0; k < count; k += VL) {
        if (LOAD_HELPED)
            ask(block, PORTION);
        else
            for (size_t i = k + AHEAD; i < k + AHEAD + VL && i < count; i++)
                prefetch(key_rows[i], bytes), prefetch(value_rows[i], bytes);
        load_keys(block, key_rows + k, k, kind, is_bf16);
        load_values(block, value_rows + k, k, kind, is_bf16);
    }
}

void hp_block_load(struct block *block, const char *keys, const char *values, const size_t *slots, size_t count,
                   size_t stride, size_t soon) {
    if (block->kind == PAIR)
        load(block, keys, values, slots, count, stride, soon, PAIR, 1);
    else if (block->bf16)
        load(block, keys, values, slots, count, stride, soon, FLOAT, 1);
    else
        load(block, keys, values, slots, count, stride, soon, FLOAT, 0);
}

/* Scores -> weights in place; in PAIR the weights become bfloat16 and fill the first half of the row. */
INLINE void softmax(struct block *block, size_t r, size_t low, size_t end, size_t padded, enum kind kind) {
    float *row = block->scores + r * BLOCK;
    vi lane = vlanes();
    vf highest = vset(-INFINITY), sum = {0};
    for (size_t j = 0; j < padded; j += VL) {
        vf score = vload(row + j) * vset(block->scale);
        if (j < low || j + VL > end) {
            vi place = lane + (int32_t)j;
            score = vselect((place >= (int32_t)low) & (place < (int32_t)end), score, vset(-INFINITY));
        }
        highest = vmax(highest, score);
        vstore(row + j, score);
    }
    float high = vhighest(highest);
    vf shift = vset(high == -INFINITY ? 0.0f : high);
    for (size_t j = 0; j < padded; j += VL) {
        vf weight = vexp(vload(row + j) - shift);
        sum += weight;
        if (kind == PAIR)
            vstore_bf16((bf16 *)row + j, weight);
        else
            vstore(row + j, weight);
    }
    block->high[r] = high;
    block->sum[r] = vsum(sum);
}

/* out[r] = a[r] x b as in hp_tile, in panels of KEY_PANEL columns that lie `panel` floats apart; prefetches
 * in between. */
INLINE void multiply(struct block *block, size_t rows, size_t columns, const float *a, size_t lda, const float *b,
                     size_t ldb, size_t panel, size_t n, float *out, size_t ldo) {
    for (size_t c = 0; c < columns; c += KEY_PANEL, b += panel) {
        size_t left = (columns - c) / VL;
        hp_tile(block->kind, rows, left < TILE_VECS ? left : TILE_VECS, a, lda, b, ldb, n, out + c, ldo);
        ask(block, PORTION);
    }
}

void hp_block_attend(struct block *block, size_t rows, const size_t *low, const size_t *end, size_t count) {
    size_t padded = round_up(count);
    if (LOAD_HELPED)
        multiply(block, rows, padded, block->q, block->cells, block->keys, KEY_PANEL,
                 KEY_PANEL * round_up(block->cells), block->cells, block->scores, BLOCK);
    else
        hp_tile(block->kind, rows, padded / VL, block->q, block->cells, block->keys, BLOCK, block->cells,
                block->scores, BLOCK);
    for (size_t r = 0; r < rows; r++) {
        if (block->kind == PAIR)
            softmax(block, r, low[r], end[r], padded, PAIR);
        else
            softmax(block, r, low[r], end[r], padded, FLOAT);
    }
    size_t steps = block->kind == PAIR ? (count + 1) / 2 : count;
    if (LOAD_HELPED)
        multiply(block, rows, block->width, block->scores, BLOCK, block->values, block->width, KEY_PANEL, steps,
                 block->out, block->width);
    else
        hp_tile(block->kind, rows, block->width / VL, block->scores, BLOCK, block->values, block->width, steps,
                block->out, block->width);
    ask(block, BLOCK);
}

void hp_merge(float *high, float *sum, float *out, float block_high, float block_sum, const float *block_out,
              size_t width) {
    if (block_high == -INFINITY && block_sum == 0.0f) return;
    float top = *high > block_high ? *high : block_high;
    vf old = vset(exp1(*high - top)), new = vset(exp1(block_high - top));
    *high = top;
    *sum = *sum * old[0] + block_sum * new[0];
    for (size_t d = 0; d < width; d += VL) vstore(out + d, vfma(vload(block_out + d), new, vload(out + d) * old));
}

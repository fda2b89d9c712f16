/* Quantised copies of linear weights. Owns: their packed layout, the check that a copy equals the dense
 * weight, and the product with it.
 *
 * Rules: weights are expanded in registers to exactly the numbers the dense layout holds and go into the
 * same chain acc = acc + a[i] * b[i], i ascending, as in tile.c. So a result has the same bits as the dense
 * product's, and less memory is read. Packing compares every weight and refuses a copy that differs.
 * A group's packed form: PANEL scales, PANEL minima (NIBBLES only), then for NIBBLES one byte a column
 * and pair of inner rows (the even row in the low half), for BYTES one byte a column and inner row.
 */
#include "linear_q.h"

#include <stdatomic.h>

#include "parallel.h"

#define GROUP 32 /* weights of one block, along the inner dimension */
#define AHEAD 4  /* groups between the one multiplied and the one prefetched */

/* Block layouts of GGUF (gguf-py/gguf/quants.py defines the values); the numbers are shared with Python. */
enum source { Q4_0 = 1, Q4_1 = 2, Q8_0 = 3 };

static enum form form_of(enum source source) { return source == Q8_0 ? BYTES : NIBBLES; }

static size_t group_bytes(enum form form) {
    return form == BYTES ? PANEL * (2 + GROUP) : PANEL * (4 + GROUP / 2);
}

size_t hp_blocks_panel(enum form form, size_t in) { return in / GROUP * group_bytes(form); }

/* Whether copies of a weight help in this build: 0 they cannot be used, 1 they can, 2 they also make small
 * steps faster (bench/quantised.py; docs/decisions/0009-quantised-decode.md). */
int hp_blocks_use(int is_bf16) { return is_bf16 ? 2 * HAVE_BF16_DOT : VL > 4 ? 2 : 1; }

/* Bytes of the packed form of blocks [out, in / GROUP]. */
size_t hp_blocks_bytes(int source, size_t out, size_t in) {
    return (out + PANEL - 1) / PANEL * hp_blocks_panel(form_of(source), in);
}

/* One block taken apart. */
struct block {
    uint16_t scale, minimum;
    uint8_t q[GROUP];
};

static size_t block_bytes(enum source source) { return source == Q8_0 ? 34 : source == Q4_1 ? 20 : 18; }

static struct block read_block(enum source source, const uint8_t *from) {
    struct block block = {0};
    memcpy(&block.scale, from, 2);
    if (source == Q8_0) {
        memcpy(block.q, from + 2, GROUP);
        return block;
    }
    if (source == Q4_1) memcpy(&block.minimum, from + 2, 2);
    else block.minimum = half_from_float(-8 * half_to_float(block.scale)); /* Q4_0: scale * (q - 8) */
    const uint8_t *q = from + (source == Q4_1 ? 4 : 2);
    for (int j = 0; j < GROUP / 2; j++) block.q[j] = q[j] & 15, block.q[j + GROUP / 2] = q[j] >> 4;
    return block;
}

struct pack {
    enum source source;
    const uint8_t *blocks;
    const void *weight;
    char *to;
    size_t out, in;
    int bf16;
    atomic_int differs;
};

/* Whether the block's values are the dense weights from `at` on. */
static int same(const struct pack *job, const struct block *block, size_t at) {
    float scale = half_to_float(block->scale), minimum = half_to_float(block->minimum);
    for (int k = 0; k < GROUP; k++) {
        float q = job->source == Q8_0 ? (float)(int8_t)block->q[k] : (float)block->q[k];
        float value = scale * q + minimum;
        float dense;
        if (job->bf16) {
            dense = bf16_to_float(((const bf16 *)job->weight)[at + k]);
            value = bf16_to_float(bf16_from_float(value));
        } else {
            dense = ((const float *)job->weight)[at + k];
        }
        if (!(value == dense)) return 0; /* NaN too */
    }
    return 1;
}

static void write_block(enum form form, const struct block *block, char *group, size_t column) {
    memcpy(group + 2 * column, &block->scale, 2);
    if (form == BYTES) {
        for (int k = 0; k < GROUP; k++) group[2 * PANEL + k * PANEL + column] = block->q[k];
        return;
    }
    memcpy(group + 2 * (PANEL + column), &block->minimum, 2);
    for (int k = 0; k < GROUP; k += 2)
        group[4 * PANEL + k / 2 * PANEL + column] = block->q[k] | block->q[k + 1] << 4;
}

static void pack_panel(void *context, size_t panel, int thread) {
    (void)thread;
    struct pack *job = context;
    enum form form = form_of(job->source);
    size_t groups = job->in / GROUP, size = block_bytes(job->source);
    char *to = job->to + panel * hp_blocks_panel(form, job->in);
    memset(to, 0, hp_blocks_panel(form, job->in));
    for (size_t c = 0, column = panel * PANEL; c < PANEL && column < job->out; c++, column++)
        for (size_t g = 0; g < groups; g++) {
            struct block block = read_block(job->source, job->blocks + (column * groups + g) * size);
            if (!same(job, &block, column * job->in + g * GROUP)) job->differs = 1;
            write_block(form, &block, to + g * group_bytes(form), c);
        }
}

/* blocks [out, in / GROUP] as `source` lays them out, into `packed` (hp_blocks_bytes); weight [out, in] is
 * their dense meaning. Returns 0, or 4 if the two differ. */
int hp_blocks_pack(int source, const void *blocks, const void *weight, void *packed, size_t out, size_t in, int is_bf16,
                   int threads) {
    struct pack job = {.source = source, .blocks = blocks, .weight = weight, .to = packed,
                       .out = out, .in = in, .bf16 = is_bf16};
    hp_parallel((out + PANEL - 1) / PANEL, threads, pack_panel, &job);
    return job.differs ? 4 : 0;
}

/* The weights of inner rows k and k + 1 in VL columns, from the group's bytes `q` at the first column. */
INLINE void expand(enum form form, const uint8_t *q, int k, vf scale, vf minimum, vf *even, vf *odd) {
    if (form == NIBBLES) {
        vu both = vload_u8(q + k / 2 * PANEL);
        *even = vfma(scale, vnibble(both), minimum), *odd = vfma(scale, vnibble(both >> 4), minimum);
    } else {
        *even = scale * vload_i8(q + k * PANEL), *odd = scale * vload_i8(q + (k + 1) * PANEL);
    }
}

/* One group added to acc: `vecs` vectors of columns, the first at column `from`; x at the group's first
 * cell. */
INLINE void multiply(enum kind kind, enum form form, int rows, int vecs, const float *x, size_t cells,
                     const char *group, size_t from, vf acc[][TILE_VECS]) {
    vf scale[TILE_VECS], minimum[TILE_VECS] = {0};
    const uint16_t *scales = (const uint16_t *)group + from;
    const uint8_t *q = (const uint8_t *)group + (form == NIBBLES ? 4 : 2) * PANEL + from;
    UNROLL for (int c = 0; c < vecs; c++) {
        scale[c] = vload_half(scales + c * VL);
        if (form == NIBBLES) minimum[c] = vload_half(scales + PANEL + c * VL);
    }
    for (int k = 0; k < GROUP; k += 2)
        UNROLL for (int c = 0; c < vecs; c++) {
            vf even, odd;
            expand(form, q + c * VL, k, scale[c], minimum[c], &even, &odd);
#if HAVE_BF16_DOT
            vf pair = vpair_bf16(even, odd);
            if (kind == PAIR) {
                UNROLL for (int r = 0; r < rows; r++)
                    acc[r][c] = vdot_bf16(acc[r][c], vset(x[r * cells + k / 2]), pair);
                continue;
            }
#endif
            UNROLL for (int r = 0; r < rows; r++) {
                const float *left = x + r * cells + k;
                acc[r][c] = vfma(vset(left[1]), odd, vfma(vset(left[0]), even, acc[r][c]));
            }
        }
}

/* One panel in parts of `vecs` vectors, so that all accumulators stay in registers. */
INLINE void product(enum kind kind, enum form form, int rows, const float *x, size_t cells, const char *panel,
                    size_t in, float *tile) {
    const int vecs = rows <= BLOCKS_ROWS / 2 ? TILE_VECS : TILE_VECS / 2;
    for (size_t from = 0; from < PANEL; from += vecs * VL) {
        vf acc[BLOCKS_ROWS][TILE_VECS] = {0};
        for (size_t g = 0; g < in / GROUP; g++) {
            const char *group = panel + g * group_bytes(form);
            for (size_t at = 0; from == 0 && at < group_bytes(form); at += 64)
                __builtin_prefetch(group + AHEAD * group_bytes(form) + at);
            multiply(kind, form, rows, vecs, x + g * (kind == PAIR ? GROUP / 2 : GROUP), cells, group, from, acc);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int c = 0; c < vecs; c++) vstore(tile + r * PANEL + from + c * VL, acc[r][c]);
    }
}

INLINE void height(enum kind kind, enum form form, size_t rows, const float *x, size_t cells, const char *panel,
                   size_t in, float *tile) {
    switch (rows) {
    case 1: product(kind, form, 1, x, cells, panel, in, tile); break;
    case 2: product(kind, form, 2, x, cells, panel, in, tile); break;
    case 3: product(kind, form, 3, x, cells, panel, in, tile); break;
    case 4: product(kind, form, 4, x, cells, panel, in, tile); break;
    case 5: product(kind, form, 5, x, cells, panel, in, tile); break;
    case 6: product(kind, form, 6, x, cells, panel, in, tile); break;
    case 7: product(kind, form, 7, x, cells, panel, in, tile); break;
    default: product(kind, form, BLOCKS_ROWS, x, cells, panel, in, tile); break;
    }
}

void hp_blocks_tile(enum kind kind, enum form form, size_t rows, const float *x, size_t cells, const char *panel,
                    size_t in, float *tile) {
    if (HAVE_BF16_DOT && kind == PAIR && form == NIBBLES) height(PAIR, NIBBLES, rows, x, cells, panel, in, tile);
    else if (HAVE_BF16_DOT && kind == PAIR) height(PAIR, BYTES, rows, x, cells, panel, in, tile);
    else if (form == NIBBLES) height(FLOAT, NIBBLES, rows, x, cells, panel, in, tile);
    else height(FLOAT, BYTES, rows, x, cells, panel, in, tile);
}

/* Linear layers. Owns: the packed weight layout and the product with it.
 *
 * Rules: a weight is cut into panels of PANEL output columns; within a panel the inner dimension runs
 * slowest, so the kernel reads memory strictly forward and each weight once per block of rows. The last
 * panel is padded with zeros. A row of the result has the same bits whatever other rows are computed with
 * it, also if it is read from the quantised copy because there are few rows (linear_q.c).
 */
#include "linear.h"

#include <stdlib.h>

#include "linear_q.h"
#include "parallel.h"

#define STRIP (2 * TILE_ROWS) /* rows computed before they are written */
#define ROW_BLOCK 192         /* rows of x that stay in a core's cache while weights pass by */

/* Whether a product of many rows is sped up in two ways: the next panel and the lines of the result are
 * prefetched while strips are computed, and bfloat16 weights are widened once for each block of rows, not
 * once for each strip. Measured with AVX2 only, so AVX-512 does without. */
#define HELPED (VL < 16)

_Static_assert(BLOCKS_ROWS <= STRIP, "a small step is one tile");

static enum kind kind_of(int is_bf16) { return !is_bf16 ? FLOAT : HAVE_BF16_DOT ? PAIR : WIDE; }

static size_t panels_of(size_t out) { return (out + PANEL - 1) / PANEL; }

/* Bytes of a packed weight [out, in]. */
size_t hp_linear_bytes(size_t out, size_t in, int is_bf16) {
    return panels_of(out) * PANEL * in * (is_bf16 ? sizeof(bf16) : sizeof(float));
}

struct pack {
    const char *from;
    char *to;
    size_t out, in, cell; /* in: cells of the inner dimension; cell: bytes of one */
};

static void pack_panel(void *context, size_t panel, int thread) {
    (void)thread;
    const struct pack *job = context;
    char *to = job->to + panel * PANEL * job->in * job->cell;
    for (size_t i = 0; i < job->in; i++)
        for (size_t c = 0; c < PANEL; c++, to += job->cell) {
            size_t column = panel * PANEL + c;
            if (column < job->out)
                memcpy(to, job->from + (column * job->in + i) * job->cell, job->cell);
            else
                memset(to, 0, job->cell);
        }
}

/* weight [out, in], row-major, into `packed` (hp_linear_bytes); `in` is even if bfloat16. */
void hp_linear_pack(const void *weight, void *packed, size_t out, size_t in, int is_bf16, int threads) {
    struct pack job = {.from = weight, .to = packed, .out = out, .in = in, .cell = is_bf16 ? 2 : 4};
    if (kind_of(is_bf16) == PAIR) job.in /= 2, job.cell = 4;
    hp_parallel(panels_of(out), threads, pack_panel, &job);
}

struct product {
    const struct hp_linear *layer;
    const float *x; /* [rows, cells]; cells as in tile.h */
    size_t rows, cells, panels, blocks;
    enum kind kind;
    void *y;
    int y_bf16;
    float *widened; /* per thread, a panel of WIDE as floats; NULL if there are too few rows to be worth it */
};

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* `store_rows` for a panel without padding columns. */
INLINE void store_whole_rows(const struct product *job, const float *tile, size_t row, size_t rows, size_t column) {
    const float *bias = job->layer->bias;
    size_t at = row * job->layer->out + column;
    for (size_t r = 0; r < rows; r++, tile += PANEL, at += job->layer->out)
        UNROLL for (int c = 0; c < PANEL; c += VL) {
            vf value = vload(tile + c);
            if (bias) value += vload(bias + column + c);
            if (job->y_bf16)
                vstore_bf16((bf16 *)job->y + at + c, value);
            else
                vstore((float *)job->y + at + c, value);
        }
}

/* Adds the bias to `rows` rows of one panel, converts and writes them. */
static void store_rows(const struct product *job, const float *tile, size_t row, size_t rows, size_t column) {
    size_t out = job->layer->out, count = out - column < PANEL ? out - column : PANEL;
    const float *bias = job->layer->bias;
    if (HELPED && count == PANEL) {
        store_whole_rows(job, tile, row, rows, column);
        return;
    }
    for (size_t r = 0; r < rows; r++, tile += PANEL) {
        float biased[PANEL];
        for (size_t c = 0; c < count; c++) biased[c] = bias ? tile[c] + bias[column + c] : tile[c];
        size_t at = (row + r) * out + column, c = 0;
        if (!job->y_bf16) {
            memcpy((float *)job->y + at, biased, count * sizeof(float));
            continue;
        }
        bf16 *y = (bf16 *)job->y + at;
        for (; c + VL <= count; c += VL) vstore_bf16(y + c, vload(biased + c));
        for (; c < count; c++) y[c] = bf16_from_float(biased[c]);
    }
}

/* Rows [first, last) times one panel of a product that is HELPED. */
static void run_helped(const struct product *job, size_t panel, size_t first, size_t last, int thread) {
    size_t cells = job->cells, count = cells * PANEL, size = job->kind == WIDE ? sizeof(bf16) : sizeof(float);
    size_t y_size = job->y_bf16 ? sizeof(bf16) : sizeof(float), strips = (last - first + STRIP - 1) / STRIP;
    size_t share = (count * size / strips + 63) / 64 * 64; /* of the next panel, for each strip */
    const char *weight = (const char *)job->layer->weight + panel * count * size, *next = weight + count * size;
    const float *right = (const float *)weight;
    float tile[STRIP * PANEL];
    if (job->widened) {
        float *wide = job->widened + (size_t)thread * count;
        for (size_t i = 0; i < count; i += VL) vstore(wide + i, vload_bf16((const bf16 *)weight + i));
        right = wide;
    }
    for (size_t row = first; row < last; row += STRIP, next += share) {
        size_t rows = least(STRIP, last - row);
        for (size_t at = 0; at < share; at += 64) __builtin_prefetch(next + at);
        for (size_t r = row; r < row + rows; r++)
            __builtin_prefetch((char *)job->y + (r * job->layer->out + panel * PANEL) * y_size, 1);
        hp_tile(FLOAT, rows, TILE_VECS, job->x + row * cells, cells, right, PANEL, cells, tile, PANEL);
        store_rows(job, tile, row, rows, panel * PANEL);
    }
}

static void run_unit(void *context, size_t unit, int thread) {
    const struct product *job = context;
    const struct hp_linear *layer = job->layer;
    size_t panel = unit % job->panels, block = unit / job->panels, cells = job->cells;
    size_t first = job->rows * block / job->blocks, last = job->rows * (block + 1) / job->blocks;
    size_t panel_bytes = PANEL * cells * (job->kind == WIDE ? sizeof(bf16) : sizeof(float));
    const char *weight = (const char *)layer->weight + panel * panel_bytes;
    float tile[STRIP * PANEL];
    if (layer->blocks && job->rows <= BLOCKS_ROWS) {
        const char *blocks = (const char *)layer->blocks + panel * hp_blocks_panel(layer->form, layer->in);
        hp_blocks_tile(job->kind, layer->form, job->rows, job->x, cells, blocks, layer->in, tile);
        store_rows(job, tile, 0, job->rows, panel * PANEL);
        return;
    }
    if (HELPED && job->rows > STRIP) {
        run_helped(job, panel, first, last, thread);
        return;
    }
    for (size_t row = first; row < last; row += STRIP) {
        size_t rows = least(STRIP, last - row);
        hp_tile(job->kind, rows, TILE_VECS, job->x + row * cells, cells, weight, PANEL, cells, tile, PANEL);
        store_rows(job, tile, row, rows, panel * PANEL);
    }
}

struct widen {
    const bf16 *from;
    float *to;
    size_t count;
};

static void widen_row(void *context, size_t unit, int thread) {
    (void)thread;
    const struct widen *job = context;
    for (size_t i = unit * job->count; i < (unit + 1) * job->count; i++) job->to[i] = bf16_to_float(job->from[i]);
}

int hp_linear_run(const struct hp_linear *layer, const void *x, size_t rows, void *y, int y_bf16, int threads) {
    struct product job = {.layer = layer, .x = x, .rows = rows, .cells = layer->in, .kind = kind_of(layer->bf16),
                          .panels = panels_of(layer->out), .blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, .y = y, .y_bf16 = y_bf16};
    float *wide = NULL;
    if (job.kind == PAIR) job.cells /= 2;
    if (job.kind == WIDE) {
        size_t panels = HELPED && rows > STRIP ? (size_t)threads * PANEL : 0;
        if (!(wide = hp_scratch((rows + panels) * layer->in * sizeof(float)))) return 1;
        struct widen widening = {.from = x, .to = wide, .count = layer->in};
        hp_parallel(rows, threads, widen_row, &widening);
        job.x = wide;
        if (panels) job.widened = wide + rows * layer->in;
    }
    hp_parallel(job.blocks * job.panels, threads, run_unit, &job);
    free(wide);
    return 0;
}

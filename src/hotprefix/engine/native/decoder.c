/* All layers of one step. Owns: the order of operations in a decoder layer.
 *
 * Rules: a step runs the same kernels in the same order as a caller that runs them one by one, so results
 * have the same bits. One call for each step saves the overhead of a call for each operation, which at
 * small batches is a large part of the time. All of a layer's keys and values are written before its
 * attention reads any.
 */
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "linear.h"
#include "parallel.h"
#include "rows.h"

struct hp_layer {
    struct hp_linear qkv, output, gate_up, down;
    const float *input_norm, *middle_norm, *q_norm, *k_norm; /* the last two may be NULL */
    size_t window;                                           /* 0: none */
    int rotates;
};

struct hp_decoder {
    const struct hp_layer *layers;
    size_t count, heads, kv_heads, head_dim, hidden, inner;
    const float *final_norm;
    float eps, scale;
    int bf16;
};

/* A step as some layers see it: where they write, and where they find what was written. */
struct hp_view {
    const struct hp_batch *batch;
    const int64_t *slots; /* as in rows.h */
    size_t pool_rows;
};

/* What one step brings: rows tokens; cos and sin as in rows.h; keys[i], values[i] layer i's pool; seen[i]
 * the step as layer i sees it.
 * kept: the rows, ascending, whose final states are wanted (kept_rows of them); NULL: all. Nothing reads
 * the others once the last layer's keys and values are written, so its second half skips them. */
struct hp_step {
    const struct hp_view *const *seen;
    size_t rows;
    const int64_t *kept;
    size_t kept_rows;
    const float *cos, *sin;
    void *const *keys, *const *values;
    int threads;
};

struct buffers {
    void *x, *wide, *q, *attended; /* [rows, hidden], [rows, widest projection], twice [rows, heads * head_dim] */
};

/* Moves the kept rows of data to its start; row: bytes of one. */
static void keep_rows(const struct hp_step *step, void *data, size_t row) {
    for (size_t k = 0; k < step->kept_rows; k++)
        memmove((char *)data + k * row, (char *)data + (size_t)step->kept[k] * row, row);
}

/* Attention of layer i. rows: on entry the step's rows; on return the number that is still wanted. */
static int attend(const struct hp_decoder *model, const struct hp_step *step, size_t i, const struct buffers *buffers,
                  void *residual, size_t *rows) {
    const struct hp_layer *layer = &model->layers[i];
    const struct hp_view *seen = step->seen[i];
    struct hp_rope rope = {
        .heads = model->heads, .kv_heads = model->kv_heads, .head_dim = model->head_dim, .eps = model->eps,
        .cos = layer->rotates ? step->cos : NULL, .sin = layer->rotates ? step->sin : NULL,
        .q_norm = layer->q_norm, .k_norm = layer->k_norm,
    };
    struct hp_attention shape = {model->heads, model->kv_heads, model->head_dim,
                                 model->scale, layer->window,   model->bf16};
    int bf16 = model->bf16, threads = step->threads;
    size_t element = bf16 ? 2 : 4;
    int failed = hp_linear_run(&layer->qkv, buffers->x, step->rows, buffers->wide, bf16, threads);
    if (!failed)
        failed = hp_rope_write(&rope, buffers->wide, seen->slots, buffers->q, step->keys[i], step->values[i],
                               seen->pool_rows, step->rows, bf16, threads);
    if (!failed)
        failed = hp_attention_run(&shape, seen->batch, buffers->q, step->keys[i], step->values[i],
                                  buffers->attended, threads);
    if (!failed && step->kept && i + 1 == model->count) {
        keep_rows(step, buffers->attended, model->heads * model->head_dim * element);
        keep_rows(step, residual, model->hidden * element);
        *rows = step->kept_rows;
    }
    if (!failed) failed = hp_linear_run(&layer->output, buffers->attended, *rows, buffers->x, bf16, threads);
    return failed;
}

static int feed_forward(const struct hp_decoder *model, size_t rows, int threads, size_t i,
                        const struct buffers *buffers) {
    const struct hp_layer *layer = &model->layers[i];
    int bf16 = model->bf16;
    char *activated = (char *)buffers->wide + rows * 2 * model->inner * (bf16 ? 2 : 4);
    int failed = hp_linear_run(&layer->gate_up, buffers->x, rows, buffers->wide, bf16, threads);
    if (failed) return failed;
    hp_silu_mul(buffers->wide, activated, rows, model->inner, bf16, threads);
    return hp_linear_run(&layer->down, activated, rows, buffers->x, bf16, threads);
}

static int run_layers(const struct hp_decoder *model, const struct hp_step *step, void *residual, void *states,
                      const struct buffers *buffers) {
    size_t rows = step->rows, hidden = model->hidden;
    int bf16 = model->bf16, threads = step->threads, failed = 0;
    hp_norm(residual, NULL, model->layers[0].input_norm, model->eps, buffers->x, rows, hidden, bf16, threads);
    for (size_t i = 0; i < model->count && !failed; i++) {
        int last = i + 1 == model->count;
        const float *next = last ? model->final_norm : model->layers[i + 1].input_norm;
        if ((failed = attend(model, step, i, buffers, residual, &rows))) break;
        hp_norm(buffers->x, residual, model->layers[i].middle_norm, model->eps, buffers->x, rows, hidden, bf16, threads);
        if ((failed = feed_forward(model, rows, threads, i, buffers))) break;
        hp_norm(buffers->x, residual, next, model->eps, last ? states : buffers->x, rows, hidden, bf16, threads);
    }
    return failed;
}

/* residual [rows, hidden]: the embedded tokens, overwritten. states [kept_rows or rows, hidden]: the last
 * layer's output, normed. Returns 0, or the status of the operation that failed. */
int hp_decoder_run(const struct hp_decoder *model, const struct hp_step *step, void *residual, void *states) {
    size_t element = model->bf16 ? 2 : 4, q_width = model->heads * model->head_dim;
    size_t qkv_width = q_width + 2 * model->kv_heads * model->head_dim;
    size_t wide = 3 * model->inner > qkv_width ? 3 * model->inner : qkv_width;
    size_t widths[] = {model->hidden, wide, q_width, q_width}, total = 0;
    for (int i = 0; i < 4; i++) total += (step->rows * widths[i] * element + 63) / 64 * 64;
    char *memory = hp_scratch(total);
    if (!memory) return 1;
    void *parts[4], *at = memory;
    for (int i = 0; i < 4; i++) {
        parts[i] = at;
        at = (char *)at + (step->rows * widths[i] * element + 63) / 64 * 64;
    }
    struct buffers buffers = {parts[0], parts[1], parts[2], parts[3]};
    int failed = run_layers(model, step, residual, states, &buffers);
    free(memory);
    return failed;
}

/* Row-wise operations. Owns: RMS norm, silu-and-multiply, rotary embedding with the write into the pool.
 *
 * Rules: each row is computed alone and in float, so its result does not depend on the batch. Rounding
 * to bfloat16 happens at the places where it would in a reference that stores each operation's result in
 * bfloat16: after the residual's addition and at the end of each operation, not in between.
 */
#include "rows.h"

#include "parallel.h"
#include "simd.h"

#define ROWS_PER_UNIT 16

INLINE vf load(const void *p, size_t i, int is_bf16) {
    return is_bf16 ? vload_bf16((const bf16 *)p + i) : vload((const float *)p + i);
}
INLINE void store(void *p, size_t i, vf v, int is_bf16) {
    if (is_bf16)
        vstore_bf16((bf16 *)p + i, v);
    else
        vstore((float *)p + i, v);
}
INLINE float get(const void *p, size_t i, int is_bf16) {
    return is_bf16 ? bf16_to_float(((const bf16 *)p)[i]) : ((const float *)p)[i];
}
INLINE void put(void *p, size_t i, float x, int is_bf16) {
    if (is_bf16)
        ((bf16 *)p)[i] = bf16_from_float(x);
    else
        ((float *)p)[i] = x;
}

/* 1 / sqrt(mean(x^2) + eps) of x[at .. at + width). */
INLINE float inverse_rms(const void *x, size_t at, size_t width, float eps, int is_bf16) {
    vf squares = {0};
    size_t i = 0;
    for (; i + VL <= width; i += VL) {
        vf v = load(x, at + i, is_bf16);
        squares = vfma(v, v, squares);
    }
    float sum = vsum(squares);
    for (; i < width; i++) sum += get(x, at + i, is_bf16) * get(x, at + i, is_bf16);
    return 1.0f / sqrtf(sum / (float)width + eps);
}

INLINE void scale_row(const void *x, size_t at, const float *weight, float factor, void *out, size_t to,
                      size_t width, int is_bf16) {
    size_t i = 0;
    for (; i + VL <= width; i += VL)
        store(out, to + i, load(x, at + i, is_bf16) * vset(factor) * vload(weight + i), is_bf16);
    for (; i < width; i++) put(out, to + i, get(x, at + i, is_bf16) * factor * weight[i], is_bf16);
}

INLINE void add_row(void *residual, const void *x, size_t at, size_t width, int is_bf16) {
    size_t i = 0;
    for (; i + VL <= width; i += VL)
        store(residual, at + i, load(residual, at + i, is_bf16) + load(x, at + i, is_bf16), is_bf16);
    for (; i < width; i++)
        put(residual, at + i, get(residual, at + i, is_bf16) + get(x, at + i, is_bf16), is_bf16);
}

struct norm {
    const void *x;
    void *residual;
    const float *weight;
    float eps;
    void *out;
    size_t rows, width;
    int bf16;
};

INLINE void norm_rows(const struct norm *job, size_t first, size_t last, int is_bf16) {
    for (size_t row = first; row < last; row++) {
        size_t at = row * job->width;
        const void *x = job->x;
        if (job->residual) {
            add_row(job->residual, x, at, job->width, is_bf16);
            x = job->residual;
        }
        float factor = inverse_rms(x, at, job->width, job->eps, is_bf16);
        scale_row(x, at, job->weight, factor, job->out, at, job->width, is_bf16);
    }
}

static size_t units_of(size_t rows) { return (rows + ROWS_PER_UNIT - 1) / ROWS_PER_UNIT; }

static size_t last_of(size_t unit, size_t rows) {
    size_t last = (unit + 1) * ROWS_PER_UNIT;
    return last < rows ? last : rows;
}

static void norm_unit(void *context, size_t unit, int thread) {
    (void)thread;
    const struct norm *job = context;
    size_t first = unit * ROWS_PER_UNIT, last = last_of(unit, job->rows);
    if (job->bf16)
        norm_rows(job, first, last, 1);
    else
        norm_rows(job, first, last, 0);
}

void hp_norm(const void *x, void *residual, const float *weight, float eps, void *out, size_t rows, size_t width,
             int is_bf16, int threads) {
    struct norm job = {x, residual, weight, eps, out, rows, width, is_bf16};
    hp_parallel(units_of(rows), threads, norm_unit, &job);
}

struct silu {
    const void *gate_up;
    void *out;
    size_t rows, width;
    int bf16;
};

INLINE vf silu(vf x) { return x / (vset(1.0f) + vexp(-x)); }

INLINE void silu_rows(const struct silu *job, size_t first, size_t last, int is_bf16) {
    for (size_t row = first; row < last; row++) {
        size_t gate = row * 2 * job->width, up = gate + job->width, to = row * job->width, i = 0;
        for (; i + VL <= job->width; i += VL)
            store(job->out, to + i, silu(load(job->gate_up, gate + i, is_bf16)) * load(job->gate_up, up + i, is_bf16),
                  is_bf16);
        for (; i < job->width; i++)
            put(job->out, to + i,
                silu(vset(get(job->gate_up, gate + i, is_bf16)))[0] * get(job->gate_up, up + i, is_bf16), is_bf16);
    }
}

static void silu_unit(void *context, size_t unit, int thread) {
    (void)thread;
    const struct silu *job = context;
    size_t first = unit * ROWS_PER_UNIT, last = last_of(unit, job->rows);
    if (job->bf16)
        silu_rows(job, first, last, 1);
    else
        silu_rows(job, first, last, 0);
}

void hp_silu_mul(const void *gate_up, void *out, size_t rows, size_t width, int is_bf16, int threads) {
    struct silu job = {gate_up, out, rows, width, is_bf16};
    hp_parallel(units_of(rows), threads, silu_unit, &job);
}

struct rope {
    const struct hp_rope *rope;
    const void *qkv;
    const int64_t *slots;
    void *q, *k_pool, *v_pool;
    size_t rows;
    int bf16;
};

/* Norms one head from x[at] (if weight is given), rotates it and writes it to out[to]; out may be x itself. */
INLINE void turn_head(const struct hp_rope *rope, const float *weight, size_t row, const void *x, size_t at,
                      void *out, size_t to, int is_bf16) {
    size_t half = rope->head_dim / 2, i = 0;
    float factor = 1.0f;
    if (weight) factor = inverse_rms(x, at, rope->head_dim, rope->eps, is_bf16);
    const float *cos = rope->cos ? rope->cos + row * half : NULL, *sin = cos ? rope->sin + row * half : NULL;
    for (; i + VL <= half; i += VL) {
        vf a = load(x, at + i, is_bf16), b = load(x, at + half + i, is_bf16);
        if (weight) a *= vset(factor) * vload(weight + i), b *= vset(factor) * vload(weight + half + i);
        vf c = vset(1.0f), s = {0};
        if (cos) c = vload(cos + i), s = vload(sin + i);
        store(out, to + i, a * c - b * s, is_bf16);
        store(out, to + half + i, b * c + a * s, is_bf16);
    }
    for (; i < half; i++) {
        float a = get(x, at + i, is_bf16), b = get(x, at + half + i, is_bf16);
        if (weight) a *= factor * weight[i], b *= factor * weight[half + i];
        float c = cos ? cos[i] : 1.0f, s = cos ? sin[i] : 0.0f;
        put(out, to + i, a * c - b * s, is_bf16);
        put(out, to + half + i, b * c + a * s, is_bf16);
    }
}

INLINE void rope_rows(const struct rope *job, size_t first, size_t last, int is_bf16) {
    const struct hp_rope *rope = job->rope;
    size_t heads = rope->heads, kv_heads = rope->kv_heads, dim = rope->head_dim, element = is_bf16 ? 2 : 4;
    for (size_t row = first; row < last; row++) {
        size_t from = row * (heads + 2 * kv_heads) * dim, slot = (size_t)job->slots[row] * kv_heads * dim;
        for (size_t h = 0; h < heads; h++)
            turn_head(rope, rope->q_norm, row, job->qkv, from + h * dim, job->q, (row * heads + h) * dim, is_bf16);
        for (size_t h = 0; h < kv_heads; h++)
            turn_head(rope, rope->k_norm, row, job->qkv, from + (heads + h) * dim, job->k_pool, slot + h * dim,
                      is_bf16);
        memcpy((char *)job->v_pool + slot * element,
               (const char *)job->qkv + (from + (heads + kv_heads) * dim) * element, kv_heads * dim * element);
    }
}

static void rope_unit(void *context, size_t unit, int thread) {
    (void)thread;
    const struct rope *job = context;
    size_t first = unit * ROWS_PER_UNIT, last = last_of(unit, job->rows);
    if (job->bf16)
        rope_rows(job, first, last, 1);
    else
        rope_rows(job, first, last, 0);
}

int hp_rope_write(const struct hp_rope *rope, const void *qkv, const int64_t *slots, void *q, void *k_pool,
                  void *v_pool, size_t pool_rows, size_t rows, int is_bf16, int threads) {
    struct rope job = {rope, qkv, slots, q, k_pool, v_pool, rows, is_bf16};
    for (size_t row = 0; row < rows; row++)
        if (slots[row] < 0 || (size_t)slots[row] >= pool_rows) return 3;
    hp_parallel(units_of(rows), threads, rope_unit, &job);
    return 0;
}

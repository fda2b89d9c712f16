/* Row-wise operations; see rows.c. Activations are float or bfloat16 (`bf16` says which), norm weights
 * and rope tables float. */
#ifndef HP_ROWS_H
#define HP_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* out = rms_norm(x) * weight for rows [rows, width]. If residual is given, x is added to it first, and the
 * sum is normed. */
void hp_norm(const void *x, void *residual, const float *weight, float eps, void *out, size_t rows, size_t width,
             int bf16, int threads);

/* out [rows, width] = silu(gate) * up, gate_up [rows, 2 * width]. */
void hp_silu_mul(const void *gate_up, void *out, size_t rows, size_t width, int bf16, int threads);

/* Heads of one model and the tables of one step. */
struct hp_rope {
    size_t heads, kv_heads, head_dim;
    const float *cos, *sin;       /* [rows, head_dim / 2], or both NULL: no rotation */
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float eps;
};

/* Split qkv [rows, (heads + 2 kv_heads) * head_dim], norm and rotate q and k, write q [rows, heads,
 * head_dim] and rows `slots` of the pools [pool_rows, kv_heads, head_dim]. Returns 0, or 3 if a slot lies
 * outside. */
int hp_rope_write(const struct hp_rope *rope, const void *qkv, const int64_t *slots, void *q, void *k_pool,
                  void *v_pool, size_t pool_rows, size_t rows, int bf16, int threads);

#endif

/* Linear layers; see linear.c. */
#ifndef HP_LINEAR_H
#define HP_LINEAR_H

#include <stddef.h>

/* One packed layer. weight: from hp_linear_pack. bias: float[out] or NULL. blocks: the same weight from
 * hp_blocks_pack in the form `form` names, or NULL and 0. */
struct hp_linear {
    const void *weight;
    const float *bias;
    size_t in, out;
    int bf16;
    const void *blocks;
    int form;
};

/* y = x W^T + bias. x [rows, in] in the layer's type; y [rows, out], bfloat16 if `y_bf16`, else float.
 * Returns 0, or 1 if memory ran out. */
int hp_linear_run(const struct hp_linear *layer, const void *x, size_t rows, void *y, int y_bf16, int threads);

#endif

/* Small matrix products; see tile.c. */
#ifndef HP_TILE_H
#define HP_TILE_H

#include "simd.h"

/* A *cell* is 32 bits of the inner dimension: one float (FLOAT) or two bfloat16 (PAIR). In WIDE the
 * left side is float and the right side single bfloat16 values, widened as they are loaded. */
enum kind { FLOAT, PAIR, WIDE };

/* Rows and vectors of the largest register tile: as many accumulators as the registers hold. */
#if VL == 16
#define TILE_ROWS 6
#define TILE_VECS 4
#elif VL == 8
#define TILE_ROWS 6
#define TILE_VECS 2
#else
#define TILE_ROWS 4
#define TILE_VECS 2
#endif

/* out[r][c] = sum over i < n of a[r][i] * b[i][c] for r < rows and c < vecs * VL. Row strides: lda in
 * cells, ldb in columns, ldo in floats. */
void hp_tile(enum kind kind, size_t rows, size_t vecs, const float *a, size_t lda, const void *b, size_t ldb,
             size_t n, float *out, size_t ldo);

#endif

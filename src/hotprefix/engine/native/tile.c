/* Small matrix products. Owns: the one inner loop under attention and linear layers.
 *
 * Rules: every output is one chain acc = acc + a[i] * b[i] with i ascending, whatever the tile's size;
 * so a row's result depends neither on the other rows nor on how the work was cut.
 */
#include "tile.h"

INLINE void multiply(int rows, int vecs, enum kind kind, const float *a, size_t lda, const void *b, size_t ldb,
                     size_t n, float *out, size_t ldo) {
    vf acc[TILE_ROWS][TILE_VECS] = {0};
    for (size_t i = 0; i < n; i++) {
        vf right[TILE_VECS];
        UNROLL for (int c = 0; c < vecs; c++)
            right[c] = kind == WIDE ? vload_bf16((const bf16 *)b + i * ldb + c * VL)
                                    : vload((const float *)b + i * ldb + c * VL);
        UNROLL for (int r = 0; r < rows; r++) {
            vf left = vset(a[r * lda + i]);
            UNROLL for (int c = 0; c < vecs; c++)
                acc[r][c] = kind == PAIR ? vdot_bf16(acc[r][c], left, right[c]) : vfma(left, right[c], acc[r][c]);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < vecs; c++) vstore(out + r * ldo + c * VL, acc[r][c]);
}

/* All rows for one group of columns, in strips of nearly equal height: 7 rows are 4 + 3, not 6 + 1. */
INLINE void columns(int vecs, enum kind kind, size_t rows, const float *a, size_t lda, const void *b, size_t ldb,
                    size_t n, float *out, size_t ldo) {
    for (size_t left = rows; left > 0;) {
        size_t strips = (left + TILE_ROWS - 1) / TILE_ROWS, height = (left + strips - 1) / strips;
        switch (height) {
        case 1: multiply(1, vecs, kind, a, lda, b, ldb, n, out, ldo); break;
        case 2: multiply(2, vecs, kind, a, lda, b, ldb, n, out, ldo); break;
        case 3: multiply(3, vecs, kind, a, lda, b, ldb, n, out, ldo); break;
#if TILE_ROWS == 6
        case 4: multiply(4, vecs, kind, a, lda, b, ldb, n, out, ldo); break;
        case 5: multiply(5, vecs, kind, a, lda, b, ldb, n, out, ldo); break;
#endif
        default: multiply(TILE_ROWS, vecs, kind, a, lda, b, ldb, n, out, ldo); break;
        }
        a += height * lda, out += height * ldo, left -= height;
    }
}

INLINE void product(enum kind kind, size_t rows, size_t vecs, const float *a, size_t lda, const void *b,
                    size_t ldb, size_t n, float *out, size_t ldo) {
    const char *right = b;
    size_t width = VL * (kind == WIDE ? sizeof(bf16) : sizeof(float)), c = 0;
    for (; c + TILE_VECS <= vecs; c += TILE_VECS)
        columns(TILE_VECS, kind, rows, a, lda, right + c * width, ldb, n, out + c * VL, ldo);
    for (; c < vecs; c++) columns(1, kind, rows, a, lda, right + c * width, ldb, n, out + c * VL, ldo);
}

void hp_tile(enum kind kind, size_t rows, size_t vecs, const float *a, size_t lda, const void *b, size_t ldb,
             size_t n, float *out, size_t ldo) {
    switch (kind) {
    case FLOAT: product(FLOAT, rows, vecs, a, lda, b, ldb, n, out, ldo); break;
    case PAIR: product(PAIR, rows, vecs, a, lda, b, ldb, n, out, ldo); break;
    case WIDE: product(WIDE, rows, vecs, a, lda, b, ldb, n, out, ldo); break;
    }
}

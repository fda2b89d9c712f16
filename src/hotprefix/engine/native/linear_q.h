/* Quantised copies of linear weights; see linear_q.c. */
#ifndef HP_LINEAR_Q_H
#define HP_LINEAR_Q_H

#include <stddef.h>

#include "tile.h"

#define PANEL (TILE_VECS * VL) /* output columns kept together; the last panel is padded with zeros */

/* Packed forms. NIBBLES: scale * q + minimum, q of 4 bits. BYTES: scale * q, q a signed byte. */
enum form { NO_BLOCKS, NIBBLES, BYTES };

#define BLOCKS_ROWS 8 /* rows at most; beyond, bfloat16 gains nothing (decision 9) */

/* tile [rows, PANEL] = x times one packed panel of `in` inner rows. kind (FLOAT or PAIR), x and cells as in
 * tile.h. */
void hp_blocks_tile(enum kind kind, enum form form, size_t rows, const float *x, size_t cells, const char *panel,
                    size_t in, float *tile);

/* Bytes of one packed panel. */
size_t hp_blocks_panel(enum form form, size_t in);

#endif

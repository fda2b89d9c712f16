/* Threads. Owns: `hp_parallel`, the one way work is spread over cores.
 *
 * Rules: units are handed out one by one, so a core that is slow or busy elsewhere takes fewer; which
 * thread runs a unit never influences a result. Threads come from the OpenMP runtime that torch has
 * loaded (entry points given once to `hp_init`), so the process has one pool and no second runtime.
 */
#ifndef HP_PARALLEL_H
#define HP_PARALLEL_H

#include <stddef.h>

/* Runs one unit; `thread` in [0, threads) picks per-thread scratch memory. */
typedef void (*hp_body)(void *context, size_t unit, int thread);

void hp_parallel(size_t units, int threads, hp_body body, void *context);

/* Memory aligned for vectors, or NULL; give it back with free(). */
void *hp_scratch(size_t bytes);

#endif

/* Threads and scratch memory; see parallel.h. */
#include "parallel.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef void (*run_team)(void (*)(void *), void *, unsigned threads, unsigned flags);
typedef int (*thread_number)(void);

static run_team team;
static thread_number number;

struct job {
    atomic_size_t next;
    size_t units;
    hp_body body;
    void *context;
};

/* run: GOMP_parallel, which calls a function on every thread of a team; id: omp_get_thread_num. */
void hp_init(void *run, void *id) {
    team = (run_team)run;
    number = (thread_number)id;
}

static void work(void *argument) {
    struct job *job = argument;
    int thread = number();
    for (;;) {
        size_t unit = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
        if (unit >= job->units) return;
        job->body(job->context, unit, thread);
    }
}

void hp_parallel(size_t units, int threads, hp_body body, void *context) {
    if (units <= 1 || threads <= 1) {
        for (size_t unit = 0; unit < units; unit++) body(context, unit, 0);
        return;
    }
    struct job job = {.units = units, .body = body, .context = context};
    atomic_init(&job.next, 0);
    team(work, &job, units < (size_t)threads ? (unsigned)units : (unsigned)threads, 0);
}

void *hp_scratch(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64 + 64); }

/* Paged attention over a ragged batch. Owns: how a step's attention is cut into units of work.
 *
 * Rules: keys are taken in blocks that start at multiples of BLOCK, and a row's blocks are merged in
 * ascending order, so a row's result has the same bits however work was cut, chunked or batched. The
 * query heads that share a key/value head are computed together. Long chunks are cut by query tokens.
 * Short chunks (decodes, the last tokens after a cached prefix) are cut by key blocks, and requests that
 * have a block in the same pages load it once. Source of the block-wise softmax: arXiv 2205.14135.
 */
#include "attention.h"

#include <stdlib.h>

#include "attention_block.h"
#include "parallel.h"

#define SHORT_CHUNK 8 /* tokens up to which a chunk is cut by key blocks */
#define ALL_BLOCKS SIZE_MAX

struct token {
    size_t row, position, partial; /* partial: index of block 0 in its list of block results */
};

struct unit {
    size_t head, end_head, request, first, count, block; /* key/value heads; tokens[first .. first + count) */
};

struct job {
    const struct hp_attention *shape;
    const struct hp_batch *batch;
    const char *q, *k_pool, *v_pool;
    char *out;
    size_t group, stride, width, token_limit, element;
    struct token *tokens; /* the tokens that units point to; the first `short_tokens` are of short chunks */
    struct unit *units;
    size_t token_count, unit_count, short_tokens;
    int few_blocks; /* there are so few blocks that key/value heads must be spread over threads too */
    float *partials; /* [partial][heads][width + 2]: out, high, sum */
    char *memory;    /* per thread */
    size_t memory_bytes;
#if LOAD_HELPED
    size_t threads;
#endif
};

static size_t new_tokens(const struct hp_batch *batch, size_t r) {
    return (size_t)(batch->query_starts[r + 1] - batch->query_starts[r]);
}

static size_t lowest(const struct job *job, size_t position) {
    size_t window = job->shape->window;
    return window && position + 1 > window ? position + 1 - window : 0;
}

static int is_short(const struct job *job, size_t r) {
    size_t count = new_tokens(job->batch, r);
    return count <= SHORT_CHUNK && count <= job->token_limit;
}

static size_t first_block(const struct job *job, size_t r) {
    return lowest(job, (size_t)job->batch->context_lens[r] - new_tokens(job->batch, r)) / BLOCK;
}

static size_t end_block(const struct job *job, size_t r) {
    return ((size_t)job->batch->context_lens[r] + BLOCK - 1) / BLOCK;
}

static int is_valid(const struct hp_batch *batch) {
    if (batch->query_starts[0] != 0) return 0;
    for (size_t r = 0; r < batch->requests; r++) {
        int32_t count = batch->query_starts[r + 1] - batch->query_starts[r], context = batch->context_lens[r];
        if (count < 0 || context < count || (count && !context)) return 0;
        size_t pages = ((size_t)context + batch->page_size - 1) / batch->page_size;
        if (pages > batch->table_width) return 0;
        for (size_t i = 0; i < pages; i++) {
            int32_t page = batch->page_table[r * batch->table_width + i];
            if (page < 0 || (size_t)page >= batch->pages) return 0;
        }
    }
    return 1;
}

static void add_unit(struct job *job, size_t request, size_t first, size_t count, size_t block) {
    size_t heads = job->shape->kv_heads, step = block == ALL_BLOCKS || job->few_blocks ? 1 : heads;
    for (size_t head = 0; head < heads; head += step)
        job->units[job->unit_count++] = (struct unit){head, head + step, request, first, count, block};
}

static void add_tokens(struct job *job, size_t r, size_t partial) {
    size_t count = new_tokens(job->batch, r), start = (size_t)job->batch->context_lens[r] - count;
    size_t blocks = end_block(job, r) - first_block(job, r);
    for (size_t i = 0; i < count; i++)
        job->tokens[job->token_count++] = (struct token){
            (size_t)job->batch->query_starts[r] + i, start + i, partial + i * blocks - first_block(job, r)};
}

/* Whether both requests have the whole of `block`, in the same pages. */
static int same_pages(const struct job *job, size_t r, size_t s, size_t block) {
    const struct hp_batch *batch = job->batch;
    size_t end = (block + 1) * BLOCK, first = block * BLOCK / batch->page_size;
    if ((size_t)batch->context_lens[r] < end || (size_t)batch->context_lens[s] < end) return 0;
    const int32_t *a = batch->page_table + r * batch->table_width, *b = batch->page_table + s * batch->table_width;
    for (size_t i = first; i <= (end - 1) / batch->page_size; i++)
        if (a[i] != b[i]) return 0;
    return 1;
}

/* Makes the units of one key block: one for each set of short requests that have the block in the same
 * pages. */
static void plan_block(struct job *job, size_t block, const size_t *partial, char *placed) {
    size_t requests = job->batch->requests;
    for (size_t r = 0; r < requests; r++)
        placed[r] = !is_short(job, r) || !new_tokens(job->batch, r) || block < first_block(job, r) || block >= end_block(job, r);
    for (size_t r = 0; r < requests; r++) {
        if (placed[r]) continue;
        size_t first = job->token_count;
        add_tokens(job, r, partial[r]);
        for (size_t s = r + 1; s < requests; s++) {
            if (placed[s] || job->token_count - first + new_tokens(job->batch, s) > job->token_limit) continue;
            if (!same_pages(job, r, s, block)) continue;
            add_tokens(job, s, partial[s]);
            placed[s] = 1;
        }
        add_unit(job, r, first, job->token_count - first, block);
    }
}

static void plan_long(struct job *job, size_t r, size_t limit) {
    size_t count = new_tokens(job->batch, r), pieces = (count + limit - 1) / limit, first = job->token_count;
    add_tokens(job, r, 0);
    for (size_t i = pieces; i-- > 0;) { /* the last tokens see most keys: longest first */
        size_t from = count * i / pieces, to = count * (i + 1) / pieces;
        add_unit(job, r, first + from, to - from, ALL_BLOCKS);
    }
}

/* Counts the units and tokens, then lists them. Returns 0, or 1 if memory ran out. */
static int plan(struct job *job, int threads) {
    const struct hp_batch *batch = job->batch;
    size_t tokens = 0, units = 0, partials = 0, blocks = 0, long_tokens = 0, short_blocks = 0;
    size_t *partial = calloc(batch->requests + 1, sizeof *partial);
    char *placed = calloc(batch->requests + 1, 1);
    for (size_t r = 0; r < batch->requests && partial; r++) {
        size_t count = new_tokens(batch, r), seen = count ? end_block(job, r) - first_block(job, r) : 0;
        partial[r] = partials;
        tokens += is_short(job, r) ? count * (seen + 1) : count;
        units += is_short(job, r) ? seen : count;
        partials += is_short(job, r) ? count * seen : 0;
        short_blocks += is_short(job, r) ? seen : 0;
        long_tokens += is_short(job, r) ? 0 : count;
        if (is_short(job, r) && count && end_block(job, r) > blocks) blocks = end_block(job, r);
    }
    job->few_blocks = short_blocks < 8 * (size_t)threads;
    job->tokens = malloc((tokens + 1) * sizeof *job->tokens);
    job->units = malloc((units * job->shape->kv_heads + 1) * sizeof *job->units);
    job->partials = hp_scratch(partials * job->shape->heads * (job->width + 2) * sizeof(float));
    job->memory = hp_scratch(job->memory_bytes * (size_t)threads);
    int ok = partial && placed && job->tokens && job->units && job->partials && job->memory;
    size_t limit = long_tokens * job->shape->kv_heads / (4 * (size_t)threads) + 1; /* four units a thread at least */
    if (limit > job->token_limit) limit = job->token_limit;
    for (size_t r = 0; ok && r < batch->requests; r++)
        if (is_short(job, r)) add_tokens(job, r, partial[r]);
    job->short_tokens = job->token_count;
    for (size_t r = 0; ok && r < batch->requests; r++)
        if (!is_short(job, r)) plan_long(job, r, limit);
    for (size_t block = 0; ok && block < blocks; block++) plan_block(job, block, partial, placed);
    free(partial), free(placed);
    return !ok;
}

/* The pool rows of the first `count` positions of a request's key block. */
INLINE void find_slots(const struct job *job, size_t request, size_t block, size_t count, size_t *slots) {
    const struct hp_batch *batch = job->batch;
    const int32_t *pages = batch->page_table + request * batch->table_width;
    size_t page_size = batch->page_size, page = block * BLOCK / page_size, offset = block * BLOCK % page_size;
    for (size_t i = 0; i < count; page++, offset = 0)
        for (; offset < page_size && i < count; offset++) slots[i++] = (size_t)pages[page] * page_size + offset;
}

#if LOAD_HELPED
/* Tells `memory` what this thread will load after the given head and block. Units are handed out one by one,
 * so which unit comes next for this thread is a guess; it is right if the threads are equally fast. */
static void foresee(const struct job *job, struct block *memory, const struct unit *unit, size_t head, size_t block) {
    const struct token *last = &job->tokens[unit->first + unit->count - 1];
    struct upcoming *next = &memory->next;
    next->count = next->asked = 0;
    if (unit->block == ALL_BLOCKS) {
        if (++block > last->position / BLOCK) return;
    } else if (++head == unit->end_head) {
        unit += job->threads;
        if (unit >= job->units + job->unit_count || unit->block == ALL_BLOCKS) return;
        head = unit->head, block = unit->block;
    }
    size_t left = (size_t)job->batch->context_lens[unit->request] - block * BLOCK;
    size_t at = head * job->shape->head_dim * job->element;
    next->keys = job->k_pool + at, next->values = job->v_pool + at, next->stride = job->stride;
    next->count = left < BLOCK ? left : BLOCK;
    find_slots(job, unit->request, block, next->count, next->slots);
}
#endif

static void load_block(const struct job *job, struct block *memory, const struct unit *unit, size_t kv_head,
                       size_t block, size_t count) {
    size_t slots[BLOCK], dim = job->shape->head_dim;
    find_slots(job, unit->request, block, count, slots);
#if LOAD_HELPED
    foresee(job, memory, unit, kv_head, block);
#endif
    size_t soon = kv_head == unit->head ? (unit->end_head - unit->head) * dim : 0, at = kv_head * dim * job->element;
    hp_block_load(memory, job->k_pool + at, job->v_pool + at, slots, count, job->stride, soon);
}

/* Attends the unit's rows of one head to one block; results are in `memory`. */
static void attend(const struct job *job, struct block *memory, const struct unit *unit, size_t kv_head,
                   size_t block) {
    size_t low[MAX_ROWS], end[MAX_ROWS], begin = block * BLOCK, count = 0;
    for (size_t t = 0; t < unit->count; t++) {
        size_t position = job->tokens[unit->first + t].position, lowest_seen = lowest(job, position);
        size_t from = lowest_seen > begin ? lowest_seen - begin : 0, to = position < begin ? 0 : position - begin + 1;
        if (to > BLOCK) to = BLOCK;
        if (to > count) count = to;
        for (size_t g = 0; g < job->group; g++) low[t * job->group + g] = from, end[t * job->group + g] = to;
    }
    load_block(job, memory, unit, kv_head, block, count);
    hp_block_attend(memory, unit->count * job->group, low, end, count);
}

static size_t head_row(const struct job *job, const struct token *token, size_t kv_head, size_t g) {
    return token->row * job->shape->heads + kv_head * job->group + g;
}

static void write_row(const struct job *job, size_t head_row, const float *out, float sum) {
    size_t dim = job->shape->head_dim;
    char *to = job->out + head_row * dim * job->element;
    for (size_t d = 0; d < dim; d++) {
        float value = out[d] / sum;
        if (job->shape->bf16)
            ((bf16 *)to)[d] = bf16_from_float(value);
        else
            ((float *)to)[d] = value;
    }
}

static float *partial_of(const struct job *job, const struct token *token, size_t block, size_t head) {
    return job->partials + ((token->partial + block) * job->shape->heads + head) * (job->width + 2);
}

static void run_block(const struct job *job, struct block *memory, const struct unit *unit, size_t kv_head) {
    attend(job, memory, unit, kv_head, unit->block);
    for (size_t t = 0, r = 0; t < unit->count; t++)
        for (size_t g = 0; g < job->group; g++, r++) {
            float *to = partial_of(job, &job->tokens[unit->first + t], unit->block, kv_head * job->group + g);
            memcpy(to, memory->out + r * job->width, job->width * sizeof(float));
            to[job->width] = memory->high[r], to[job->width + 1] = memory->sum[r];
        }
}

static void run_all_blocks(const struct job *job, struct block *memory, const struct unit *unit, size_t kv_head,
                           float *out) {
    const struct token *tokens = job->tokens + unit->first;
    size_t rows = unit->count * job->group, last = tokens[unit->count - 1].position;
    float high[MAX_ROWS], sum[MAX_ROWS] = {0};
    for (size_t r = 0; r < rows; r++) high[r] = -INFINITY;
    memset(out, 0, rows * job->width * sizeof(float));
    for (size_t block = lowest(job, tokens[0].position) / BLOCK; block <= last / BLOCK; block++) {
        attend(job, memory, unit, kv_head, block);
        for (size_t r = 0; r < rows; r++)
            hp_merge(&high[r], &sum[r], out + r * job->width, memory->high[r], memory->sum[r],
                     memory->out + r * job->width, job->width);
    }
    for (size_t t = 0, r = 0; t < unit->count; t++)
        for (size_t g = 0; g < job->group; g++, r++)
            write_row(job, head_row(job, &tokens[t], kv_head, g), out + r * job->width, sum[r]);
}

static void run_unit(void *context, size_t index, int thread) {
    const struct job *job = context;
    const struct unit *unit = &job->units[index];
    struct block memory;
    char *mine = job->memory + job->memory_bytes * (size_t)thread;
    float *running = (float *)(mine + hp_block_bytes(job->shape->head_dim, job->shape->bf16));
    hp_block_init(&memory, mine, job->shape);
    for (size_t head = unit->head; head < unit->end_head; head++) {
        for (size_t t = 0, r = 0; t < unit->count; t++)
            for (size_t g = 0; g < job->group; g++, r++)
                hp_block_query(&memory, r, job->q + head_row(job, &job->tokens[unit->first + t], head, g) *
                                                        job->shape->head_dim * job->element);
        if (unit->block == ALL_BLOCKS)
            run_all_blocks(job, &memory, unit, head, running);
        else
            run_block(job, &memory, unit, head);
    }
}

/* Merges the block results of one token of a short chunk, in ascending order. */
static void merge_token(void *context, size_t index, int thread) {
    (void)thread;
    const struct job *job = context;
    const struct token *token = &job->tokens[index];
    for (size_t head = 0; head < job->shape->heads; head++) {
        size_t block = lowest(job, token->position) / BLOCK;
        float *out = partial_of(job, token, block, head), high = out[job->width], sum = out[job->width + 1];
        while (++block <= token->position / BLOCK) {
            const float *next = partial_of(job, token, block, head);
            hp_merge(&high, &sum, out, next[job->width], next[job->width + 1], next, job->width);
        }
        write_row(job, token->row * job->shape->heads + head, out, sum);
    }
}

int hp_attention_run(const struct hp_attention *shape, const struct hp_batch *batch, const void *q,
                     const void *k_pool, const void *v_pool, void *out, int threads) {
    if (!is_valid(batch)) return 2;
    size_t width = (shape->head_dim + VL - 1) / VL * VL, group = shape->heads / shape->kv_heads;
    struct job job = {
        .shape = shape, .batch = batch, .q = q, .k_pool = k_pool, .v_pool = v_pool, .out = out,
        .group = group, .stride = shape->kv_heads * shape->head_dim, .width = width,
        .token_limit = MAX_ROWS / group, .element = shape->bf16 ? sizeof(bf16) : sizeof(float),
        .memory_bytes = hp_block_bytes(shape->head_dim, shape->bf16) + MAX_ROWS * width * sizeof(float),
    };
#if LOAD_HELPED
    job.threads = threads > 1 ? (size_t)threads : 1;
#endif
    int failed = plan(&job, threads);
    if (!failed) {
        hp_parallel(job.unit_count, threads, run_unit, &job);
        hp_parallel(job.short_tokens, threads, merge_token, &job);
    }
    free(job.tokens), free(job.units), free(job.partials), free(job.memory);
    return failed;
}

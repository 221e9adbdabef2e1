/* Whole-sequence evaluation in-process: what perplexity, teacher-forced checks and oracles ask of a model. One session,
 * begun anew for each sequence. Not the way a server runs a model: see engine.c. */
#include "errors.h"
#include "kernels/kernels.h"
#include "model/model.h"

#include <stdlib.h>

struct st_eval {
    st_model *m;
    st_pool *pool, *draft_pool; /* the second stays empty */
    st_session *s;
    int *want; /* [max_rows] rows of a window whose logits are asked for */
};

static int make_room(st_eval *e, st_error *err) {
    const st_shape *shape = &e->m->shape;
    e->pool = st_pool_new(st_block_bytes(shape), (shape->max_context + 63) / 64);
    e->draft_pool = st_pool_new(st_draft_block_bytes(shape), 0);
    e->want = calloc((size_t)e->m->max_rows, sizeof *e->want);
    if (!e->pool || !e->draft_pool || !e->want) return st_fail(err, "no_memory", "no memory for windows of %d rows", e->m->max_rows);
    return st_session_new(shape, e->pool, e->draft_pool, &e->s, err);
}

int st_eval_open(const st_eval_options *o, st_eval **out, st_error *err) {
    if (!st_kv_name(o->kv)) return st_fail(err, "usage", "kv %d is no type of keys and values (enum st_kv_type)", o->kv);
    if (o->max_rows < 0 || o->max_rows > 4096) return st_fail(err, "usage", "max_rows %d is outside 0..4096", o->max_rows);
    if (o->threads < 0 || o->threads > 512) return st_fail(err, "usage", "threads %d is outside 0..512", o->threads);
    st_eval *e = calloc(1, sizeof *e);
    if (!e) return st_fail(err, "no_memory", "no memory for a model");
    st_model_options mo = {.path = o->path, .isa = o->isa, .kv = o->kv, .threads = o->threads, .max_rows = o->max_rows,
                           .weights = {.mapped = o->mapped, .dense_as_is = o->dense_as_is}};
    if (st_model_open(&mo, &e->m, err) || make_room(e, err)) {
        st_eval_close(e);
        return -1;
    }
    *out = e;
    return 0;
}

void st_eval_close(st_eval *e) {
    if (!e) return;
    st_session_free(e->s);
    st_pool_free(e->pool);
    st_pool_free(e->draft_pool);
    st_model_close(e->m);
    free(e->want);
    free(e);
}

int st_eval_vocab(const st_eval *e) { return e->m->n_vocab; }
int st_eval_context(const st_eval *e) { return e->m->shape.max_context; }

static int check(const st_eval *e, const int32_t *ids, int n, int from, st_error *err) {
    if (n < 1 || n > e->m->shape.max_context)
        return st_fail(err, "context_full", "%d tokens; 1 to %d fit the context", n, e->m->shape.max_context);
    if (from < 0 || from > n) return st_fail(err, "bad_range", "first wanted position %d is outside 0..%d", from, n);
    for (int i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= e->m->n_vocab)
            return st_fail(err, "token_range", "token %d at position %d is outside 0..%d", ids[i], i, e->m->n_vocab - 1);
    return 0;
}

int st_eval_logits(st_eval *e, const int32_t *ids, int n, int want_from, float *out, st_error *err) {
    if (check(e, ids, n, want_from, err)) return -1;
    st_session_clear(e->s);
    for (int at = 0; at < n;) {
        int rows = n - at < e->m->max_rows ? n - at : e->m->max_rows, wanted = 0;
        if (st_session_reserve(e->s, at + rows, 0, err)) return -1;
        for (int i = 0; i < rows; i++)
            if (at + i >= want_from) e->want[wanted++] = i;
        st_run run = {e->s, ids + at, rows, rows};
        st_window w = {.runs = &run, .n_runs = 1, .want = e->want, .n_want = wanted, .logits = out};
        st_model_forward(e->m, &w);
        st_model_keep(&run, rows);
        out += (size_t)wanted * (size_t)e->m->n_vocab;
        at += rows;
    }
    return 0;
}

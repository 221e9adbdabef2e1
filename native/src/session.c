#include "session.h"

#include "errors.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>

static size_t layer_bytes(const st_shape *shape) { return st_kv_bytes(shape->kv, shape->head_dim) * (size_t)shape->kv_heads; }
size_t st_block_bytes(const st_shape *shape) { return layer_bytes(shape) * (size_t)shape->attn_layers; }
size_t st_draft_block_bytes(const st_shape *shape) { return shape->drafter ? layer_bytes(shape) : 0; }

static size_t all_states(const st_shape *shape) { return shape->state_floats * (size_t)shape->recurrent_layers; }
static size_t all_convs(const st_shape *shape) { return shape->conv_floats * (size_t)shape->recurrent_layers; }
static size_t all_draft_rows(const st_shape *shape) {
    return shape->drafter ? shape->draft_row_floats * ST_MAX_DRAFTS * (size_t)shape->recurrent_layers : 0;
}

size_t st_session_fixed_bytes(const st_shape *shape) {
    size_t lists = (size_t)(shape->max_context + 63) / 64 * 2 * sizeof(void *) + (size_t)shape->max_context * sizeof(int32_t);
    return (all_states(shape) + all_convs(shape) + all_draft_rows(shape) + (size_t)shape->n_embd) * sizeof(float) + lists;
}

static void give_all(st_pool *pool, uint8_t **blocks, int *n) {
    for (int i = 0; i < *n; i++) st_pool_give(pool, blocks[i]);
    *n = 0;
}

void st_session_free(st_session *s) {
    if (!s) return;
    if (s->blocks) give_all(s->pool, s->blocks, &s->n_blocks);
    if (s->draft_blocks) give_all(s->draft_pool, s->draft_blocks, &s->n_draft_blocks);
    free(s->blocks);
    free(s->draft_blocks);
    free(s->ids);
    free(s->states);
    free(s->convs);
    free(s->draft_rows);
    free(s->hidden);
    free(s);
}

static void *zeroed(size_t bytes) {
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes ? bytes : 64)) return NULL;
    memset(p, 0, bytes);
    return p;
}

int st_session_new(const st_shape *shape, st_pool *pool, st_pool *draft_pool, st_session **out, st_error *err) {
    st_session *s = calloc(1, sizeof *s);
    size_t lists = (size_t)(shape->max_context + 63) / 64 * sizeof(uint8_t *);
    if (s) {
        s->shape = *shape;
        s->pool = pool;
        s->draft_pool = draft_pool;
        s->ids = zeroed((size_t)shape->max_context * sizeof *s->ids);
        s->blocks = zeroed(lists);
        s->draft_blocks = zeroed(lists);
        s->states = zeroed(all_states(shape) * sizeof(float));
        s->convs = zeroed(all_convs(shape) * sizeof(float));
        s->draft_rows = zeroed(all_draft_rows(shape) * sizeof(float));
        s->hidden = zeroed((size_t)shape->n_embd * sizeof(float));
    }
    if (!s || !s->ids || !s->blocks || !s->draft_blocks || !s->states || !s->convs || !s->draft_rows || !s->hidden) {
        st_session_free(s);
        return st_fail(err, "no_memory", "no memory for a session of %d positions (%zu MiB besides its blocks)",
                       shape->max_context, st_session_fixed_bytes(shape) >> 20);
    }
    *out = s;
    return 0;
}

void st_session_clear(st_session *s) {
    give_all(s->pool, s->blocks, &s->n_blocks);
    give_all(s->draft_pool, s->draft_blocks, &s->n_draft_blocks);
    s->n = s->pending = s->drafted = s->hidden_at = 0;
    memset(s->states, 0, all_states(&s->shape) * sizeof(float));
    memset(s->convs, 0, all_convs(&s->shape) * sizeof(float));
    memset(s->hidden, 0, (size_t)s->shape.n_embd * sizeof(float));
}

/* Blocks for positions [from, upto): the first may be shared and is copied then. Returns 0 or -1 (pool empty). */
static int make_room(st_pool *pool, uint8_t **blocks, int *n, int from, int upto) {
    int first = from / 64, want = (upto + 63) / 64;
    if (first < *n && st_pool_users(blocks[first]) > 1 && upto > from) {
        uint8_t *own = st_pool_take(pool);
        if (!own) return -1;
        memcpy(own, blocks[first], st_pool_block_bytes(pool));
        st_pool_give(pool, blocks[first]);
        blocks[first] = own;
    }
    while (*n < want) {
        if (!(blocks[*n] = st_pool_take(pool))) return -1;
        ++*n;
    }
    return 0;
}

int st_session_reserve(st_session *s, int upto, int drafts, st_error *err) {
    if (make_room(s->pool, s->blocks, &s->n_blocks, s->n, upto))
        return st_fail(err, "pool_full", "no room for positions %d to %d: all %d blocks of the pool are in use", s->n, upto,
                       st_pool_limit(s->pool));
    if (drafts && s->shape.drafter) (void)make_room(s->draft_pool, s->draft_blocks, &s->n_draft_blocks, s->drafted < s->n ? s->drafted : s->n, upto);
    return 0;
}

static void cut_blocks(st_pool *pool, uint8_t **blocks, int *n, int tokens) {
    while (*n > (tokens + 63) / 64) st_pool_give(pool, blocks[--*n]);
}

void st_session_cut(st_session *s, int n) {
    s->n = n;
    cut_blocks(s->pool, s->blocks, &s->n_blocks, n);
    cut_blocks(s->draft_pool, s->draft_blocks, &s->n_draft_blocks, n);
    if (s->drafted > n) s->drafted = n;
}

size_t st_checkpoint_bytes(const st_shape *shape, int n) {
    return (all_states(shape) + all_convs(shape) + (size_t)shape->n_embd) * sizeof(float) + (size_t)n * sizeof(int32_t) +
           (size_t)(n + 63) / 64 * 2 * sizeof(uint8_t *) + sizeof(st_checkpoint);
}

st_checkpoint *st_checkpoint_share(st_checkpoint *c) {
    c->users++;
    return c;
}

void st_checkpoint_free(const st_session *s, st_checkpoint *c) {
    if (!c || --c->users > 0) return;
    if (c->blocks) give_all(s->pool, c->blocks, &c->n_blocks);
    if (c->draft_blocks) give_all(s->draft_pool, c->draft_blocks, &c->n_draft_blocks);
    free(c->blocks);
    free(c->draft_blocks);
    free(c->ids);
    free(c->states);
    free(c->convs);
    free(c->hidden);
    free(c);
}

static void *copy_of(const void *p, size_t bytes) {
    void *q = malloc(bytes ? bytes : 1);
    if (q) memcpy(q, p, bytes);
    return q;
}

static int share_blocks(uint8_t *const *from, int have, int tokens, uint8_t **to) {
    int n = (tokens + 63) / 64 < have ? (tokens + 63) / 64 : have;
    for (int i = 0; i < n; i++) {
        st_pool_share(from[i]);
        to[i] = from[i];
    }
    return n;
}

st_checkpoint *st_checkpoint_new(const st_session *s) {
    st_checkpoint *c = calloc(1, sizeof *c);
    size_t list = (size_t)(s->n + 63) / 64 * sizeof(uint8_t *);
    if (!c) return NULL;
    c->users = 1;
    c->n = s->n;
    c->hidden_at = s->hidden_at;
    c->drafted = s->drafted < s->n ? s->drafted : s->n;
    c->ids = copy_of(s->ids, (size_t)s->n * sizeof *s->ids);
    c->states = copy_of(s->states, all_states(&s->shape) * sizeof(float));
    c->convs = copy_of(s->convs, all_convs(&s->shape) * sizeof(float));
    c->hidden = copy_of(s->hidden, (size_t)s->shape.n_embd * sizeof(float));
    c->blocks = malloc(list ? list : 1);
    c->draft_blocks = malloc(list ? list : 1);
    if (!c->ids || !c->states || !c->convs || !c->hidden || !c->blocks || !c->draft_blocks) {
        st_checkpoint_free(s, c);
        return NULL;
    }
    c->n_blocks = share_blocks(s->blocks, s->n_blocks, s->n, c->blocks);
    c->n_draft_blocks = share_blocks(s->draft_blocks, s->n_draft_blocks, c->drafted, c->draft_blocks);
    return c;
}

void st_checkpoint_restore(st_session *s, const st_checkpoint *c) {
    give_all(s->pool, s->blocks, &s->n_blocks);
    give_all(s->draft_pool, s->draft_blocks, &s->n_draft_blocks);
    s->n = c->n;
    s->pending = 0;
    s->drafted = c->drafted;
    s->hidden_at = c->hidden_at;
    memcpy(s->ids, c->ids, (size_t)c->n * sizeof *s->ids);
    memcpy(s->states, c->states, all_states(&s->shape) * sizeof(float));
    memcpy(s->convs, c->convs, all_convs(&s->shape) * sizeof(float));
    memcpy(s->hidden, c->hidden, (size_t)s->shape.n_embd * sizeof(float));
    s->n_blocks = share_blocks(c->blocks, c->n_blocks, c->n, s->blocks);
    s->n_draft_blocks = share_blocks(c->draft_blocks, c->n_draft_blocks, c->n, s->draft_blocks);
}

#include "cache.h"

#include <stdlib.h>
#include <string.h>

struct st_cache {
    st_shape shape;
    size_t budget, bytes;
    uint64_t clock;
    int count;
    st_checkpoint *list;
};

st_cache *st_cache_new(const st_shape *shape, size_t budget) {
    st_cache *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->shape = *shape;
    c->budget = budget;
    return c;
}

int st_cache_count(const st_cache *c) { return c->count; }
size_t st_cache_bytes(const st_cache *c) { return c->bytes; }

static int begins(const st_checkpoint *k, const int32_t *ids, int n) {
    return k->n <= n && !memcmp(k->ids, ids, (size_t)k->n * sizeof *ids);
}

const st_checkpoint *st_cache_find(st_cache *c, const int32_t *ids, int n) {
    st_checkpoint *best = NULL;
    for (st_checkpoint *k = c->list; k; k = k->next)
        if ((!best || k->n > best->n) && begins(k, ids, n - 1)) best = k;
    if (best) best->used = ++c->clock;
    return best;
}

int st_cache_beginnings(st_cache *c, const int32_t *ids, int n, st_checkpoint **out, int most) {
    int count = 0;
    for (st_checkpoint *k = c->list; k; k = k->next)
        if (begins(k, ids, n) && count++ < most) out[count - 1] = st_checkpoint_share(k);
    return count;
}

const st_checkpoint *st_cache_at(const st_cache *c, int i) {
    const st_checkpoint *k = c->list;
    while (k && i--) k = k->next;
    return k;
}

static void drop(st_cache *c, const st_session *any, st_checkpoint **at) {
    st_checkpoint *k = *at;
    *at = k->next;
    c->bytes -= st_checkpoint_bytes(&c->shape, k->n);
    c->count--;
    st_checkpoint_free(any, k);
}

/* Roots and pinned ones go last, then the longest unused. */
static st_checkpoint **least_worthy(st_cache *c) {
    st_checkpoint **worst = NULL;
    for (st_checkpoint **at = &c->list; *at; at = &(*at)->next) {
        int kept = (*at)->pinned * 2 + (*at)->root, worst_kept = worst ? (*worst)->pinned * 2 + (*worst)->root : 0;
        if (!worst || kept < worst_kept || (kept == worst_kept && (*at)->used < (*worst)->used)) worst = at;
    }
    return worst;
}

int st_cache_shrink(st_cache *c, const st_session *any) {
    st_checkpoint **at = least_worthy(c);
    if (!at) return 0;
    drop(c, any, at);
    return 1;
}

void st_cache_put(st_cache *c, const st_session *s, int flags) {
    size_t bytes = st_checkpoint_bytes(&c->shape, s->n);
    if (!s->n || bytes > c->budget) return;
    for (st_checkpoint *k = c->list; k; k = k->next)
        if (k->n == s->n && begins(k, s->ids, s->n)) {
            k->used = ++c->clock;
            k->pinned |= (flags & ST_KEEP_PINNED) != 0;
            return;
        }
    while (c->bytes + bytes > c->budget && st_cache_shrink(c, s)) {}
    st_checkpoint *k = st_checkpoint_new(s);
    if (!k) return;
    k->root = (flags & ST_KEEP_ROOT) != 0;
    k->pinned = (flags & ST_KEEP_PINNED) != 0;
    k->used = ++c->clock;
    k->next = c->list;
    c->list = k;
    c->bytes += bytes;
    c->count++;
}

void st_cache_free(st_cache *c, const st_session *any) {
    if (!c) return;
    while (c->list) drop(c, any, &c->list);
    free(c);
}

#include "transfer.h"

#include "bulk.h"
#include "errors.h"
#include "output.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_TRANSFERS = 64 };

typedef struct transfer {
    st_task task; /* first: the bulk thread's view */
    int slot, asked; /* asked: WANT has come */
    int ready;       /* RESTORE: its manifest has come, and `task.fresh` is there */
    int over;        /* its end was said; it waits to be dropped */
    st_checkpoint *snapshot, **kept; /* PARK: what the slot held; checkpoints of the prompt cache before that */
    int n_kept;
    st_image_point *points;
    struct transfer *next;
} transfer;

struct st_transfers {
    st_holdings h;
    st_bulk *bulk; /* NULL: no socket */
    st_expected expected;
    transfer *list; /* the youngest first */
    uint64_t parked, restored, refused;
};

/* ---- all of them ---------------------------------------------------------------------------------------------- */

int st_transfers_new(int fd, const st_holdings *h, const char *identity, st_transfers **out, st_error *err) {
    st_transfers *all = calloc(1, sizeof *all);
    if (!all) return st_fail(err, "no_memory", "no memory for transfers");
    all->h = *h;
    all->expected.n_vocab = h->m->n_vocab;
    st_image_sizes_of(&h->m->shape, &all->expected.sizes);
    for (int i = 0; i < 16; i++) {
        unsigned byte = 0;
        (void)sscanf(identity + 2 * i, "%2x", &byte);
        all->expected.identity[i] = (uint8_t)byte;
    }
    if (fd >= 0 && st_bulk_open(fd, &all->bulk, err)) {
        free(all);
        return -1;
    }
    *out = all;
    return 0;
}

/* Nobody uses it any more: everything it holds goes back. */
static void release(st_transfers *all, transfer *t) {
    const st_session *any = all->h.slots[0].session;
    st_checkpoint_free(any, t->snapshot);
    for (int i = 0; i < t->n_kept; i++) st_checkpoint_free(any, t->kept[i]);
    st_session_free(t->task.fresh);
    st_manifest_free(t->task.manifest);
    free(t->task.use);
    free(t->task.wanted);
    free(t->task.bits);
    free(t->kept);
    free(t->points);
    free(t);
}

static void unlink_from(st_transfers *all, transfer *t) {
    transfer **at = &all->list;
    while (*at != t) at = &(*at)->next;
    *at = t->next;
    release(all, t);
}

static transfer *find(const st_transfers *all, uint64_t x) {
    for (transfer *t = all->list; t; t = t->next)
        if (t->task.x == x && !t->over) return t;
    return NULL;
}

static int running(const st_transfers *all) {
    int n = 0;
    for (const transfer *t = all->list; t; t = t->next) n += !t->over;
    return n;
}

/* ---- ends ----------------------------------------------------------------------------------------------------- */

static void say_error(st_transfers *all, uint64_t x, const st_error *err) {
    all->refused++;
    st_out_line("XERR %llu %s %s", (unsigned long long)x, err->name, err->text);
}

static void come_to_end(st_transfers *all, transfer *t) {
    t->over = 1;
    st_bulk_drop(all->bulk, &t->task);
}

static void end_with(st_transfers *all, transfer *t, const st_error *err) {
    say_error(all, t->task.x, err);
    come_to_end(all, t);
}

static void end_as(st_transfers *all, transfer *t, const char *name, const char *text) {
    st_error err;
    st_fail(&err, name, "%s", text);
    end_with(all, t, &err);
}

void st_transfers_stop(st_transfers *all) {
    for (transfer *t = all->list; t; t = t->next)
        if (!t->over) end_as(all, t, "stopped", "the engine ends");
}

void st_transfers_free(st_transfers *all) {
    if (!all) return;
    st_bulk_close(all->bulk);
    while (all->list) unlink_from(all, all->list);
    free(all);
}

int st_transfers_give_way(st_transfers *all) {
    transfer *t = all->list;
    while (t && !t->over && !t->snapshot && !t->ready) t = t->next;
    if (!t) return 0;
    if (!t->over) end_as(all, t, "pool_full", "what runs needs the room of this transfer");
    st_bulk_drop_now(all->bulk, &t->task);
    unlink_from(all, t);
    return 1;
}

/* ---- PARK ----------------------------------------------------------------------------------------------------- */

static int by_position(const void *a, const void *b) { return (*(st_checkpoint *const *)a)->n - (*(st_checkpoint *const *)b)->n; }

/* Whether the image can have the state at a checkpoint: a drafter goes on from a hidden state, where one is known. */
static int has_state(const st_transfers *all, const st_checkpoint *c) {
    return all->expected.sizes.checkpoint && (all->expected.sizes.recurrent || c->hidden_at == c->n);
}

static void add_point(transfer *t, const st_checkpoint *c, int flags) {
    t->points[t->task.image.n_points++] = (st_image_point){c->n, flags, c->states, c->convs, c->hidden};
}

static int flags_of(const st_checkpoint *c) { return (c->root ? ST_IMAGE_ROOT : 0) | (c->pinned ? ST_IMAGE_PINNED : 0); }

/* The states that the image has: the prompt cache's along the way, and the slot's own. */
static int collect_points(st_transfers *all, transfer *t) {
    const st_checkpoint *own = t->snapshot;
    int n = all->expected.sizes.checkpoint ? st_cache_beginnings(all->h.cache, own->ids, own->n, NULL, 0) : 0, flags = 0;
    t->kept = malloc(((size_t)n + 1) * sizeof *t->kept);
    t->points = malloc(((size_t)n + 1) * sizeof *t->points);
    if (!t->kept || !t->points) return -1;
    t->n_kept = n ? st_cache_beginnings(all->h.cache, own->ids, own->n, t->kept, n) : 0;
    qsort(t->kept, (size_t)t->n_kept, sizeof *t->kept, by_position);
    for (int i = 0; i < t->n_kept; i++)
        if (t->kept[i]->n == own->n) flags = flags_of(t->kept[i]);
        else if (has_state(all, t->kept[i])) add_point(t, t->kept[i], flags_of(t->kept[i]));
    if (has_state(all, own)) add_point(t, own, flags);
    return 0;
}

/* Hold what the slot holds now. */
static int take_snapshot(st_transfers *all, transfer *t, st_session *s, st_error *err) {
    st_model_settle(all->h.m, s);
    if (!(t->snapshot = st_checkpoint_new(s)) || collect_points(all, t)) return st_fail(err, "no_memory", "no memory for an image of %d tokens", s->n);
    const st_checkpoint *c = t->snapshot;
    t->task.ids = c->ids;
    t->task.n = c->n;
    t->task.drafted = c->drafted;
    t->task.image.shape = s->shape;
    t->task.image.blocks = c->blocks;
    t->task.image.n_blocks = c->n_blocks;
    t->task.image.draft_blocks = c->draft_blocks;
    t->task.image.n_draft_blocks = c->n_draft_blocks;
    t->task.image.points = t->points;
    return 0;
}

/* ---- RESTORE: what is held already ---------------------------------------------------------------------------- */

/* A session or a checkpoint, as somewhere to take a beginning from. */
typedef struct holder {
    const int32_t *ids;
    uint8_t *const *blocks, *const *draft_blocks;
    int n, drafted, hidden_at;
    st_session *session; /* either */
    const st_checkpoint *checkpoint;
} holder;

static holder of_session(st_session *s) {
    return (holder){s->ids, s->blocks, s->draft_blocks, s->n, s->drafted < s->n ? s->drafted : s->n, s->hidden_at, s, NULL};
}

static holder of_checkpoint(const st_checkpoint *c) {
    return (holder){c->ids, c->blocks, c->draft_blocks, c->n, c->drafted, c->hidden_at, NULL, c};
}

static int common(const holder *h, const int32_t *ids, int n) {
    int most = h->n < n ? h->n : n, i = 0;
    while (i < most && h->ids[i] == ids[i]) i++;
    return i;
}

/* Who holds most of ids[0..p), and who holds the state behind it (NULL session and checkpoint: nobody). */
static void find_holders(st_transfers *all, const int32_t *ids, int p, holder *pages, int *shared, holder *state) {
    const st_checkpoint *c;
    *pages = *state = (holder){0};
    *shared = 0;
    for (int i = 0;; i++) {
        holder h;
        if (i < all->h.n_all) h = of_session(all->h.slots[i].session);
        else if ((c = st_cache_at(all->h.cache, i - all->h.n_all))) h = of_checkpoint(c);
        else return;
        int n = common(&h, ids, p);
        int further = n > *shared || (n && n == *shared && h.drafted > pages->drafted);
        if (further) *pages = h, *shared = n;
        if (n == p && h.n == p && (!all->h.m->shape.drafter || h.hidden_at == p)) *state = h;
    }
}

static void copy_state(st_transfers *all, st_session *to, const holder *from) {
    const st_shape *s = &to->shape;
    if (from->session) st_model_settle(all->h.m, from->session);
    const float *states = from->session ? from->session->states : from->checkpoint->states, *convs = from->session ? from->session->convs : from->checkpoint->convs;
    memcpy(to->states, states, s->state_floats * (size_t)s->recurrent_layers * sizeof *states);
    memcpy(to->convs, convs, s->conv_floats * (size_t)s->recurrent_layers * sizeof *convs);
    memcpy(to->hidden, from->session ? from->session->hidden : from->checkpoint->hidden, (size_t)s->n_embd * sizeof *states);
}

/* Whether everything of block b that the first p tokens need is among the first `shared`. */
static int is_held(int b, int shared, int p) {
    int end = (b / ST_IMAGE_PIECES + 1) * ST_IMAGE_PAGE;
    return shared >= (end < p ? end : p);
}

static void share_blocks(st_session *s, const holder *h, int shared, int p) {
    int drafted = h->drafted < shared ? h->drafted : shared;
    for (; s->n_blocks * 64 < p && is_held(s->n_blocks, shared, p); s->n_blocks++) st_pool_share(s->blocks[s->n_blocks] = h->blocks[s->n_blocks]);
    for (; s->n_draft_blocks * 64 < p && s->shape.drafter && is_held(s->n_draft_blocks, drafted, p); s->n_draft_blocks++)
        st_pool_share(s->draft_blocks[s->n_draft_blocks] = h->draft_blocks[s->n_draft_blocks]);
}

/* ---- RESTORE: room for the rest ------------------------------------------------------------------------------- */

typedef struct blocks {
    const uint8_t **at;
    size_t n;
} blocks;

static void add_blocks(blocks *list, uint8_t *const *from, int n) {
    for (int i = 0; i < n; i++) {
        if (list->at) list->at[list->n] = from[i];
        list->n++;
    }
}

/* All that may not be touched: what runs, and what transfers hold. */
static void add_busy(const st_transfers *all, blocks *list) {
    for (int i = 0; i < all->h.n_all; i++)
        if (all->h.slots[i].state != ST_SLOT_IDLE) add_blocks(list, all->h.slots[i].session->blocks, all->h.slots[i].session->n_blocks);
    for (const transfer *t = all->list; t; t = t->next) {
        if (t->ready) add_blocks(list, t->task.fresh->blocks, t->task.fresh->n_blocks);
        if (t->snapshot) add_blocks(list, t->snapshot->blocks, t->snapshot->n_blocks);
        for (int i = 0; i < t->n_kept; i++) add_blocks(list, t->kept[i]->blocks, t->kept[i]->n_blocks);
    }
}

static int by_address(const void *a, const void *b) {
    const uint8_t *x = *(const uint8_t *const *)a, *y = *(const uint8_t *const *)b;
    return x < y ? -1 : x > y;
}

/* Whether n more blocks fit beside them; nothing is given up for a transfer that cannot be. */
static int fits(const st_transfers *all, int n, st_error *err) {
    blocks list = {0};
    size_t busy = 0;
    add_busy(all, &list);
    if (!(list.at = malloc((list.n + 1) * sizeof *list.at))) return st_fail(err, "no_memory", "no memory for a list of blocks");
    list.n = 0;
    add_busy(all, &list);
    qsort(list.at, list.n, sizeof *list.at, by_address);
    for (size_t i = 0; i < list.n; i++) busy += !i || list.at[i] != list.at[i - 1];
    free(list.at);
    if (busy + (size_t)n <= (size_t)st_pool_limit(all->h.pool)) return 0;
    return st_fail(err, "pool_full", "%d blocks of 64 tokens do not fit beside the %zu in use; the pool has %d", n, busy, st_pool_limit(all->h.pool));
}

/* A block, if need be at the cost of what is only kept: checkpoints, then the longest idle slot. */
static uint8_t *take_block(st_transfers *all) {
    for (;;) {
        uint8_t *block = st_pool_take(all->h.pool);
        if (block) return block;
        if (st_cache_shrink(all->h.cache, all->h.slots[0].session)) continue;
        st_slot *idle = NULL;
        for (int i = 0; i < all->h.n_all; i++) {
            st_slot *u = &all->h.slots[i];
            if (u->state == ST_SLOT_IDLE && u->session->n_blocks && (!idle || u->start < idle->start)) idle = u;
        }
        if (!idle) return NULL;
        st_session_clear(idle->session);
    }
}

static int take_blocks(st_transfers *all, st_session *s, int p, st_error *err) {
    int need = (p + 63) / 64 - s->n_blocks;
    if (fits(all, need, err)) return -1;
    while (s->n_blocks * 64 < p) {
        if (!(s->blocks[s->n_blocks] = take_block(all))) return st_fail(err, "no_memory", "no memory for a block of keys and values");
        s->n_blocks++;
    }
    return 0;
}

/* Blocks for the drafter's rows as far as they will come; without room it goes without. Returns the rows that will be
 * there. */
static int take_draft_blocks(st_transfers *all, transfer *t) {
    const st_manifest *m = t->task.manifest;
    st_session *s = t->task.fresh;
    int p = t->task.p, rows = s->n_draft_blocks * 64 < p ? s->n_draft_blocks * 64 : p, come = 0;
    for (int i = 0; i < m->n_entries; i++)
        if (m->entries[i].kind == ST_IMAGE_DRAFTER && t->task.use[i] && m->entries[i].position > come) come = m->entries[i].position;
    if (come > p) come = p;
    while (s->n_draft_blocks * 64 < come && (s->draft_blocks[s->n_draft_blocks] = st_pool_take(all->h.draft_pool))) s->n_draft_blocks++;
    int room = s->n_draft_blocks * 64 < come ? s->n_draft_blocks / ST_IMAGE_PIECES * ST_IMAGE_PAGE : come;
    return room > rows ? room : rows;
}

/* ---- RESTORE -------------------------------------------------------------------------------------------------- */

/* Which entries must come. */
static void choose(transfer *t, int shared, int draft_shared, int drafted, int has_the_state) {
    const st_manifest *m = t->task.manifest;
    int p = t->task.p;
    for (int i = 0; i < m->n_entries; i++) {
        const st_image_entry *e = &m->entries[i];
        int end = e->position < p ? e->position : p;
        if (!t->task.use[i]) continue;
        if (e->kind == ST_IMAGE_CHECKPOINT) t->task.wanted[i] = !has_the_state;
        else if (e->kind == ST_IMAGE_DRAFTER) t->task.wanted[i] = draft_shared < end && end <= drafted;
        else t->task.wanted[i] = shared < end;
    }
}

/* The manifest is good: share what is held, make room for the rest. */
static int prepare(st_transfers *all, transfer *t, st_error *err) {
    st_session *s = t->task.fresh;
    holder pages, state;
    int p = t->task.p, shared, has_the_state = 0, draft_shared;
    find_holders(all, s->ids, p, &pages, &shared, &state);
    share_blocks(s, &pages, shared, p);
    if (state.ids && all->expected.sizes.checkpoint) copy_state(all, s, &state), has_the_state = 1;
    draft_shared = s->n_draft_blocks * 64 < p ? s->n_draft_blocks * 64 : p;
    if (take_blocks(all, s, p, err)) return -1;
    s->drafted = take_draft_blocks(all, t);
    s->n = p;
    s->hidden_at = has_the_state ? p : -1;
    for (int i = 0; i < t->task.manifest->n_entries; i++)
        if (t->task.manifest->entries[i].kind == ST_IMAGE_CHECKPOINT && t->task.use[i]) s->hidden_at = p; /* it comes */
    choose(t, shared, draft_shared, s->drafted, has_the_state);
    if (!(t->points = malloc(sizeof *t->points))) return st_fail(err, "no_memory", "no memory for an image of %d tokens", p);
    t->points[0] = (st_image_point){p, 0, s->states, s->convs, s->hidden};
    t->task.image = (st_image){s->shape, s->blocks, s->draft_blocks, s->n_blocks, s->n_draft_blocks, t->points, 1};
    return 0;
}

static void say_want(const transfer *t) {
    int n = t->task.manifest->n_entries, any = 0;
    for (int i = 0; i < n; i++) any |= t->task.wanted[i];
    st_out_part("WANT %llu %s", (unsigned long long)t->task.x, any ? "" : "-");
    for (int i = 0; any && i < n; i += 8) {
        unsigned byte = 0;
        for (int k = 0; k < 8 && i + k < n; k++) byte |= (unsigned)t->task.wanted[i + k] << k;
        st_out_part("%02x", byte);
    }
    st_out_part("\n");
}

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

/* All has come: the new session for the slot's old one, which stays as a checkpoint. */
static void attach(st_transfers *all, transfer *t) {
    st_slot *slot = &all->h.slots[t->slot];
    if (slot->state != ST_SLOT_IDLE) {
        end_as(all, t, "busy", "a request runs in the slot");
        return;
    }
    st_session *before = slot->session;
    st_cache_put(all->h.cache, before, 0);
    slot->session = t->task.fresh;
    slot->start = now_ms(); /* not the first to give its room to others */
    st_session_clear(before); /* its blocks are free at once */
    t->task.fresh = before;
    all->restored++;
    st_out_line("RESTORED %llu %d", (unsigned long long)t->task.x, t->task.p);
    come_to_end(all, t);
}

/* ---- what comes ----------------------------------------------------------------------------------------------- */

static void hear(st_transfers *all, transfer *t, int said) {
    st_error err;
    if (said & ST_BULK_FAILED) end_with(all, t, &t->task.err);
    else if (said & ST_BULK_MANIFEST) {
        t->ready = 1;
        if (prepare(all, t, &err)) {
            end_with(all, t, &err);
            return;
        }
        say_want(t); /* before the thread counts down `wanted` */
        st_bulk_want(all->bulk, &t->task, NULL, 0);
    } else if (said & ST_BULK_DONE && t->task.sends) {
        all->parked++;
        st_out_line("PARKED %llu %d", (unsigned long long)t->task.x, t->task.n);
        come_to_end(all, t);
    } else if (said & ST_BULK_DONE) attach(all, t);
}

void st_transfers_hear(st_transfers *all) {
    if (!all->bulk) return;
    st_bulk_hear(all->bulk);
    for (transfer *t = all->list, *next; t; t = next) {
        int said = st_bulk_said(all->bulk, &t->task);
        next = t->next;
        if (said & ST_BULK_DROPPED) unlink_from(all, t);
        else if (!t->over) hear(all, t, said);
    }
}

int st_transfers_wake_fd(const st_transfers *all) { return all->bulk ? st_bulk_wake_fd(all->bulk) : -1; }

/* ---- lines ---------------------------------------------------------------------------------------------------- */

static int admit(st_transfers *all, const st_request *req, st_error *err) {
    if (!all->bulk) return st_fail(err, "no_bulk", "the engine was started without --bulk-fd");
    if (req->slot >= all->h.n_slots) return st_fail(err, "bad_slot", "there is no slot %d; slots are 0 to %d", req->slot, all->h.n_slots - 1);
    if (find(all, req->transfer)) return st_fail(err, "bad_transfer", "transfer %llu is in use", (unsigned long long)req->transfer);
    if (running(all) >= MOST_TRANSFERS) return st_fail(err, "busy", "%d transfers run; more must wait", MOST_TRANSFERS);
    return 0;
}

static int begin(st_transfers *all, int command, const st_request *req, st_error *err) {
    if (admit(all, req, err)) return -1;
    st_session *s = all->h.slots[req->slot].session;
    if (command == ST_CMD_PARK && !s->n) return st_fail(err, "empty", "slot %d holds nothing", req->slot);
    transfer *t = calloc(1, sizeof *t);
    if (!t) return st_fail(err, "no_memory", "no memory for a transfer");
    t->slot = req->slot;
    t->task.x = req->transfer;
    t->task.expected = &all->expected;
    t->task.pool = all->h.pool;
    t->task.draft_pool = all->h.draft_pool;
    t->task.image.shape = all->h.m->shape;
    t->task.p = req->tokens;
    t->task.sends = command == ST_CMD_PARK;
    if (t->task.sends && take_snapshot(all, t, s, err)) {
        release(all, t);
        return -1;
    }
    t->next = all->list;
    all->list = t;
    st_bulk_begin(all->bulk, &t->task);
    return 0;
}

static void want(st_transfers *all, transfer *t, st_request *req) {
    if (!t->task.sends || t->asked) {
        end_as(all, t, "bad_transfer", "WANT does not fit where the transfer stands");
        return;
    }
    t->asked = 1;
    st_bulk_want(all->bulk, &t->task, req->bits, req->n_bits);
    req->bits = NULL;
}

void st_transfers_order(st_transfers *all, int command, st_request *req) {
    st_error err;
    transfer *t = find(all, req->transfer);
    if (command == ST_CMD_PARK || command == ST_CMD_RESTORE) {
        if (begin(all, command, req, &err)) say_error(all, req->transfer, &err);
    } else if (t && command == ST_CMD_XSTOP) end_as(all, t, "stopped", "as asked for");
    else if (t) want(all, t, req);
    else if (command == ST_CMD_WANT) {
        if (all->bulk) st_fail(&err, "bad_transfer", "no transfer %llu runs", (unsigned long long)req->transfer);
        else st_fail(&err, "no_bulk", "the engine was started without --bulk-fd");
        say_error(all, req->transfer, &err);
    } /* XSTOP of one that has ended: its end was the answer */
}

void st_transfers_refuse(st_transfers *all, const st_request *req, const st_error *err) {
    transfer *t = req->command == ST_CMD_WANT ? find(all, req->transfer) : NULL;
    if (t) end_with(all, t, err);
    else say_error(all, req->transfer, err);
}

void st_transfers_say(const st_transfers *all) {
    st_out_part("\"transfers\":{\"running\":%d,\"parked\":%llu,\"restored\":%llu,\"bytes\":%llu,\"refused\":%llu,\"stray_frames\":%llu}", running(all),
                (unsigned long long)all->parked, (unsigned long long)all->restored, (unsigned long long)(all->bulk ? st_bulk_bytes(all->bulk) : 0),
                (unsigned long long)all->refused, (unsigned long long)(all->bulk ? st_bulk_stray(all->bulk) : 0));
}

#include "slot.h"

#include "errors.h"
#include "output.h"

#include <stdlib.h>
#include <string.h>

int st_slot_new(st_slot *t, int id, const st_shape *shape, st_pool *pool, st_pool *draft_pool, st_error *err) {
    *t = (st_slot){.id = id};
    st_acceptance_init(&t->acceptance);
    t->ids = malloc(((size_t)shape->max_context + 1 + ST_MAX_DRAFTS) * sizeof *t->ids);
    if (!t->ids) return st_fail(err, "no_memory", "no memory for slot %d", id);
    return st_session_new(shape, pool, draft_pool, &t->session, err);
}

void st_slot_free(st_slot *t) {
    st_session_free(t->session);
    st_request_free(&t->req);
    st_penalty_free(t->penalty);
    free(t->ids);
}

/* ---- where reading begins and stops ------------------------------------------------------------------------- */

static void add_cut(st_slot *t, int at, int flags) {
    if (at <= t->session->n || at >= t->n_prompt) return;
    int i = t->n_cuts;
    while (i > 0 && t->cuts[i - 1].at > at) i--;
    if (i > 0 && t->cuts[i - 1].at == at) {
        t->cuts[i - 1].flags |= flags;
        return;
    }
    if (t->n_cuts == ST_MAX_CUTS) return;
    memmove(t->cuts + i + 1, t->cuts + i, (size_t)(t->n_cuts - i) * sizeof *t->cuts);
    t->cuts[i] = (st_cut){at, flags};
    t->n_cuts++;
}

void st_slot_set_cuts(st_slot *t, const st_cut_rule *rule) {
    int turns = 0, second = 0, last = 0;
    t->n_cuts = t->next_cut = 0;
    for (int i = 0; i < t->n_prompt; i++)
        if (t->ids[i] == rule->turn) {
            last = i;
            if (++turns == 2) second = i;
        }
    if (second >= rule->root_min) add_cut(t, second, ST_KEEP_ROOT);
    if (t->req.pin) add_cut(t, t->req.pin, ST_KEEP_PINNED);
    if (!t->req.keep) return; /* a one-shot call leaves only the shared beginning behind */
    add_cut(t, last, 0);
    for (int at = rule->every; rule->every && at < t->n_prompt && t->n_cuts < ST_MAX_CUTS; at += rule->every) add_cut(t, at, 0);
}

int st_slot_until_cut(const st_slot *t) {
    int end = t->next_cut < t->n_cuts ? t->cuts[t->next_cut].at : t->n_prompt;
    return end - t->session->n;
}

/* How many tokens of its own content the slot can keep: all, when it is a beginning of the prompt and leaves a token to
 * read; a model without recurrent layers can be cut anywhere. */
static int own_prefix(const st_slot *t, int recurrent) {
    const st_session *s = t->session;
    int most = s->n < t->n_prompt - 1 ? s->n : t->n_prompt - 1, n = 0;
    while (n < most && s->ids[n] == t->ids[n]) n++;
    return recurrent && n < s->n ? 0 : n;
}

void st_slot_prepare(st_slot *t, st_model *m, st_cache *cache) {
    st_session *s = t->session;
    int recurrent = m->shape.recurrent_layers > 0, own = own_prefix(t, recurrent);
    const st_checkpoint *c = st_cache_find(cache, t->ids, t->n_prompt);
    if (c && c->n <= own) c = NULL;
    if (s->n > own) { /* what is given up stays as a checkpoint; nothing is pending between requests */
        st_cache_put(cache, s, 0);
        c = c ? st_cache_find(cache, t->ids, t->n_prompt) : NULL; /* making room may have dropped it */
    }
    if (c && c->n > own) st_checkpoint_restore(s, c);
    else if (own < s->n && own) st_session_cut(s, own);
    else if (!own) st_session_clear(s);
    t->reused = s->n;
    (void)m;
}

/* ---- lines -------------------------------------------------------------------------------------------------- */

void st_slot_say_resume(const st_slot *t) {
    if (t->id < 0) st_out_line("RESUME %d", t->reused);
    else st_out_line("BRESUME %d %d", t->id, t->reused);
}

void st_slot_say_progress(const st_slot *t, double now) {
    double ms = now - t->start, rate = ms > 0 ? (t->session->n - t->reused) * 1e3 / ms : 0.0;
    if (t->id < 0) st_out_line("PP %d %d %.1f %.1f", t->session->n, t->n_prompt, ms, rate);
    else st_out_line("BPP %d %d %d %.1f %.1f", t->id, t->session->n, t->n_prompt, ms, rate);
}

void st_slot_say_admitted(const st_slot *t) {
    if (t->id < 0) st_out_line("REUSED %d", t->reused);
    else st_out_line("BADM %d 1", t->id);
}

int st_slot_say_token(const st_slot *t, st_sampler *sampler, const float *logits, int32_t id, st_error *err) {
    int32_t top[20];
    double lp[20], chosen;
    int wanted = t->req.logprobs >= 0, n = wanted ? st_logprobs(sampler, logits, id, t->req.logprobs, &chosen, top, lp, err) : 0;
    if (n < 0) return -1;
    if (t->id < 0) st_out_part("T %d", id);
    else st_out_part("BT %d %d", t->id, id);
    if (wanted) {
        st_out_part(" lp=%.9g%s", chosen, n ? " top=" : "");
        for (int i = 0; i < n; i++) st_out_part("%s%d:%.9g", i ? "," : "", top[i], lp[i]);
    }
    st_out_part("\n");
    return 0;
}

void st_slot_say_done(const st_slot *t, const char *finish, double now) {
    double decode_ms = t->read_ms > 0 ? now - t->start - t->read_ms : 0;
    int fresh = (t->generated || t->session->n > t->n_prompt ? t->n_prompt : t->session->n) - t->reused;
    if (fresh < 0) fresh = 0;
    if (t->id < 0)
        st_out_line("DONE %d %d %.1f %.1f %s %llu %llu %d 0 0 0 0 0 %d 0", t->generated, t->n_prompt, t->read_ms, decode_ms, finish,
                    (unsigned long long)t->accepted, (unsigned long long)t->offered, t->reused, fresh);
    else
        st_out_line("BDONE %d %d %s %.1f %llu %llu %d %d %.1f %.1f %d", t->id, t->generated, finish, now - t->start,
                    (unsigned long long)t->accepted, (unsigned long long)t->offered, t->n_prompt, t->reused, t->read_ms, decode_ms, fresh);
}

void st_slot_say_error(int id, const st_error *err) {
    if (id < 0) st_out_line("ERR %s %s", err->name, err->text);
    else st_out_line("BERR %d %s %s", id, err->name, err->text);
}

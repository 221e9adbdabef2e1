#include "engine.h"

#include "arith.h"
#include "errors.h"
#include "input.h"
#include "output.h"
#include "plan.h"
#include "protocol.h"
#include "slot.h"
#include "transfer.h"
#include "window.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MAX_STOP_IDS = 16, HIDDEN = -1 };

typedef struct engine {
    st_model *m;
    const st_options *o;
    st_input in;
    st_pool *pool, *draft_pool;
    st_cache *cache;
    st_transfers *transfers;
    st_slot *slots; /* n_slots tagged ones, then the hidden one */
    int n_slots, n_all;
    st_pace pace;
    st_spec_rule rule;
    st_spec_cost cost;
    int drafting; /* the model drafts and drafts are asked for */
    int worth;    /* windows until prompts are no longer read for the drafter, which has not paid for a while */
    st_cut_rule cuts;
    st_sampler *sampler;
    uint8_t *bad; /* rows of the window that hold a value which is not finite */
    float *logits, *hidden, *draft_logits, *draft_hidden, *probs;
    int32_t stop_ids[MAX_STOP_IDS];
    int n_stop_ids;
    st_plan_out plan;
    uint64_t requests, prompt_tokens, reused_tokens, output_tokens, windows, rows, parked;
    double last_prompt_tok_s, last_decode_tok_s, started, window_ms;
} engine;

static double now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e3 + (double)t.tv_nsec * 1e-6;
}

void st_engine_identity(const st_model *m, const char *kv, char *hex) {
    char text[256];
    uint8_t digest[16];
    int n = snprintf(text, sizeof text, "fingerprint=%s arithmetic=%d kv=%s dense=%s rope=none overrides=", m->fingerprint,
                     ST_ARITH_VERSION, kv, m->dense);
    st_blake2b_hash(digest, sizeof digest, text, (size_t)n, NULL, 0);
    for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

static int running(const engine *e) {
    for (int i = 0; i < e->n_all; i++)
        if (e->slots[i].state != ST_SLOT_IDLE) return 1;
    return 0;
}

/* ---- end-of-generation and turn tokens ---------------------------------------------------------------------- */

static void add_stop(engine *e, int64_t id) {
    if (id < 0 || id >= e->m->n_vocab || e->n_stop_ids == MAX_STOP_IDS) return;
    for (int i = 0; i < e->n_stop_ids; i++)
        if (e->stop_ids[i] == id) return;
    e->stop_ids[e->n_stop_ids++] = (int32_t)id;
}

static int is_text(st_gguf_str s, const char *text) { return s.len == strlen(text) && !memcmp(s.ptr, text, s.len); }

/* eos and eot of the file and the two end marks of the family by their text; the mark that starts a turn. */
static void find_marks(engine *e) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"};
    int64_t id;
    e->cuts.turn = -1;
    for (int i = 0; i < 2; i++)
        if (st_gguf_get_i64(e->m->gguf, keys[i], &id, NULL) == 1) add_stop(e, id);
    const st_gguf_kv *tokens = st_gguf_kv_find(e->m->gguf, "tokenizer.ggml.tokens");
    for (uint64_t i = 0; tokens && i < tokens->count; i++) {
        st_gguf_str s;
        if (st_gguf_kv_str(tokens, i, &s)) break;
        if (is_text(s, "<|endoftext|>") || is_text(s, "<|im_end|>")) add_stop(e, (int64_t)i);
        if (is_text(s, "<|im_start|>")) e->cuts.turn = (int32_t)i;
    }
}

static int is_stop(const engine *e, int32_t id) {
    for (int i = 0; i < e->n_stop_ids; i++)
        if (e->stop_ids[i] == id) return 1;
    return 0;
}

/* ---- status ------------------------------------------------------------------------------------------------- */

static const char *const STATES[] = {"idle", "reading", "decoding"};

static void say_slots(const engine *e) {
    for (int i = 0; i < e->n_slots; i++) {
        const st_slot *t = &e->slots[i];
        st_out_part("%s{\"slot\":%d,\"state\":\"%s\",\"held_tokens\":%d,\"prompt_tokens\":%d,\"prompt_read\":%d,\"generated\":%d,"
                    "\"parked\":%s,\"drafts_offered\":%llu,\"drafts_accepted\":%llu,\"draft_depth\":%d}",
                    i ? "," : "", t->id, STATES[t->state], t->session->n, t->state ? t->n_prompt : 0,
                    t->state ? (t->session->n < t->n_prompt ? t->session->n : t->n_prompt) : 0, t->state ? t->generated : 0,
                    t->parked ? "true" : "false", (unsigned long long)t->acceptance.offered,
                    (unsigned long long)t->acceptance.accepted, t->n_draft);
    }
}

static void say_stat(const engine *e) {
    const char *phase = "idle";
    for (int i = 0; i < e->n_all; i++)
        if (e->slots[i].state == ST_SLOT_READING) phase = "reading";
        else if (e->slots[i].state == ST_SLOT_DECODING && *phase == 'i') phase = "decoding";
    st_out_part("STAT {\"engine\":\"%s\",\"phase\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"uptime_s\":%.1f,", ST_ENGINE_VERSION, phase,
                e->m->kernels->isa, st_team_size(e->m->team), (now_ms() - e->started) * 1e-3);
    st_out_part("\"requests\":%llu,\"windows\":%llu,\"rows\":%llu,\"prompt_tokens\":%llu,\"reused_tokens\":%llu,\"output_tokens\":%llu,",
                (unsigned long long)e->requests, (unsigned long long)e->windows, (unsigned long long)e->rows,
                (unsigned long long)e->prompt_tokens, (unsigned long long)e->reused_tokens, (unsigned long long)e->output_tokens);
    st_out_part("\"prompt_tok_s\":%.1f,\"decode_tok_s\":%.1f,\"window_ms\":%.3f,\"weights_mib\":%.1f,", e->last_prompt_tok_s,
                e->last_decode_tok_s, e->window_ms, (double)st_weights_bytes(e->m->weights) / 1048576.0);
    st_out_part("\"pool\":{\"blocks\":%d,\"limit\":%d,\"block_kib\":%.1f,\"parked\":%llu},", st_pool_used(e->pool), st_pool_limit(e->pool),
                (double)st_pool_block_bytes(e->pool) / 1024.0, (unsigned long long)e->parked);
    st_out_part("\"prompt_cache\":{\"checkpoints\":%d,\"mib\":%.1f},", st_cache_count(e->cache), (double)st_cache_bytes(e->cache) / 1048576.0);
    st_out_part("\"spec\":{\"on\":%s,\"depth\":%d,\"window_base_ms\":%.4f,\"window_row_ms\":%.4f,\"draft_pass_ms\":%.4f},",
                e->drafting ? "true" : "false", e->rule.depth, e->cost.window_base, e->cost.window_row, e->cost.draft_pass);
    st_transfers_say(e->transfers);
    st_out_part(",\"slots\":[");
    say_slots(e);
    st_out_line("]}");
}

/* ---- begin and end of a request ----------------------------------------------------------------------------- */

static void come_to_rest(engine *e, st_slot *t) {
    st_model_settle(e->m, t->session);
    if (!t->req.keep) st_session_clear(t->session);
    if (t->session->drafted > t->session->n) t->session->drafted = t->session->n; /* that row's token was said, but may not follow */
    t->state = ST_SLOT_IDLE;
    t->n_draft = t->parked = t->stop = t->yield = 0;
    st_request_free(&t->req);
    st_penalty_free(t->penalty);
    t->penalty = NULL;
}

static void finish(engine *e, st_slot *t, const char *word) {
    double now = now_ms(), ms = now - t->start - t->read_ms;
    if (t->generated > 1 && t->read_ms > 0 && ms > 0) e->last_decode_tok_s = (t->generated - 1) * 1e3 / ms;
    st_slot_say_done(t, word, now);
    come_to_rest(e, t);
}

/* A request ended by a failure: its state is dropped, the slot and the others go on. */
static void fail(engine *e, st_slot *t, const st_error *err) {
    st_slot_say_error(t->id, err);
    t->req.keep = 0;
    come_to_rest(e, t);
}

static int any_penalty(const st_sampling *s) {
    return (s->penalty_repeat != 1.0f && s->penalty_last_n != 0) || s->penalty_freq != 0.0f || s->penalty_present != 0.0f;
}

/* The draft rule of a request: the engine's, with what the request names itself. */
static st_spec_rule rule_of(const engine *e, const st_request *req) {
    st_spec_rule r = e->rule;
    if (req->spec_min_p >= 0) r.min_p = req->spec_min_p;
    if (req->spec_p_cum >= 0) r.cum_base = r.cum_deep = req->spec_p_cum;
    if (req->spec_p_cum_deep >= 0) r.cum_deep = req->spec_p_cum_deep;
    return r;
}

/* Take over the request and let the slot read. */
static void admit(engine *e, st_slot *t, st_request *req) {
    st_error err = {0};
    if (req->n_ids >= e->m->shape.max_context)
        st_fail(&err, "context_full", "prompt (%d tokens) leaves no room in the context (%d)", req->n_ids, e->m->shape.max_context);
    else if ((req->n_ids + 63) / 64 > st_pool_limit(e->pool))
        st_fail(&err, "pool_full", "prompt (%d tokens) is larger than the page pool (%d blocks of 64 tokens)", req->n_ids, st_pool_limit(e->pool));
    if (*err.name) {
        st_slot_say_error(t->id, &err);
        st_request_free(req);
        return;
    }
    t->req = *req;
    t->n_ids = t->n_prompt = req->n_ids;
    memcpy(t->ids, req->ids, (size_t)req->n_ids * sizeof *t->ids);
    t->generated = t->n_draft = t->stop = t->yield = t->parked = 0;
    t->offered = t->accepted = 0;
    t->read_ms = 0;
    t->start = t->last_rows = now_ms();
    t->rule = rule_of(e, req);
    st_acceptance_renew(&t->acceptance);
    t->state = ST_SLOT_READING;
    st_slot_prepare(t, e->m, e->cache);
    st_slot_set_cuts(t, &e->cuts);
    e->requests++;
    e->reused_tokens += (uint64_t)t->reused;
    st_slot_say_resume(t);
}

/* ---- commands ----------------------------------------------------------------------------------------------- */

static st_slot *hidden_slot(engine *e) { return &e->slots[e->n_slots]; }

static st_slot *slot_of(engine *e, int id, st_error *err) {
    if (id == HIDDEN) return hidden_slot(e);
    if (id < e->n_slots) return &e->slots[id];
    st_fail(err, "bad_slot", "there is no slot %d; slots are 0 to %d", id, e->n_slots - 1);
    return NULL;
}

static void begin(engine *e, st_request *req) {
    st_error err = {0};
    int id = req->slot;
    st_slot *t = slot_of(e, id, &err);
    if (t && t->state != ST_SLOT_IDLE) {
        st_fail(&err, "busy", t->id == HIDDEN ? "a request is running; GEN serves one at a time" : "the slot is busy until its BDONE");
        t = NULL;
    }
    if (!t) {
        st_slot_say_error(id, &err);
        st_request_free(req);
        return;
    }
    admit(e, t, req);
}

/* BYIELD: a reading slot gives way at its next chunk. The hidden slot hands what it has read to the (idle) slot named. */
static void yield(engine *e, int id) {
    st_error err = {0};
    st_slot *t = slot_of(e, id, &err), *hidden = hidden_slot(e);
    if (!t) st_slot_say_error(id, &err);
    else if (t->state == ST_SLOT_READING) t->yield = 1;
    else if (t->state == ST_SLOT_IDLE && hidden->state == ST_SLOT_READING) {
        hidden->yield = id + 1;
    } /* outside a read it is of no effect */
}

static void take_line(void *arg, const char *line) {
    engine *e = arg;
    st_error err = {0};
    st_request req = {0};
    if (!*line) return;
    int command = st_parse_line(line, e->m->n_vocab, &req, &err);
    switch (command) {
    case ST_CMD_GEN:
    case ST_CMD_BGEN: begin(e, &req); return;
    case ST_CMD_STOP: hidden_slot(e)->stop = hidden_slot(e)->state != ST_SLOT_IDLE; break;
    case ST_CMD_BSTOP: {
        st_slot *t = slot_of(e, req.slot, &err);
        if (t) t->stop = t->state != ST_SLOT_IDLE;
        else st_slot_say_error(req.slot, &err);
        break;
    }
    case ST_CMD_BYIELD: yield(e, req.slot); break;
    case ST_CMD_STAT: say_stat(e); break;
    case ST_CMD_QUIT: e->in.quit = 1; break;
    case ST_CMD_PARK:
    case ST_CMD_WANT:
    case ST_CMD_RESTORE:
    case ST_CMD_XSTOP: st_transfers_order(e->transfers, command, &req); break;
    default:
        if (req.command >= ST_CMD_PARK) st_transfers_refuse(e->transfers, &req, &err);
        else st_slot_say_error(req.slot, &err); /* a BGEN that cannot be parsed is refused under its slot */
    }
    st_request_free(&req);
}

static void hear_transfers(void *arg) {
    engine *e = arg;
    st_transfers_hear(e->transfers);
}

static void refuse_line(void *arg, const char *why) {
    (void)arg;
    st_out_line("ERR bad_command %s", why);
}

/* ---- a window: who takes part ------------------------------------------------------------------------------- */

/* Room for positions below `upto`, if need be at the cost of what is only kept: checkpoints, then idle slots. `modest`:
 * only what takes no block. */
static int make_room(engine *e, st_slot *t, int upto, int modest) {
    st_error err;
    const st_session *s = t->session;
    if (modest && (upto > s->n_blocks * 64 || (s->n % 64 && st_pool_users(s->blocks[s->n / 64]) > 1))) return -1;
    for (;;) {
        if (!st_session_reserve(t->session, upto, e->drafting, &err)) return 0;
        if (st_cache_shrink(e->cache, t->session)) continue;
        st_slot *idle = NULL;
        for (int i = 0; i < e->n_all; i++) {
            st_slot *u = &e->slots[i];
            if (u != t && u->state == ST_SLOT_IDLE && u->session->n_blocks && (!idle || u->start < idle->start)) idle = u;
        }
        if (!idle) return -1;
        st_session_clear(idle->session);
    }
}

/* The window's view of a slot; a decoding slot must have room for its rows, else it waits parked. */
static st_view view_of(engine *e, st_slot *t, double now, int modest) {
    st_view v = {0};
    if (t->state == ST_SLOT_DECODING) {
        int room = e->m->shape.max_context - t->session->n;
        if (1 + t->n_draft > room) t->n_draft = room - 1;
        if (t->n_draft && make_room(e, t, t->session->n + 1 + t->n_draft, modest)) t->n_draft = 0; /* without drafts it may fit */
        t->parked = make_room(e, t, t->session->n + 1 + t->n_draft, modest) != 0;
        v.decoding = t->parked ? 0 : 1 + t->n_draft;
    } else if (t->state == ST_SLOT_READING) {
        t->parked = 0;
        v.reading = t->n_ids - t->session->n;
        v.depth = t->session->n;
        v.until_cut = st_slot_until_cut(t);
        v.waited_ms = now - t->last_rows;
        if (t->n_ids > t->n_prompt) v.until_cut = v.reading; /* read again after parking: no cuts */
    }
    return v;
}

/* A read gives way: what it has read stays in its slot, or goes from GEN to the slot named, if that is still idle. */
static void give_way(engine *e, st_slot *t) {
    st_slot *to = t->id == HIDDEN ? &e->slots[t->yield - 1] : t;
    t->yield = 0;
    if (t->n_ids > t->n_prompt) return; /* it decodes, but for having been parked */
    if (to != t && to->state != ST_SLOT_IDLE) return;
    t->req.keep = 1; /* nothing read is lost */
    st_out_line("YIELDED %d %d", to->id, t->session->n);
    finish(e, t, "cancel");
    if (to == t) return;
    st_session *given = t->session;
    st_cache_put(e->cache, to->session, 0);
    t->session = to->session;
    to->session = given;
    to->start = t->start;
}

/* End what was stopped and has no row in the next window that could end it; let reads give way. */
static void heed_orders(engine *e) {
    for (int i = 0; i < e->n_all; i++) {
        st_slot *t = &e->slots[i];
        int rests = t->state == ST_SLOT_READING || (t->state == ST_SLOT_DECODING && t->parked);
        if (rests && t->stop) finish(e, t, "cancel");
        else if (t->state == ST_SLOT_READING && t->yield) give_way(e, t);
    }
}

static void fail_pool_full(engine *e, st_slot *t) {
    st_error err;
    st_fail(&err, "pool_full", "the page pool (%d blocks of 64 tokens) is too small for this request alone", st_pool_limit(e->pool));
    fail(e, t, &err);
}

/* Every running slot is parked for want of room. Transfers give theirs; then the youngest gives its blocks and reads again later. Who needs more than
 * there is ends: others would wait for it for ever. */
static void break_deadlock(engine *e) {
    st_slot *youngest = NULL;
    int active = 0;
    for (int i = 0; i < e->n_all; i++) {
        st_slot *t = &e->slots[i];
        if (t->state == ST_SLOT_IDLE) continue;
        if (t->session->n / 64 >= st_pool_limit(e->pool)) {
            fail_pool_full(e, t);
            return;
        }
        active++;
        if (t->session->n_blocks && (!youngest || t->start > youngest->start)) youngest = t;
    }
    if (st_transfers_give_way(e->transfers) || !youngest) return;
    if (active == 1) {
        fail_pool_full(e, youngest);
        return;
    }
    e->parked++;
    st_session_clear(youngest->session);
    youngest->n_draft = youngest->reused = 0;
    youngest->state = ST_SLOT_READING; /* its prompt and what it has said, without a word of it said again */
}

/* ---- a window: results -------------------------------------------------------------------------------------- */

/* Rows of a run against its drafts: token by token, until one differs or the answer ends. Returns the rows that stay. */
static int verify(engine *e, st_slot *t, const float *logits, int rows) {
    st_error err = {0};
    int drafts = rows - 1;
    for (int j = 0; j < rows; j++) {
        int32_t id, draft = j < drafts ? t->ids[t->n_ids] : -1;
        const float *row = logits + (size_t)j * (size_t)e->m->n_vocab;
        if (st_sample(e->sampler, row, &t->req.sampling, t->penalty, (uint32_t)t->n_ids, &id, &err) ||
            st_slot_say_token(t, e->sampler, row, id, &err)) {
            fail(e, t, &err);
            return j + 1;
        }
        t->ids[t->n_ids++] = id;
        t->generated++;
        e->output_tokens++;
        if (j && j <= drafts) t->accepted++;
        const char *end = is_stop(e, id)                                                             ? "stop"
                          : t->stop || e->in.leave                                                   ? "cancel"
                          : t->generated >= t->req.max_new || t->n_ids >= e->m->shape.max_context    ? "length"
                                                                                                     : NULL;
        if (!end && t->penalty && st_penalty_push(t->penalty, t->ids, t->n_ids, &err)) {
            fail(e, t, &err);
            return j + 1;
        }
        if (end || id != draft) {
            t->n_draft = end ? -1 : 0; /* -1: ended, the caller finishes it when the kept rows are accounted for */
            if (end) t->stop = end[0] == 's' ? 1 : end[0] == 'c' ? 2 : 3;
            return j + 1;
        }
    }
    return rows;
}

static const char *end_word(int code) { return code == 1 ? "stop" : code == 2 ? "cancel" : "length"; }

/* Prompt rows have been read; the first token when all are. */
static void after_reading(engine *e, st_slot *t, const float *logits, int n) {
    double now = now_ms();
    st_error err = {0};
    t->last_rows = now;
    e->prompt_tokens += (uint64_t)n;
    if (t->n_ids == t->n_prompt) st_slot_say_progress(t, now);
    if (t->session->n < t->n_ids) return;
    t->state = ST_SLOT_DECODING;
    if (!t->read_ms) { /* not read again after parking */
        t->read_ms = now - t->start;
        if (t->read_ms > 0 && t->n_prompt > t->reused) e->last_prompt_tok_s = (t->n_prompt - t->reused) * 1e3 / t->read_ms;
        st_slot_say_admitted(t);
        int from = t->req.out_from >= 0 ? t->req.out_from : t->n_prompt;
        if (any_penalty(&t->req.sampling) && (st_penalty_new(e->m->n_vocab, &t->req.sampling, &t->penalty, &err) ||
                                              st_penalty_reset(t->penalty, t->ids, t->n_ids, from, &err))) {
            fail(e, t, &err);
            return;
        }
    }
    verify(e, t, logits, 1);
}

/* A reading slot that stands at a cut: its state is kept as a checkpoint. */
static void checkpoint(engine *e, st_slot *t) {
    while (t->state == ST_SLOT_READING && t->next_cut < t->n_cuts && t->cuts[t->next_cut].at <= t->session->n) {
        if (t->cuts[t->next_cut].at == t->session->n) st_cache_put(e->cache, t->session, t->cuts[t->next_cut].flags);
        t->next_cut++;
    }
}

/* ---- drafts ------------------------------------------------------------------------------------------------- */

typedef struct drafting {
    st_slot *slot[ST_MAX_SLOTS + 1]; /* slots that draft for the next window */
    int depth[ST_MAX_SLOTS + 1], n;
    double chance[ST_MAX_SLOTS + 1]; /* product of the probabilities so far */
} drafting;

/* The most probable token of a row and its probability. */
static int32_t likeliest(engine *e, const float *logits, float *p) {
    int n = e->m->n_vocab;
    int32_t best = 0;
    float sum = 0;
    for (int i = 1; i < n; i++)
        if (logits[i] > logits[best]) best = i;
    e->m->kernels->exp_sub(logits, n, logits[best], 1.0f, e->probs);
    for (int i = 0; i < n; i++) sum += e->probs[i];
    *p = 1.0f / sum;
    return best;
}

/* Take the draft of each wanted row; slots whose rules end here drop out. Returns the slots that go on. */
static int take_drafts(engine *e, drafting *d) {
    int kept = 0;
    for (int i = 0; i < d->n; i++) {
        st_slot *t = d->slot[i];
        float p, floor = st_spec_threshold(&t->rule, t->session->n);
        int32_t id = likeliest(e, e->draft_logits + (size_t)i * (size_t)e->m->n_vocab, &p);
        d->chance[i] *= (double)p;
        if (p < t->rule.min_p || (floor > 0 && d->chance[i] < (double)floor)) continue;
        t->ids[t->n_ids + t->n_draft++] = id;
        if (t->n_draft >= d->depth[i]) continue;
        memmove(e->draft_hidden + (size_t)kept * (size_t)e->m->n_embd, e->draft_hidden + (size_t)i * (size_t)e->m->n_embd,
                (size_t)e->m->n_embd * sizeof(float));
        d->slot[kept] = t;
        d->depth[kept] = d->depth[i];
        d->chance[kept++] = d->chance[i];
    }
    return d->n = kept;
}

/* Whether the drafter's rows up to there can be written: there is room, and the first block of them is the slot's own. */
static int draft_room(const st_slot *t, int upto) {
    const st_session *s = t->session;
    int first = s->drafted / 64;
    return s->n_draft_blocks * 64 >= upto && (first >= s->n_draft_blocks || st_pool_users(s->draft_blocks[first]) == 1);
}

/* How many drafts each decoding slot gets in the next window. */
static void choose_depths(engine *e, int *depth) {
    st_acceptance *acceptance[ST_MAX_SLOTS + 1];
    int who[ST_MAX_SLOTS + 1], most[ST_MAX_SLOTS + 1], chosen[ST_MAX_SLOTS + 1], n = 0;
    memset(depth, 0, (size_t)e->n_all * sizeof *depth);
    for (int i = 0; e->drafting && i < e->n_all; i++) {
        st_slot *t = &e->slots[i];
        if (t->state != ST_SLOT_DECODING || t->n_draft < 0) continue;
        int left = t->req.max_new - t->generated - 1, room = e->m->shape.max_context - t->n_ids - 1, least = left < room ? left : room;
        who[n] = i;
        acceptance[n] = &t->acceptance;
        chosen[n] = most[n] = least < e->rule.depth ? least : e->rule.depth;
        n++;
    }
    if (!e->o->spec_fixed) st_spec_depths(&e->cost, acceptance, most, n, chosen);
    for (int i = 0; i < n; i++) {
        depth[who[i]] = chosen[i];
        if (chosen[i]) e->worth = 256;
    }
}

/* ---- a window ----------------------------------------------------------------------------------------------- */

typedef struct members {
    st_slot *slot[ST_MAX_SLOTS + 1];
    st_run run[ST_MAX_SLOTS + 1];
    int first[ST_MAX_SLOTS + 1], kept[ST_MAX_SLOTS + 1], logit[ST_MAX_SLOTS + 1]; /* first row; rows that stay; first wanted row */
    int n, rows, prompt_rows, decoders;
    double depth; /* sum over the prompt rows of their positions */
} members;

/* The drafter after a window: rows from target states for the tokens that stay, then the drafts of the next window. */
static void run_drafter(engine *e, const members *w) {
    enum { MOST = 4096 + (ST_MAX_SLOTS + 1) * (2 + ST_MAX_DRAFTS) };
    static st_draft_row rows[MOST];
    int depth[ST_MAX_SLOTS + 1], want[ST_MAX_SLOTS + 1], n_rows = 0, passes = 0;
    drafting d = {.n = 0};
    double start = now_ms();
    choose_depths(e, depth);
    if (e->worth > 0) e->worth--;
    size_t E = (size_t)e->m->n_embd;
    for (int i = 0; i < w->n; i++) {
        st_slot *t = w->slot[i];
        st_session *s = w->run[i].session;
        if (!w->kept[i] || t->n_draft < 0) continue; /* failed, ended */
        int at = (int)(t - e->slots), base = s->n - w->kept[i]; /* s->n already counts what stays */
        int drafts = depth[at], fill = drafts || (t->state == ST_SLOT_READING && e->worth > 0);
        if (!fill || !draft_room(t, s->n + 1 + drafts)) continue;
        for (int j = 0; j < w->kept[i]; j++) {
            int pos = base + j;
            if (pos < s->drafted) continue; /* already there: the first draft step of the last round */
            const float *h = j ? e->hidden + (size_t)(w->first[i] + j - 1) * E : pos ? s->hidden : NULL;
            rows[n_rows++] = (st_draft_row){s, pos, w->run[i].ids[j], h};
        }
        if (s->drafted > base || (s->drafted == base && s->hidden_at == base)) s->drafted = s->n;
        if (!drafts) continue;
        want[d.n] = n_rows;
        rows[n_rows++] = (st_draft_row){s, s->n, t->ids[s->n], e->hidden + (size_t)(w->first[i] + w->kept[i] - 1) * E};
        if (s->drafted == s->n) s->drafted++;
        t->n_draft = 0;
        d.slot[d.n] = t;
        d.depth[d.n] = drafts;
        d.chance[d.n++] = 1.0;
    }
    while (n_rows) {
        st_draft pass = {.rows = rows, .n_rows = n_rows, .want = want, .n_want = d.n, .logits = e->draft_logits, .hidden = e->draft_hidden};
        st_model_draft(e->m, &pass);
        passes++;
        n_rows = 0;
        if (!d.n || !take_drafts(e, &d)) break;
        for (int i = 0; i < d.n; i++) {
            st_slot *t = d.slot[i];
            want[i] = i;
            rows[n_rows++] = (st_draft_row){t->session, t->session->n + t->n_draft, t->ids[t->n_ids + t->n_draft - 1], e->draft_hidden + (size_t)i * E};
        }
    }
    int prompt = 0;
    for (int i = 0; i < w->n; i++) prompt |= w->kept[i] > ST_MAX_DRAFTS + 1;
    if (passes && !prompt) st_spec_count_drafts(&e->cost, passes, now_ms() - start);
}

/* Slots by the begin of their requests: when room is short the older one gets it, so that somebody always gets on. */
static void oldest_first(const engine *e, int *order) {
    for (int i = 0; i < e->n_all; i++) {
        int at = i;
        for (; at > 0 && e->slots[order[at - 1]].start > e->slots[i].start; at--) order[at] = order[at - 1];
        order[at] = i;
    }
}

/* Choose the rows of the next window and make room for them. Once an older slot has found none, younger ones take no
 * further block. */
static void gather(engine *e, members *w) {
    st_view view[ST_MAX_SLOTS + 1];
    int rows[ST_MAX_SLOTS + 1], order[ST_MAX_SLOTS + 1], short_of_room = 0;
    double now = now_ms();
    *w = (members){0};
    oldest_first(e, order);
    for (int i = 0; i < e->n_all; i++) {
        st_slot *t = &e->slots[order[i]];
        view[order[i]] = view_of(e, t, now, short_of_room);
        short_of_room |= t->parked;
    }
    st_window_plan(&e->pace, view, e->n_all, rows);
    for (int i = 0; i < e->n_all; i++) {
        st_slot *t = &e->slots[order[i]];
        if (!rows[order[i]]) continue;
        int reading = t->state == ST_SLOT_READING;
        if (reading) {
            t->parked = make_room(e, t, t->session->n + rows[order[i]], short_of_room) != 0;
            short_of_room |= t->parked;
            if (t->parked) continue;
        }
        w->slot[w->n] = t;
        w->first[w->n] = w->rows;
        w->run[w->n++] = (st_run){t->session, t->ids + t->session->n, rows[order[i]], reading ? rows[order[i]] : 1};
        w->rows += rows[order[i]];
        w->decoders += !reading;
        if (!reading) continue;
        w->prompt_rows += rows[order[i]];
        w->depth += rows[order[i]] * (t->session->n + 0.5 * rows[order[i]]);
    }
}

/* Which rows' logits are needed: all of a decoding slot, the last of a prompt that ends here. */
static int wanted(const members *w, int *want, int *logit) {
    int n = 0;
    for (int i = 0; i < w->n; i++) {
        const st_slot *t = w->slot[i];
        int from = t->state == ST_SLOT_DECODING ? 0 : t->session->n + w->run[i].n == t->n_ids ? w->run[i].n - 1 : w->run[i].n;
        logit[i] = n;
        for (int j = from; j < w->run[i].n; j++) want[n++] = w->first[i] + j;
    }
    return n;
}

/* A certain row of the run holds a value that is not finite (a draft row that does is found when it is sampled). */
static int is_bad(const engine *e, const members *w, int i) {
    for (int r = 0; r < w->run[i].certain; r++)
        if (e->bad[w->first[i] + r]) return 1;
    return 0;
}

/* What a window has made of one run: tokens said, rows that stay (none when the request failed). */
static void settle_run(engine *e, members *w, int i) {
    st_slot *t = w->slot[i];
    const float *logits = e->logits + (size_t)w->logit[i] * (size_t)e->m->n_vocab;
    int rows = w->run[i].n, drafts = rows - w->run[i].certain;
    t->n_draft = 0;
    if (is_bad(e, w, i)) {
        st_error err;
        st_fail(&err, "non_finite", "the model's values overflow at position %d to %d", t->session->n, t->session->n + rows - 1);
        fail(e, t, &err);
        return;
    }
    if (t->state == ST_SLOT_READING) {
        st_model_keep(&w->run[i], w->kept[i] = rows);
        after_reading(e, t, logits, rows);
    } else {
        w->kept[i] = verify(e, t, logits, rows);
        if (t->state == ST_SLOT_DECODING) st_model_keep(&w->run[i], w->kept[i]);
    }
    if (drafts) {
        t->offered += (uint64_t)drafts;
        st_acceptance_count(&t->acceptance, drafts, w->kept[i] - 1);
    }
    if (t->state == ST_SLOT_IDLE) w->kept[i] = 0;
}

static void window(engine *e) {
    static int want[(ST_MAX_SLOTS + 1) * (ST_MAX_DRAFTS + 1)];
    members w;
    heed_orders(e);
    gather(e, &w);
    if (!w.rows) {
        if (running(e)) break_deadlock(e);
        return;
    }
    int n_want = wanted(&w, want, w.logit);
    double start = now_ms();
    st_window pass = {.runs = w.run, .n_runs = w.n, .want = want, .n_want = n_want, .logits = e->logits, .hidden = e->m->shape.drafter ? e->hidden : NULL, .bad = e->bad};
    st_model_forward(e->m, &pass);
    e->window_ms = now_ms() - start;
    e->windows++;
    e->rows += (uint64_t)w.rows;
    if (!w.prompt_rows) st_spec_count_window(&e->cost, w.rows, e->window_ms);
    for (int i = 0; i < w.n; i++) settle_run(e, &w, i);
    if (e->drafting) run_drafter(e, &w);
    for (int i = 0; i < w.n; i++) {
        st_slot *t = w.slot[i];
        if (!w.kept[i]) continue; /* failed */
        if (e->m->shape.drafter) { /* what the next window's first drafter row stands on, be it in another engine */
            memcpy(t->session->hidden, e->hidden + (size_t)(w.first[i] + w.kept[i] - 1) * (size_t)e->m->n_embd, (size_t)e->m->n_embd * sizeof(float));
            t->session->hidden_at = t->session->n;
        }
        checkpoint(e, t);
        if (t->n_draft < 0) finish(e, t, end_word(t->stop));
    }
    /* With sampling, drafting and checkpoints: all that a stream waits for. */
    st_pace_account(&e->pace, now_ms() - start, w.prompt_rows, w.prompt_rows ? w.depth / w.prompt_rows : 0.0, w.decoders);
}

/* ---- start and end ------------------------------------------------------------------------------------------ */

static void *floats(size_t n) { return calloc(n + 16, sizeof(float)); }

static int make_plan(engine *e, st_error *err) {
    st_plan_in in = {.slots = e->o->parallel, .weights = st_weights_bytes(e->m->weights)};
    uint64_t available = st_plan_available();
    st_plan_shape(&e->m->shape, &in);
    in.prompt_cache = (uint64_t)e->o->prompt_cache_mib << 20;
    /* The weights are in memory already; a tenth of what is left stays for others. */
    in.budget = e->o->memory_mib ? (uint64_t)e->o->memory_mib << 20 : available ? in.weights + available - available / 10 : 0;
    if (!st_plan_memory(&in, &e->plan))
        return st_fail(err, "no_memory", "not even one slot fits: %llu MiB for weights, prompt cache and a context of %d, of %llu MiB; lower --max-context or --prompt-cache-mib",
                       (unsigned long long)((in.weights + in.prompt_cache + 2 * in.slot_fixed + ((uint64_t)in.max_context + 63) / 64 * in.block) >> 20),
                       in.max_context, (unsigned long long)(in.budget >> 20));
    if (e->o->pool_blocks && e->o->pool_blocks < e->plan.blocks) e->plan.blocks = e->o->pool_blocks;
    return 0;
}

static int open_transfers(engine *e, st_error *err) {
    char identity[33];
    st_holdings h = {e->m, e->slots, e->n_slots, e->n_all, e->pool, e->draft_pool, e->cache};
    st_engine_identity(e->m, st_kv_name(e->m->shape.kv), identity);
    if (st_transfers_new(e->o->bulk_fd, &h, identity, &e->transfers, err)) return -1;
    e->in.wake = st_transfers_wake_fd(e->transfers);
    return 0;
}

static int engine_new(engine *e, st_model *m, const st_options *o, st_error *err) {
    *e = (engine){.m = m, .o = o, .started = now_ms(), .in = {.line = take_line, .refused = refuse_line, .woken = hear_transfers, .arg = e, .wake = -1, .signals = -1}, .worth = 256};
    if (make_plan(e, err)) return -1;
    e->n_slots = e->plan.slots;
    e->n_all = e->n_slots + 1;
    e->drafting = m->shape.drafter && o->spec > 0;
    e->rule = (st_spec_rule){.depth = o->spec > ST_MAX_DRAFTS ? ST_MAX_DRAFTS : o->spec, .min_p = (float)o->spec_min_p};
    const char *cum = getenv("STRATA_SPEC_PCUM");
    if (cum && *cum && st_spec_parse(cum, &e->rule, err)) return -1;
    e->cuts = (st_cut_rule){.root_min = o->prompt_cache_root, .every = o->prompt_cache_every};
    st_pace_init(&e->pace, o->chunk, o->stall_target_ms, o->decode_share);
    e->pool = st_pool_new(st_block_bytes(&m->shape), e->plan.blocks);
    e->draft_pool = st_pool_new(st_draft_block_bytes(&m->shape), e->plan.blocks);
    e->cache = st_cache_new(&m->shape, (size_t)o->prompt_cache_mib << 20);
    e->slots = calloc((size_t)e->n_all, sizeof *e->slots);
    size_t vocab = (size_t)m->n_vocab, rows = (size_t)e->n_all * (size_t)(1 + (e->drafting ? e->rule.depth : 0));
    e->logits = floats(rows * vocab);
    e->hidden = floats((size_t)m->max_rows * (size_t)m->n_embd);
    e->draft_logits = e->drafting ? floats((size_t)e->n_all * vocab) : NULL;
    e->draft_hidden = e->drafting ? floats((size_t)e->n_all * (size_t)m->n_embd) : NULL;
    e->probs = floats(vocab);
    e->bad = calloc((size_t)m->max_rows, 1);
    if (!e->pool || !e->draft_pool || !e->cache || !e->slots || !e->logits || !e->hidden || !e->probs || !e->bad ||
        (e->drafting && (!e->draft_logits || !e->draft_hidden)))
        return st_fail(err, "no_memory", "no memory for %d slots", e->n_slots);
    for (int i = 0; i < e->n_all; i++)
        if (st_slot_new(&e->slots[i], i < e->n_slots ? i : HIDDEN, &m->shape, e->pool, e->draft_pool, err)) return -1;
    if (st_sampler_new(m->n_vocab, &e->sampler, err)) return -1;
    st_sampler_set_exp(e->sampler, m->kernels->exp_sub);
    find_marks(e);
    if (st_input_open(&e->in)) return st_fail(err, "internal", "no descriptor for signals: %s", strerror(errno));
    return open_transfers(e, err);
}

static void engine_free(engine *e) {
    st_transfers_free(e->transfers);
    if (e->cache && e->slots) st_cache_free(e->cache, e->slots[0].session);
    for (int i = 0; e->slots && i < e->n_all; i++) st_slot_free(&e->slots[i]);
    free(e->slots);
    st_pool_free(e->pool);
    st_pool_free(e->draft_pool);
    st_sampler_free(e->sampler);
    free(e->logits);
    free(e->hidden);
    free(e->draft_logits);
    free(e->draft_hidden);
    free(e->probs);
    free(e->bad);
    st_input_close(&e->in);
}

static void say_facts(const engine *e, const char *kv) {
    const st_model *m = e->m;
    char identity[33];
    st_engine_identity(m, kv, identity);
    st_out_line("INFO identity=%s fingerprint=%s isa=%s threads=%d kv=%s context=%d trained_context=%d vocab=%d", identity,
                m->fingerprint, m->kernels->isa, st_team_size(m->team), kv, m->shape.max_context, m->trained_context, m->n_vocab);
    st_out_line("INFO weights_mib=%zu session_kib_per_token=%.2f session_fixed_kib=%zu chunk=%d pool_blocks=%d", st_weights_bytes(m->weights) >> 20,
                (double)st_block_bytes(&m->shape) / 64.0 / 1024.0, st_session_fixed_bytes(&m->shape) >> 10, e->o->chunk, e->plan.blocks);
    st_out_line("INFO batch_slots=%d slot_cache=1 mtp=%d spec=%d images=%d", e->n_slots, m->shape.drafter, e->drafting ? e->rule.depth : 0,
                e->o->bulk_fd >= 0);
    st_out_line("READY %d stop", m->shape.max_context);
}

int st_engine_serve(st_model *m, const st_options *o) {
    static engine e; /* static: its address is in the input's callbacks */
    st_error err = {0};
    if (engine_new(&e, m, o, &err)) {
        st_slot_say_error(HIDDEN, &err);
        fprintf(stderr, "strata-engine: %s\n", err.text);
        st_out_drain();
        engine_free(&e);
        return strcmp(err.name, "usage") ? 1 : 2;
    }
    if (e.n_slots < o->parallel)
        fprintf(stderr, "strata-engine: %d slots were asked for, %d fit in memory\n", o->parallel, e.n_slots);
    say_facts(&e, o->kv ? o->kv : "int8");
    while (!e.in.leave && (!e.in.quit || running(&e))) {
        if (!running(&e)) {
            st_input_wait(&e.in);
            continue;
        }
        window(&e);
        st_input_between_windows(&e.in);
    }
    st_transfers_stop(e.transfers);
    st_input_goodbye(&e.in);
    engine_free(&e);
    return 0;
}

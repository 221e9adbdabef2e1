/* A slot: an execution lane. Its session is decoding, reading, or idle (and then kept for the conversation's next
 * turn). GEN runs in a hidden slot that speaks untagged lines. */
#ifndef ST_SLOT_H
#define ST_SLOT_H

#include "cache.h"
#include "model/model.h"
#include "speculate.h"

typedef enum st_slot_state { ST_SLOT_IDLE, ST_SLOT_READING, ST_SLOT_DECODING } st_slot_state;

/* A position at which the read stops for a checkpoint. */
typedef struct st_cut {
    int at, flags;
} st_cut;
enum { ST_MAX_CUTS = 64 };

typedef struct st_slot {
    int id; /* -1: the hidden one */
    st_slot_state state;
    st_session *session;
    st_request req;
    int32_t *ids;               /* prompt, output, and behind them the drafts of the next window */
    int n_ids, n_prompt, generated, reused;
    st_penalty *penalty;
    st_spec_rule rule;
    st_acceptance acceptance;
    int n_draft;                /* drafts at ids + n_ids */
    uint64_t offered, accepted; /* of this request */
    double start, read_ms, last_rows; /* times in ms: its begin, its reading, its last prompt rows */
    int stop, yield;            /* asked for: end at the next window; give way at the next chunk */
    int parked;                 /* found no room in the pool: waits */
    st_cut cuts[ST_MAX_CUTS];
    int n_cuts, next_cut;
} st_slot;

int st_slot_new(st_slot *t, int id, const st_shape *shape, st_pool *pool, st_pool *draft_pool, st_error *err);
void st_slot_free(st_slot *t);

/* Where reading a prompt stops for a checkpoint. turn: the token that starts a turn (-1: none). */
typedef struct st_cut_rule {
    int32_t turn;
    int root_min, every;
} st_cut_rule;
void st_slot_set_cuts(st_slot *t, const st_cut_rule *rule);
/* Prompt tokens until the next cut (or the prompt's end). */
int st_slot_until_cut(const st_slot *t);

/* Put the session where reading the slot's prompt can begin: its own content, a checkpoint, or nothing. What the slot
 * held before is kept as a checkpoint. Sets `reused`. */
void st_slot_prepare(st_slot *t, st_model *m, st_cache *cache);

/* Lines, tagged for a slot and untagged for the hidden one. */
void st_slot_say_resume(const st_slot *t);
void st_slot_say_progress(const st_slot *t, double now);
void st_slot_say_admitted(const st_slot *t);
/* -1 and err when the log-probabilities cannot be had. */
int st_slot_say_token(const st_slot *t, st_sampler *sampler, const float *logits, int32_t id, st_error *err);
void st_slot_say_done(const st_slot *t, const char *finish, double now);
void st_slot_say_error(int id, const st_error *err);

#endif

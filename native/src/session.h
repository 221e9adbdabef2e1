/* A session: the state of one conversation. Token ids, key/value blocks of 64 positions, recurrent states, and the
 * same for its drafter. A checkpoint is a kept copy at one position; both share blocks with whoever has the same.
 *
 * The model's shape decides the sizes; a block holds, for every attention layer and key/value head in order, the
 * attention block layout of kernels.h. */
#ifndef ST_SESSION_H
#define ST_SESSION_H

#include "pool.h"
#include "strata.h"

typedef struct st_shape {
    int attn_layers, kv_heads, head_dim;     /* blocks */
    int kv;                                  /* enum st_kv_type */
    int recurrent_layers;                    /* states: */
    size_t state_floats, conv_floats;        /* per recurrent layer: S of all heads; history of raw projections */
    int n_embd, drafter;                     /* hidden width; 1 when the model has an MTP block: */
    size_t draft_row_floats;                 /* per recurrent layer: what a draft row leaves for its replay */
    int max_context;                         /* positions */
} st_shape;

/* Draft rows of one window at most (besides the certain one). */
enum { ST_MAX_DRAFTS = 8 };

typedef struct st_session {
    st_shape shape;
    st_pool *pool, *draft_pool;
    int n;                  /* tokens held: ids[0..n), state after them (and after `pending` replays) */
    int32_t *ids;           /* [max_context] */
    uint8_t **blocks;       /* [max_context / 64] */
    int n_blocks;           /* taken */
    float *states;          /* [recurrent_layers][state_floats] */
    float *convs;           /* [recurrent_layers][conv_floats], oldest row first */
    int pending;            /* accepted draft rows that states and convs do not hold yet: replayed by the next window */
    float *draft_rows;      /* [recurrent_layers][ST_MAX_DRAFTS][draft_row_floats]; NULL without a drafter */
    /* drafter: rows [0, drafted) of its layer are there, made from target states */
    uint8_t **draft_blocks;
    int n_draft_blocks, drafted;
    float *hidden;          /* [n_embd] trunk hidden of token hidden_at - 1, */
    int hidden_at;          /* which is the last token held, unless the session was cut */
} st_session;

/* Bytes of one block of 64 positions (trunk, drafter), and of what a session holds besides blocks. */
size_t st_block_bytes(const st_shape *shape);
size_t st_draft_block_bytes(const st_shape *shape);
size_t st_session_fixed_bytes(const st_shape *shape);

int st_session_new(const st_shape *shape, st_pool *pool, st_pool *draft_pool, st_session **out, st_error *err);
void st_session_free(st_session *s);
/* Forget everything and give the blocks back. */
void st_session_clear(st_session *s);
/* Make positions [n, upto) writable: take what is missing, copy what is shared. -1 and err pool_full when the pool
 * has no block left; the session is usable as it was then. `drafts`: the drafter's rows too (these never fail: rows
 * that find no room are left out). */
int st_session_reserve(st_session *s, int upto, int drafts, st_error *err);
/* Cut a session without recurrent layers to n tokens. */
void st_session_cut(st_session *s, int n);

/* Bytes a checkpoint of this session keeps for itself (shared blocks not counted). */
size_t st_checkpoint_bytes(const st_shape *shape, int n);

typedef struct st_checkpoint {
    int n;
    int32_t *ids;
    uint8_t **blocks, **draft_blocks;
    int n_blocks, n_draft_blocks, drafted;
    float *states, *convs, *hidden;
    int hidden_at;          /* n, or another: not known */
    int users;              /* the prompt cache, transfers */
    int pinned, root;       /* kept before others: pin=N of a request; the end of a system prompt */
    uint64_t used;          /* clock of the last use */
    struct st_checkpoint *next;
} st_checkpoint;

/* Keep the session's state at its position (nothing may be pending). NULL when there is no memory. */
st_checkpoint *st_checkpoint_new(const st_session *s);
/* One more user; the last to free it is the one that counts. */
st_checkpoint *st_checkpoint_share(st_checkpoint *c);
void st_checkpoint_free(const st_session *s, st_checkpoint *c);
/* Put the session where the checkpoint is. The session's own content is given up. */
void st_checkpoint_restore(st_session *s, const st_checkpoint *c);

#endif

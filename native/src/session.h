/* A session: the state of one conversation. Token ids, key/value blocks of 64 positions, recurrent states.
 *
 * The model's shape decides the sizes; a block holds, for every attention layer and key/value head in order, the
 * attention block layout of kernels.h. Blocks come from a pool that grows by need. */
#ifndef ST_SESSION_H
#define ST_SESSION_H

#include "strata.h"

typedef struct st_shape {
    int attn_layers, kv_heads, head_dim;     /* blocks */
    int kv;                                  /* enum st_kv_type */
    int recurrent_layers;                    /* states: */
    size_t state_floats, conv_floats;        /* per recurrent layer: S of all heads; history of raw projections */
    int max_context;                         /* positions */
} st_shape;

typedef struct st_session {
    st_shape shape;
    int n;                  /* tokens held: ids[0..n), state after them */
    int32_t *ids;           /* [max_context] */
    uint8_t **blocks;       /* [max_context / 64] */
    int n_blocks;           /* allocated */
    float *states;          /* [recurrent_layers][state_floats] */
    float *convs;           /* [recurrent_layers][conv_floats], oldest row first */
} st_session;

/* Bytes of one block of 64 positions, of all recurrent state, and of a whole session at n positions. */
size_t st_block_bytes(const st_shape *shape);
size_t st_session_fixed_bytes(const st_shape *shape);

int st_session_new(const st_shape *shape, st_session **out, st_error *err);
void st_session_free(st_session *s);
/* Forget everything: the session is as new, its blocks are kept for the next conversation. */
void st_session_clear(st_session *s);
/* Make room for positions below `upto`. Error no_memory; the session is unchanged then. */
int st_session_reserve(st_session *s, int upto, st_error *err);

#endif

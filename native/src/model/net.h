/* A transformer as the architectures share it: shapes, layers, the scratch of a window, and the stages they are made
 * of. An architecture file reads its keys and tensors into this and says in which order the stages run.
 *
 * A window runs on all members of the team at once. Between barriers the work of a stage is split over output columns,
 * heads or rows, never inside a sum. A small window (few rows) computes its norms and quantised rows on every member
 * again: that costs less than a barrier. */
#ifndef ST_NET_H
#define ST_NET_H

#include <stdatomic.h>

#include "model/act.h"
#include "model/gguf.h"
#include "model/model.h"

enum { ST_TAPS = 4, ST_SMALL_ROWS = 4, ST_MAX_ROWS = 4096 + 64 * 9 + 1, ST_MAX_HEAD_DIM = 1024, ST_MAX_EXPERTS = 4096, ST_MAX_USED = 64 };

/* How rope pairs the values of a head: (i, i + n_rot / 2) or (2i, 2i + 1). */
typedef enum st_rope { ST_ROPE_HALVES, ST_ROPE_ADJACENT } st_rope;

typedef struct st_layer {
    int recurrent, index; /* index among the layers of its kind */
    float *attn_norm, *post_norm;
    /* gated delta net */
    st_mat qkv, gate, out;
    float *conv, *alpha, *beta, *a, *dt, *norm; /* conv [ST_TAPS][channels] */
    /* attention; the norms of q and k may be NULL */
    st_mat q, k, v, o;
    float *q_norm, *k_norm;
    /* dense feed-forward */
    st_mat ff_gate, ff_up, ff_down;
    /* experts; without a shared one shared_gate is NULL */
    float *router, *shared_gate; /* [experts][E], [E] */
    st_mat gate_e, up_e, down_e, gate_s, up_s, down_s;
} st_layer;

/* What a stage keeps per row. Shared for a large window, one for each member for a small one. */
typedef struct st_temp {
    st_act h, mix, pair, shared; /* normed rows; mixer output rows; expert rows; shared expert (or dense) rows */
    st_act draft;                /* the drafter's input rows, of the large one only */
    float *logits;               /* [rows][experts] */
    int *expert;                 /* [rows][used], ascending */
    float *weight, *gate;        /* [rows][used]; [rows]: sigmoid of the shared expert's gate */
    int n_active, *active;       /* experts that have rows, ascending */
    int *first;                  /* [n_active + 1] first pair of an active expert */
    int *token;                  /* [rows * used] row of a pair, pairs sorted by expert then row */
    float *share;                /* [rows * used] weight of a pair */
    float *state;                /* [d * d] a recurrent head's state under draft rows */
} st_temp;

typedef struct st_row {
    uint8_t *const *blocks; /* where this row's keys and values go: the session's, or its drafter's */
    int pos;
} st_row;

typedef struct st_net {
    int n_layers, E;
    float eps;
    /* attention; gated: every query head is followed by its gate, and q_norm, k_norm exist */
    int heads, kv_heads, hd, n_rot, gated;
    int kv; /* how keys and values are held: enum st_kv_type */
    st_rope rope;
    double *inv_freq; /* [n_rot / 2] */
    /* gated delta net: key heads, value heads, head width, channels of the convolution, width of all values */
    int hk, hv, d, channels, values;
    /* feed-forward: dense width, or experts, how many serve a token, their widths */
    int ff_dense, experts, used, ff, shared_ff;
    float expert_scale;
    const st_gguf_tensor *embedding;
    float *out_norm;
    st_mat head;
    st_layer *layers;
    /* drafter: one more block; its input is W [RMS(embedding, token_norm); RMS(hidden, hidden_norm)] */
    st_layer *draft;
    st_mat draft_in;
    float *draft_token_norm, *draft_hidden_norm, *draft_out_norm;
    /* scratch of a window */
    st_row *rows;
    float *x, *u, *c, *z, *decay, *beta, *cos, *sin, *gate_rows, *up_rows, *gate_shared, *up_shared, *moe;
    st_temp large, *small; /* small: one for each member */
    int members;
    atomic_int *next; /* work counters of a large window, one for each layer */
} st_net;

/* One member's view of a window (w), or of a pass of the drafter (w is NULL). */
typedef struct st_pass {
    const st_model *m;
    st_net *p;
    const st_kernels *k;
    const st_window *w;
    int member, size, n_rows;
    int small;
    st_temp *t;
} st_pass;

/* ---- stages (net.c, attention.c, delta_net.c, feed_forward.c) ------------------------------------------------ */

void st_pass_start(st_pass *c, st_model *m, const st_window *w, int member, int size);
/* Embeddings of the rows into x, their rope angles. */
void st_stage_begin(const st_pass *c);
/* h = RMS(x, w), as floats and quantised. */
void st_stage_norm(const st_pass *c, const float *w);
/* x += Attention(h); x += GatedDeltaNet(h); h is normed before. */
void st_stage_attention(const st_pass *c, const st_layer *l);
void st_stage_delta_net(const st_pass *c, const st_layer *l);
/* x += FeedForward(h): dense, or routed experts with or without a shared one. */
void st_stage_dense(const st_pass *c, const st_layer *l);
void st_stage_experts(const st_pass *c, const st_layer *l);
/* logits = W_out RMS(x, norm) of the wanted rows; RMS(x, norm) of all rows, or of the wanted ones, into hidden. */
void st_stage_head(const st_pass *c);
void st_stage_draft_head(const st_pass *c, const st_draft *d);
/* Rows, their embeddings and angles for a pass of the drafter; x = its input. */
void st_pass_start_draft(st_pass *c, st_model *m, const st_draft *d, int member, int size);
void st_stage_draft_begin(const st_pass *c, const st_draft *d);
/* Replay what is pending of a session, all layers, on the calling thread. */
void st_net_settle(st_model *m, st_session *s);

/* ---- what stages are made of ---------------------------------------------------------------------------------- */

static inline void st_pass_barrier(const st_pass *c) { st_team_barrier(c->m->team, c->member); }

/* The rows a member prepares: all of a small window, its share of a large one (st_rows_ready must follow). */
static inline void st_my_rows(const st_pass *c, int rows, int *lo, int *hi) {
    if (c->small) *lo = 0, *hi = rows;
    else st_share(rows, c->member, c->size, lo, hi);
}
static inline void st_rows_ready(const st_pass *c) {
    if (!c->small) st_pass_barrier(c);
}

/* One of several matrices over the same rows: its outputs go to y. */
typedef struct st_column {
    const st_mat *m;
    float *y;
    size_t ystride;
} st_column;

/* A member's share of all columns of the list. */
void st_columns(const st_pass *c, const st_act *in, int rows, const st_column *list, int n, int mode);
/* x += W_o mix, where every member has written its part of large.mix.x. Ends in a barrier. */
void st_project_out(const st_pass *c, const st_mat *out);

/* ---- loading (net_load.c) --------------------------------------------------------------------------------------- */

typedef struct st_loader {
    st_model *m;
    st_net *p;
    st_error *err;
    int block;
} st_loader;

/* Tensor blk.<block>.<suffix> as a matrix, or as rows of floats. */
int st_load_mat(const st_loader *L, const char *suffix, int k, int n, int experts, st_mat *out);
int st_load_vec(const st_loader *L, const char *suffix, int k, int rows, float **out);
/* The keys of attention: head counts, lengths, rope, eps. `gated` must be set. */
int st_load_attention_keys(st_model *m, st_net *p, st_error *err);
int st_load_attention(const st_loader *L, st_layer *l);
int st_load_delta_net_keys(st_model *m, st_net *p, st_error *err);
int st_load_delta_net(const st_loader *L, st_layer *l);
int st_load_expert_keys(st_model *m, st_net *p, st_error *err);
int st_load_experts(const st_loader *L, st_layer *l);
int st_load_dense(const st_loader *L, st_layer *l);
/* The drafter's own tensors of MTP block L->block (nextn.*); its layer is loaded by the architecture. */
int st_load_draft(const st_loader *L);
/* Embedding, final norm, head (the embedding where output.weight is absent). */
int st_load_globals(st_model *m, st_net *p, st_error *err);
/* A net with room for n layers, hung on m->self; the session's shape and the scratch once all is loaded. */
st_net *st_net_new(st_model *m, st_error *err);
int st_net_layers(st_model *m, st_net *p, st_error *err);
int st_net_finish(st_model *m, st_net *p, st_error *err);
void st_net_release(st_model *m);

#endif

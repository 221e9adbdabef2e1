/* A loaded model and its forward pass over a window of rows. One file per architecture fills the table below. */
#ifndef ST_MODEL_H
#define ST_MODEL_H

#include "kernels/kernels.h"
#include "model/weights.h"
#include "session.h"
#include "team.h"

/* A run: consecutive new tokens of one session, ids[0..n), at positions session->n + 0..n-1. The first `certain` of
 * them stay (all of a prompt; the decode row); the rest are drafts, at most ST_MAX_DRAFTS. */
typedef struct st_run {
    st_session *session;
    const int32_t *ids;
    int n, certain;
} st_run;

/* One forward pass. Rows are the runs' tokens in order. `want` lists, ascending, the rows whose logits are asked
 * for; they go to logits + i * n_vocab. `hidden` (may be NULL) receives every row's hidden state as the head sees it,
 * n_embd floats each, `bad` for every row whether a value of it was not finite. A window may hold at most the model's max_rows rows. */
typedef struct st_window {
    const st_run *runs;
    int n_runs;
    const int *want;
    int n_want;
    float *logits, *hidden;
    uint8_t *bad;
} st_window;

/* One row of the drafter: position pos, the hidden state of position pos - 1 (NULL: zero), the token at pos. */
typedef struct st_draft_row {
    st_session *session;
    int pos;
    int32_t token;
    const float *hidden;
} st_draft_row;

/* A pass of the drafter over rows of any sessions, ascending positions within one. The rows of `want` give logits (of
 * the token at pos + 1) and their own hidden state, which the next draft step takes. */
typedef struct st_draft {
    const st_draft_row *rows;
    int n_rows;
    const int *want;
    int n_want;
    float *logits, *hidden;
} st_draft;

typedef struct st_model st_model;

typedef struct st_arch {
    const char *name; /* general.architecture */
    /* Read shapes and weights; the model's generic fields are filled in by the caller before. */
    int (*load)(st_model *m, st_error *err);
    /* The window on every member of the team. */
    void (*forward)(st_model *m, const st_window *w, int member, int size);
    /* The drafter on every member of the team; NULL without one. */
    void (*draft)(st_model *m, const st_draft *d, int member, int size);
    /* Bring the recurrent state of a session up to its position (replay `pending`); NULL without recurrent layers. */
    void (*settle)(st_model *m, st_session *s);
    void (*release)(st_model *m);
} st_arch;

struct st_model {
    const st_arch *arch;
    const st_gguf *gguf;
    const st_kernels *kernels;
    st_team *team;
    st_weights *weights;
    void *self; /* the architecture's own */
    st_shape shape;
    int n_embd, n_vocab, trained_context, max_rows;
    const char *dense; /* how F16 and BF16 matrices are held: part of the numeric identity */
    char fingerprint[40];
};

/* What is fixed when a model is opened. */
typedef struct st_model_options {
    const char *path;
    const char *isa;   /* NULL or "auto": the best here */
    int threads;       /* 0: one per processor */
    int max_context;   /* 0: the trained one */
    int max_rows;      /* rows of a window, 1..4096 (0: 512) */
    int kv;            /* enum st_kv_type: how keys and values are held */
    int allow_untrained_context;
    st_weights_how weights;
    void (*progress)(void *arg, int percent);
    void *arg;
} st_model_options;

int st_model_open(const st_model_options *o, st_model **out, st_error *err);
void st_model_close(st_model *m);

/* Run a window, or a pass of the drafter. Sessions must have room (st_session_reserve). */
void st_model_forward(st_model *m, const st_window *w);
void st_model_draft(st_model *m, const st_draft *d);
/* After a window: the first `kept` (>= certain) tokens of a run stay. */
void st_model_keep(const st_run *run, int kept);
/* Nothing is pending afterwards: before a checkpoint, or when a session comes to rest. */
void st_model_settle(st_model *m, st_session *s);

/* Metadata key ARCH.<suffix> as an integer in [lo, hi]; missing = error unless `fallback` >= 0. */
int st_model_int(const st_model *m, const char *suffix, int64_t lo, int64_t hi, int64_t fallback, int *out, st_error *err);
int st_model_float(const st_model *m, const char *suffix, double fallback, double *out, st_error *err);

extern const st_arch st_arch_llama, st_arch_qwen35moe;

#endif

/* A loaded model and its forward pass over a window of rows. One file per architecture fills the table below. */
#ifndef ST_MODEL_H
#define ST_MODEL_H

#include "kernels/kernels.h"
#include "model/weights.h"
#include "session.h"
#include "team.h"

/* A run: consecutive new tokens of one session, ids[0..n), at positions session->n + 0..n-1. */
typedef struct st_run {
    st_session *session;
    const int32_t *ids;
    int n;
} st_run;

/* One forward pass. Rows are the runs' tokens in order. `want` lists, ascending, the rows whose logits are asked
 * for; they go to logits + i * n_vocab. A window may hold at most the model's max_rows rows. */
typedef struct st_window {
    const st_run *runs;
    int n_runs;
    const int *want;
    int n_want;
    float *logits;
} st_window;

typedef struct st_model st_model;

typedef struct st_arch {
    const char *name; /* general.architecture */
    /* Read shapes and weights; the model's generic fields are filled in by the caller before. */
    int (*load)(st_model *m, st_error *err);
    /* The window on every member of the team. */
    void (*forward)(st_model *m, const st_window *w, int member, int size);
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
    void (*progress)(void *arg, int percent);
    void *arg;
} st_model_options;

int st_model_open(const st_model_options *o, st_model **out, st_error *err);
void st_model_close(st_model *m);

/* Run a window. Sessions must have room (st_session_reserve); their n and ids move on by the run. */
void st_model_forward(st_model *m, const st_window *w);

/* Metadata key ARCH.<suffix> as an integer in [lo, hi]; missing = error unless `fallback` >= 0. */
int st_model_int(const st_model *m, const char *suffix, int64_t lo, int64_t hi, int64_t fallback, int *out, st_error *err);
int st_model_float(const st_model *m, const char *suffix, double fallback, double *out, st_error *err);

extern const st_arch st_arch_llama, st_arch_qwen35moe;

#endif

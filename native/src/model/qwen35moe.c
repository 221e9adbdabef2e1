/* qwen35moe (Qwen3.5 / 3.6 mixture-of-experts): gated delta net layers, every `full_attention_interval`-th layer gated
 * full attention, and in every layer routed experts with a gated shared expert.
 *
 *   x += Mixer(RMS(x, attn_norm));  x += MoE(RMS(x, post_attention_norm));  logits = W_out RMS(x, output_norm)
 *
 * Formulae: Qwen's transformers implementation (qwen3_5_moe); tensor names: GGUF. The stored norms are already 1 + w,
 * ssm_a is already -exp(A_log), value heads are tiled (key head of value head j is j mod Hk).
 *
 * A window runs on all members of the team at once. Between barriers the work of a stage is split over output columns,
 * heads or rows, never inside a sum. A small window (few rows) computes its norms and quantised rows on every member
 * again: that costs less than a barrier. */
#include "arith.h"
#include "errors.h"
#include "math_d.h"
#include "model/act.h"
#include "model/gguf.h"
#include "model/model.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { TAPS = 4, SMALL_ROWS = 4, MAX_ROWS = 4096, MAX_HEAD_DIM = 1024, MAX_EXPERTS = 4096, MAX_USED = 64 };

typedef struct layer {
    int recurrent, index; /* index among the layers of its kind */
    float *attn_norm, *post_norm;
    /* gated delta net */
    st_mat qkv, gate, out;
    float *conv, *alpha, *beta, *a, *dt, *norm; /* conv [TAPS][channels] */
    /* gated attention */
    st_mat q, k, v, o;
    float *q_norm, *k_norm;
    /* experts */
    float *router, *shared_gate; /* [experts][E], [E] */
    st_mat gate_e, up_e, down_e, gate_s, up_s, down_s;
} layer;

/* What a stage keeps per row. Shared for a large window, one for each member for a small one. */
typedef struct temp {
    st_act h, mix, pair, shared; /* normed rows; mixer output rows; expert rows; shared expert rows */
    float *logits;               /* [rows][experts] */
    int *expert;                 /* [rows][used], ascending */
    float *weight, *gate;        /* [rows][used]; [rows]: sigmoid of the shared expert's gate */
    int n_active, *active;       /* experts that have rows, ascending */
    int *first;                  /* [n_active + 1] first pair of an active expert */
    int *token;                  /* [rows * used] row of a pair, pairs sorted by expert then row */
    float *share;                /* [rows * used] weight of a pair */
} temp;

typedef struct row {
    st_session *s;
    int pos;
} row;

typedef struct qwen {
    int n_layers, E, heads, kv_heads, hd, n_rot, hk, hv, d, channels, values, experts, used, ff, shared_ff;
    float eps, expert_scale;
    double *inv_freq;
    const st_gguf_tensor *embedding;
    float *out_norm;
    st_mat head;
    layer *layers;
    /* scratch of a window */
    row *rows;
    float *x, *u, *c, *z, *cos, *sin, *gate_rows, *up_rows, *gate_shared, *up_shared, *moe;
    temp large, *small; /* small: one for each member */
    int members;
    atomic_int *next; /* work counters of a large window, one for each layer */
} qwen;

/* One member's view of a window. */
typedef struct ctx {
    const st_model *m;
    qwen *p;
    const st_kernels *k;
    const st_window *w;
    int member, size, n_rows;
    int small;
    temp *t;
} ctx;

static void barrier(const ctx *c) { st_team_barrier(c->m->team, c->member); }

/* The rows a member prepares: all of a small window, its share of a large one (a barrier follows then). */
static void my_rows(const ctx *c, int rows, int *lo, int *hi) {
    if (c->small) *lo = 0, *hi = rows;
    else st_share(rows, c->member, c->size, lo, hi);
}
static void rows_ready(const ctx *c) {
    if (!c->small) barrier(c);
}

/* A member's share of the columns of several matrices over the same rows, as one run of groups. */
typedef struct column {
    const st_mat *m;
    float *y;
    size_t ystride;
} column;

static void columns(const ctx *c, const st_act *in, int rows, const column *list, int n, int mode) {
    int total = 0, lo, hi;
    for (int i = 0; i < n; i++) total += list[i].m->n / ST_LANES;
    st_share(total, c->member, c->size, &lo, &hi);
    for (int i = 0, at = 0; i < n; at += list[i].m->n / ST_LANES, i++) {
        int groups = list[i].m->n / ST_LANES, g0 = lo - at > 0 ? lo - at : 0, g1 = hi - at < groups ? hi - at : groups;
        st_product p = {.m = list[i].m, .g0 = g0, .g1 = g1, .in = in, .rows = rows, .y = list[i].y, .ystride = list[i].ystride, .mode = mode};
        st_product_run(c->k, &p);
    }
}

/* ---- start of a window: embeddings, rope angles ------------------------------------------------------------- */

static void begin(const ctx *c) {
    qwen *p = c->p;
    int at = 0, half = p->n_rot / 2, lo, hi;
    st_share(c->n_rows, c->member, c->size, &lo, &hi);
    for (int i = 0; i < c->w->n_runs; i++) {
        const st_run *run = &c->w->runs[i];
        for (int j = 0; j < run->n; j++, at++) {
            if (at < lo || at >= hi) continue;
            p->rows[at] = (row){run->session, run->session->n + j};
            st_gguf_row_f32(p->embedding, run->ids[j], p->x + (size_t)at * (size_t)p->E);
            for (int f = 0; f < half; f++) {
                double sn, cs;
                st_sincos_d((double)p->rows[at].pos * p->inv_freq[f], &sn, &cs);
                p->cos[at * half + f] = (float)cs;
                p->sin[at * half + f] = (float)sn;
            }
        }
    }
    if (c->member == 0)
        for (int i = 0; i < p->n_layers; i++) atomic_store_explicit(&p->next[i], 0, memory_order_relaxed);
    barrier(c);
}

/* h = RMS(x, w), as floats and quantised. */
static void normed(const ctx *c, const float *w) {
    qwen *p = c->p;
    int lo, hi;
    my_rows(c, c->n_rows, &lo, &hi);
    for (int r = lo; r < hi; r++) {
        c->k->rms_norm(p->x + (size_t)r * (size_t)p->E, w, p->E, p->eps, c->t->h.x + (size_t)r * (size_t)p->E);
        st_act_quantize(c->k, &c->t->h, r);
    }
    rows_ready(c);
}

/* x += W_o mix, where every member has written its part of large.mix.x. */
static void project_out(const ctx *c, const st_mat *out) {
    qwen *p = c->p;
    st_act mix = c->t->mix;
    int lo, hi;
    my_rows(c, c->n_rows, &lo, &hi);
    mix.k = out->k;
    mix.x = p->large.mix.x;
    for (int r = lo; r < hi; r++) st_act_quantize(c->k, &mix, r);
    rows_ready(c);
    columns(c, &mix, c->n_rows, &(column){out, p->x, (size_t)p->E}, 1, ST_ADD);
    barrier(c);
}

/* ---- gated delta net ---------------------------------------------------------------------------------------- */

/* c = silu(causal depthwise convolution of u) for channels [ch, ch + n) of every row; the history moves on. */
static void convolve(const ctx *c, const layer *l, int ch, int n) {
    qwen *p = c->p;
    size_t width = (size_t)p->channels;
    for (int i = 0, at = 0; i < c->w->n_runs; at += c->w->runs[i].n, i++) {
        const st_run *run = &c->w->runs[i];
        float *history = run->session->convs + (size_t)l->index * (TAPS - 1) * width + ch;
        const float *fresh = p->u + (size_t)at * width + ch;
        for (int j = 0; j < run->n; j++) {
            const float *taps[TAPS];
            for (int t = 0; t < TAPS; t++) {
                int back = j - (TAPS - 1) + t;
                taps[t] = back < 0 ? history + (size_t)(TAPS - 1 + back) * width : fresh + (size_t)back * width;
            }
            c->k->conv4_silu(l->conv + ch, width, taps, n, p->c + (size_t)(at + j) * width + ch);
        }
        for (int t = 0; t < TAPS - 1; t++) { /* ascending: a row moves only to a lower place */
            int back = run->n - (TAPS - 1) + t;
            const float *from = back < 0 ? history + (size_t)(TAPS - 1 + back) * width : fresh + (size_t)back * width;
            memmove(history + (size_t)t * width, from, (size_t)n * sizeof(float));
        }
    }
}

/* One value head over every row: S = e^g S + k (beta (v - e^g k^T S))^T, o = q^T S, y = RMS(o, norm) silu(z). */
static void scan_head(const ctx *c, const layer *l, int vh, int kh) {
    qwen *p = c->p;
    int d = p->d;
    float o[MAX_HEAD_DIM];
    for (int i = 0, at = 0; i < c->w->n_runs; i++) {
        float *S = c->w->runs[i].session->states + ((size_t)l->index * (size_t)p->hv + (size_t)vh) * (size_t)(d * d);
        for (int j = 0; j < c->w->runs[i].n; j++, at++) {
            const float *h = c->t->h.x + (size_t)at * (size_t)p->E, *qkv = p->c + (size_t)at * (size_t)p->channels;
            float a, b;
            c->k->dots(l->alpha + (size_t)vh * (size_t)p->E, 1, p->E, h, &a);
            c->k->dots(l->beta + (size_t)vh * (size_t)p->E, 1, p->E, h, &b);
            float decay = st_exp(l->a[vh] * st_softplus(a + l->dt[vh]));
            c->k->delta_step(S, d, d, qkv + kh * d, qkv + (p->hk + kh) * d, qkv + (2 * p->hk + vh) * d, decay, st_sigmoid(b), o);
            size_t v = (size_t)at * (size_t)p->values + (size_t)(vh * d);
            c->k->norm_gate(o, l->norm, p->z + v, d, p->eps, p->large.mix.x + v);
        }
    }
}

static void gated_delta_net(const ctx *c, const layer *l) {
    qwen *p = c->p;
    int lo, hi, d = p->d;
    float q_scale = 1.0f / sqrtf((float)d);
    normed(c, l->attn_norm);
    columns(c, &c->t->h, c->n_rows, (column[]){{&l->qkv, p->u, (size_t)p->channels}, {&l->gate, p->z, (size_t)p->values}}, 2, ST_STORE);
    barrier(c);
    st_share(p->hk, c->member, c->size, &lo, &hi); /* a key head and its value heads stay on one member */
    for (int kh = lo; kh < hi; kh++) {
        convolve(c, l, kh * d, d);
        convolve(c, l, (p->hk + kh) * d, d);
        for (int r = 0; r < c->n_rows; r++) {
            float *q = p->c + (size_t)r * (size_t)p->channels + kh * d, *k = q + p->hk * d;
            c->k->l2_norm(q, d, q_scale, q);
            c->k->l2_norm(k, d, 1.0f, k);
        }
        for (int vh = kh; vh < p->hv; vh += p->hk) {
            convolve(c, l, (2 * p->hk + vh) * d, d);
            scan_head(c, l, vh, kh);
        }
    }
    barrier(c);
    project_out(c, &l->out);
}

/* ---- gated attention ---------------------------------------------------------------------------------------- */

/* Half-split pairs (i, i + n_rot / 2) of the first n_rot values. */
static void rope(const qwen *p, int r, float *x) {
    int half = p->n_rot / 2;
    for (int i = 0; i < half; i++) st_rope_pair(x + i, x + i + half, p->cos[r * half + i], p->sin[r * half + i]);
}

static size_t head_offset(const qwen *p, const layer *l, int kvh) {
    return st_kv_head_bytes(p->hd) * ((size_t)l->index * (size_t)p->kv_heads + (size_t)kvh);
}

/* Key and value of one row and head into their block (layout: kernels.h). */
static void store_kv(const ctx *c, const layer *l, int r, int kvh) {
    qwen *p = c->p;
    int hd = p->hd, slot = p->rows[r].pos % ST_POSBLOCK;
    float key[MAX_HEAD_DIM];
    int8_t code[ST_KVGROUP];
    const float *k = p->u + (size_t)r * (size_t)(2 * p->kv_heads * hd) + kvh * hd, *v = k + p->kv_heads * hd;
    uint8_t *head = p->rows[r].s->blocks[p->rows[r].pos / ST_POSBLOCK] + head_offset(p, l, kvh);
    c->k->rms_norm(k, l->k_norm, hd, p->eps, key);
    rope(p, r, key);
    for (int g = 0; g * ST_KVGROUP < hd; g++) {
        int n = hd - g * ST_KVGROUP < ST_KVGROUP ? hd - g * ST_KVGROUP : ST_KVGROUP, at = g * ST_KVGROUP;
        uint16_t scale = c->k->quantize_kv(key + at, n, code);
        memcpy(head + st_kv_kscale_offset(hd) + (size_t)(g * ST_POSBLOCK + slot) * 2, &scale, 2);
        for (int j = 0; j < n; j++)
            head[((at + j) / 4 * ST_POSBLOCK + slot) * 4 + j % 4] = (uint8_t)(code[j] + 128);
        scale = c->k->quantize_kv(v + at, n, code);
        memcpy(head + st_kv_vscale_offset(hd) + (size_t)(g * ST_POSBLOCK + slot) * 2, &scale, 2);
        for (int j = 0; j < n; j++)
            head[st_kv_v_offset(hd) + (size_t)((slot / 4 * hd + at + j) * 4 + slot % 4)] = (uint8_t)code[j];
    }
}

/* One query head of one row over positions 0..pos, times sigmoid of its gate. q and gate lie head by head. */
static void attend(const ctx *c, const layer *l, int r, int h) {
    qwen *p = c->p;
    int hd = p->hd;
    float query[MAX_HEAD_DIM];
    const float *q = p->c + ((size_t)r * (size_t)p->heads + (size_t)h) * (size_t)(2 * hd);
    float *y = p->large.mix.x + ((size_t)r * (size_t)p->heads + (size_t)h) * (size_t)hd;
    c->k->rms_norm(q, l->q_norm, hd, p->eps, query);
    rope(p, r, query);
    st_attend a = {.blocks = (const uint8_t *const *)p->rows[r].s->blocks, .offset = head_offset(p, l, h / (p->heads / p->kv_heads)),
                   .hd = hd, .npos = p->rows[r].pos + 1, .scale = 1.0f / sqrtf((float)hd), .query = query, .out = y};
    c->k->attend(&a);
    c->k->sigmoid_mul(y, q + hd, hd, y);
}

static void gated_attention(const ctx *c, const layer *l) {
    qwen *p = c->p;
    size_t kv = (size_t)(p->kv_heads * p->hd);
    normed(c, l->attn_norm);
    columns(c, &c->t->h, c->n_rows,
            (column[]){{&l->q, p->c, (size_t)(2 * p->heads * p->hd)}, {&l->k, p->u, 2 * kv}, {&l->v, p->u + kv, 2 * kv}}, 3, ST_STORE);
    barrier(c);
    for (int i = c->member; i < c->n_rows * p->kv_heads; i += c->size) store_kv(c, l, i / p->kv_heads, i % p->kv_heads);
    barrier(c);
    for (int i = c->member; i < c->n_rows * p->heads; i += c->size) attend(c, l, i / p->heads, i % p->heads);
    barrier(c);
    project_out(c, &l->o);
}

/* ---- experts ------------------------------------------------------------------------------------------------ */

/* The `used` experts of largest logit (ties to the lower index), ascending, with softmax weights made to sum to 1. */
static void choose(const ctx *c, const layer *l, int r) {
    qwen *p = c->p;
    temp *t = c->t;
    const float *h = t->h.x + (size_t)r * (size_t)p->E;
    float *logit = t->logits + (size_t)r * (size_t)p->experts, prob[MAX_EXPERTS], gate;
    int *pick = t->expert + (size_t)r * (size_t)p->used;
    float *weight = t->weight + (size_t)r * (size_t)p->used;
    c->k->dots(l->router, p->experts, p->E, h, logit);
    c->k->dots(l->shared_gate, 1, p->E, h, &gate);
    t->gate[r] = st_sigmoid(gate);
    float m = logit[0];
    for (int e = 1; e < p->experts; e++) m = logit[e] > m ? logit[e] : m;
    c->k->exp_sub(logit, p->experts, m, 1.0f, prob);
    float sum = st_sum(prob, p->experts), kept = 0.0f;
    /* Insertion into a short list sorted by (logit descending, index ascending). */
    int n = 0;
    for (int e = 0; e < p->experts; e++) {
        int at = n;
        while (at > 0 && logit[e] > logit[pick[at - 1]]) at--;
        if (at >= p->used) continue;
        if (n < p->used) n++;
        for (int i = n - 1; i > at; i--) pick[i] = pick[i - 1];
        pick[at] = e;
    }
    for (int i = 1; i < n; i++) /* ascending index: the order of every sum over experts */
        for (int j = i; j > 0 && pick[j] < pick[j - 1]; j--) {
            int swap = pick[j];
            pick[j] = pick[j - 1];
            pick[j - 1] = swap;
        }
    for (int i = 0; i < n; i++) {
        weight[i] = prob[pick[i]] / sum;
        kept += weight[i];
    }
    if (!(kept > 6.103515625e-5f)) kept = 6.103515625e-5f;
    for (int i = 0; i < n; i++) weight[i] = weight[i] / kept * p->expert_scale;
}

/* Pairs (row, expert) sorted by expert, so that an expert's weights are read once for all its rows. */
static void sort_pairs(const ctx *c) {
    qwen *p = c->p;
    temp *t = c->t;
    int count[MAX_EXPERTS], total = c->n_rows * p->used;
    memset(count, 0, (size_t)p->experts * sizeof *count);
    for (int i = 0; i < total; i++) count[t->expert[i]]++;
    t->n_active = 0;
    for (int e = 0, at = 0; e < p->experts; e++) {
        if (!count[e]) continue;
        t->active[t->n_active] = e;
        t->first[t->n_active++] = at;
        int n = count[e];
        count[e] = at; /* from here on: the next free place of e */
        at += n;
    }
    t->first[t->n_active] = total;
    for (int i = 0; i < total; i++) {
        int at = count[t->expert[i]]++;
        t->token[at] = i / p->used;
        t->share[at] = t->weight[i];
    }
}

/* gate and up of active expert i (the shared expert for i == n_active), groups [g0, g1) of gate followed by up. */
static void gate_up(const ctx *c, const layer *l, int i, int g0, int g1) {
    qwen *p = c->p;
    temp *t = c->t;
    int shared = i == t->n_active, groups = (shared ? p->shared_ff : p->ff) / ST_LANES;
    int first = shared ? 0 : t->first[i], rows = shared ? c->n_rows : t->first[i + 1] - first;
    size_t width = (size_t)(shared ? p->shared_ff : p->ff);
    for (int half = 0; half < 2; half++) {
        int a = g0 - half * groups, b = g1 - half * groups;
        float *y = shared ? (half ? p->up_shared : p->gate_shared) : (half ? p->up_rows : p->gate_rows);
        st_product pr = {.m = shared ? (half ? &l->up_s : &l->gate_s) : (half ? &l->up_e : &l->gate_e),
                         .expert = shared ? 0 : t->active[i], .g0 = a > 0 ? a : 0, .g1 = b < groups ? b : groups, .in = &t->h,
                         .in_row = shared ? NULL : t->token + first, .rows = rows, .y = y + (size_t)first * width,
                         .ystride = width, .mode = ST_STORE};
        st_product_run(c->k, &pr);
    }
}

/* Every expert's gate and up: a small window splits all groups evenly, a large one hands out whole experts. */
static void all_gate_up(const ctx *c, const layer *l) {
    qwen *p = c->p;
    temp *t = c->t;
    int each = 2 * p->ff / ST_LANES, shared = 2 * p->shared_ff / ST_LANES;
    if (!c->small) {
        int i, at = (int)(l - p->layers);
        while ((i = atomic_fetch_add_explicit(&p->next[at], 1, memory_order_relaxed)) <= t->n_active)
            gate_up(c, l, i, 0, i == t->n_active ? shared : each);
        return;
    }
    int lo, hi;
    st_share(t->n_active * each + shared, c->member, c->size, &lo, &hi);
    for (int i = 0, at = 0; i <= t->n_active; at += each, i++) {
        int n = i == t->n_active ? shared : each, a = lo - at, b = hi - at;
        if (b > 0 && a < n) gate_up(c, l, i, a > 0 ? a : 0, b < n ? b : n);
    }
}

/* rows of silu(gate) * up, quantised. */
static void activate(const ctx *c, st_act *a, const float *gate, const float *up, int rows) {
    int lo, hi;
    my_rows(c, rows, &lo, &hi);
    for (int r = lo; r < hi; r++) {
        size_t at = (size_t)r * (size_t)a->k;
        c->k->silu_mul(gate + at, up + at, a->k, a->x + at);
        st_act_quantize(c->k, a, r);
    }
}

/* A member's columns of sum_k w_k E_k (ascending expert), then the shared expert, then into x. */
static void down(const ctx *c, const layer *l) {
    qwen *p = c->p;
    temp *t = c->t;
    size_t E = (size_t)p->E;
    int g0, g1;
    st_share(p->E / ST_LANES, c->member, c->size, &g0, &g1);
    size_t from = (size_t)g0 * ST_LANES, n = (size_t)(g1 - g0) * ST_LANES;
    for (int r = 0; r < c->n_rows; r++) memset(p->moe + (size_t)r * E + from, 0, n * sizeof(float));
    st_product pr = {.m = &l->down_e, .g0 = g0, .g1 = g1, .in = &t->pair, .y = p->moe, .ystride = E, .mode = ST_FMA_WEIGHT};
    int pair[MAX_ROWS];
    for (int i = 0; i < t->n_active; i++) {
        int first = t->first[i], rows = t->first[i + 1] - first;
        for (int j = 0; j < rows; j++) pair[j] = first + j;
        pr.expert = t->active[i];
        pr.in_row = pair;
        pr.out_row = t->token + first;
        pr.weight = t->share + first;
        pr.rows = rows;
        st_product_run(c->k, &pr);
    }
    st_product sh = {.m = &l->down_s, .g0 = g0, .g1 = g1, .in = &t->shared, .rows = c->n_rows, .y = p->moe, .ystride = E,
                     .mode = ST_FMA_WEIGHT, .weight = t->gate};
    st_product_run(c->k, &sh);
    for (int r = 0; r < c->n_rows; r++) {
        float *x = p->x + (size_t)r * E + from, *y = p->moe + (size_t)r * E + from;
        for (size_t j = 0; j < n; j++) x[j] += y[j];
    }
}

static void mixture(const ctx *c, const layer *l) {
    qwen *p = c->p;
    temp *t = c->t;
    int lo, hi;
    normed(c, l->post_norm);
    my_rows(c, c->n_rows, &lo, &hi);
    for (int r = lo; r < hi; r++) choose(c, l, r);
    rows_ready(c);
    if (c->small || c->member == 0) sort_pairs(c);
    rows_ready(c);
    all_gate_up(c, l);
    barrier(c);
    activate(c, &t->pair, p->gate_rows, p->up_rows, c->n_rows * p->used);
    activate(c, &t->shared, p->gate_shared, p->up_shared, c->n_rows);
    rows_ready(c);
    down(c, l);
    barrier(c);
}

/* ---- the window --------------------------------------------------------------------------------------------- */

static void head(const ctx *c) {
    qwen *p = c->p;
    temp *t = c->t;
    int lo, hi;
    if (!c->w->n_want) return;
    my_rows(c, c->w->n_want, &lo, &hi);
    for (int i = lo; i < hi; i++) {
        size_t r = (size_t)c->w->want[i], E = (size_t)p->E;
        c->k->rms_norm(p->x + r * E, p->out_norm, p->E, p->eps, t->h.x + (size_t)i * E);
        st_act_quantize(c->k, &t->h, i);
    }
    rows_ready(c);
    columns(c, &t->h, c->w->n_want, &(column){&p->head, c->w->logits, (size_t)c->m->n_vocab}, 1, ST_STORE);
}

static void forward(st_model *m, const st_window *w, int member, int size) {
    qwen *p = m->self;
    ctx c = {.m = m, .p = p, .k = m->kernels, .w = w, .member = member, .size = size};
    for (int i = 0; i < w->n_runs; i++) c.n_rows += w->runs[i].n;
    c.small = c.n_rows <= SMALL_ROWS;
    c.t = c.small ? &p->small[member] : &p->large;
    begin(&c);
    for (int i = 0; i < p->n_layers; i++) {
        const layer *l = &p->layers[i];
        if (l->recurrent) gated_delta_net(&c, l);
        else gated_attention(&c, l);
        mixture(&c, l);
    }
    head(&c);
}

/* ---- loading ------------------------------------------------------------------------------------------------ */

static int read_shape(st_model *m, qwen *p, st_error *err) {
    int nextn, blocks, inner, value_length;
    double eps, base;
    if (st_model_int(m, "block_count", 1, 4096, -1, &blocks, err) || st_model_int(m, "nextn_predict_layers", 0, 64, 0, &nextn, err) ||
        st_model_int(m, "embedding_length", 32, 1 << 16, -1, &p->E, err) ||
        st_model_int(m, "attention.head_count", 1, 4096, -1, &p->heads, err) ||
        st_model_int(m, "attention.head_count_kv", 1, 4096, -1, &p->kv_heads, err) ||
        st_model_int(m, "attention.key_length", 4, MAX_HEAD_DIM, p->E / p->heads, &p->hd, err) ||
        st_model_int(m, "attention.value_length", 4, MAX_HEAD_DIM, p->hd, &value_length, err) ||
        st_model_int(m, "rope.dimension_count", 2, p->hd, p->hd, &p->n_rot, err) ||
        st_model_int(m, "ssm.group_count", 1, 4096, -1, &p->hk, err) ||
        st_model_int(m, "ssm.time_step_rank", 1, 4096, -1, &p->hv, err) ||
        st_model_int(m, "ssm.state_size", 4, MAX_HEAD_DIM, -1, &p->d, err) ||
        st_model_int(m, "ssm.inner_size", 1, 1 << 20, p->hv * p->d, &inner, err) ||
        st_model_int(m, "ssm.conv_kernel", TAPS, TAPS, TAPS, &(int){0}, err) ||
        st_model_int(m, "expert_count", 1, MAX_EXPERTS, -1, &p->experts, err) ||
        st_model_int(m, "expert_used_count", 1, MAX_USED, -1, &p->used, err) ||
        st_model_int(m, "expert_feed_forward_length", 16, 1 << 16, -1, &p->ff, err) ||
        st_model_int(m, "expert_shared_feed_forward_length", 16, 1 << 16, p->ff, &p->shared_ff, err) ||
        st_model_float(m, "attention.layer_norm_rms_epsilon", -1, &eps, err) || st_model_float(m, "rope.freq_base", 10000.0, &base, err))
        return -1;
    double scale;
    if (st_model_float(m, "expert_weights_scale", 1.0, &scale, err)) return -1;
    p->n_layers = blocks - nextn;
    p->eps = (float)eps;
    p->expert_scale = (float)scale;
    p->values = p->hv * p->d;
    p->channels = 2 * p->hk * p->d + p->values;
    if (p->n_layers < 1) return st_fail(err, "model_format", "block_count %d leaves no layer besides %d MTP blocks", blocks, nextn);
    if (value_length != p->hd) return st_fail(err, "model_unsupported", "attention.value_length %d differs from key_length %d", value_length, p->hd);
    if (p->heads % p->kv_heads) return st_fail(err, "model_format", "attention.head_count %d is no multiple of head_count_kv %d", p->heads, p->kv_heads);
    if (p->hv % p->hk) return st_fail(err, "model_format", "ssm.time_step_rank %d is no multiple of ssm.group_count %d", p->hv, p->hk);
    if (inner != p->values) return st_fail(err, "model_format", "ssm.inner_size %d is not time_step_rank x state_size = %d", inner, p->values);
    if (p->n_rot % 2) return st_fail(err, "model_format", "rope.dimension_count %d is odd", p->n_rot);
    if (p->used > p->experts) return st_fail(err, "model_format", "expert_used_count %d exceeds expert_count %d", p->used, p->experts);
    if (p->E % 32 || p->values % 32 || p->hd % 4 || p->d % 4 || (p->heads * p->hd) % 32 || p->ff % 32 || p->shared_ff % 32)
        return st_fail(err, "model_unsupported", "embedding_length %d, ssm inner size %d, attention width %d and expert widths %d, %d must be multiples of 32",
                       p->E, p->values, p->heads * p->hd, p->ff, p->shared_ff);
    if (!(p->inv_freq = calloc((size_t)p->n_rot / 2, sizeof *p->inv_freq))) return st_fail(err, "no_memory", "no memory for rope");
    for (int i = 0; i < p->n_rot / 2; i++) p->inv_freq[i] = st_pow_d(base, -2.0 * i / p->n_rot);
    return 0;
}

/* Which layers are recurrent: a flag for each block, else every layer but the interval-th. */
static int layer_kinds(st_model *m, qwen *p, st_error *err) {
    int interval, n = p->n_layers;
    if (st_model_int(m, "full_attention_interval", 1, 4096, 4, &interval, err)) return -1;
    int64_t *flags = calloc((size_t)n + 64, sizeof *flags);
    if (!flags) return st_fail(err, "no_memory", "no memory for %d layers", n);
    char key[128];
    snprintf(key, sizeof key, "%s.attention.recurrent_layers", m->arch->name);
    const st_gguf_kv *kv = st_gguf_kv_find(m->gguf, key);
    if (kv && (kv->count < (uint64_t)n || kv->count > (uint64_t)n + 64)) {
        st_fail(err, "model_format", "key %s has %llu entries for %d layers", key, (unsigned long long)kv->count, n);
        free(flags);
        return -1;
    }
    int have = kv ? st_gguf_get_array_i64(m->gguf, key, flags, kv->count, err) : 0;
    for (int i = 0; i < n; i++) {
        layer *l = &p->layers[i];
        l->recurrent = have > 0 ? flags[i] != 0 : (i + 1) % interval != 0;
        l->index = l->recurrent ? m->shape.recurrent_layers++ : m->shape.attn_layers++;
    }
    free(flags);
    return have < 0 ? -1 : 0;
}

typedef struct loader {
    st_model *m;
    qwen *p;
    st_error *err;
    int block;
} loader;

static const char *tensor_name(const loader *L, const char *suffix, char *buf, size_t n) {
    snprintf(buf, n, "blk.%d.%s", L->block, suffix);
    return buf;
}
static int mat(const loader *L, const char *suffix, int k, int n, int experts, st_mat *out) {
    char name[96];
    return st_weights_mat(L->m->weights, tensor_name(L, suffix, name, sizeof name), k, n, experts, out, L->err);
}
static int vec(const loader *L, const char *suffix, int k, int rows, float **out) {
    char name[96];
    return st_weights_f32(L->m->weights, tensor_name(L, suffix, name, sizeof name), k, rows, out, L->err);
}

static int load_delta_net(const loader *L, layer *l) {
    const qwen *p = L->p;
    float *conv;
    if (mat(L, "attn_qkv.weight", p->E, p->channels, 0, &l->qkv) || mat(L, "attn_gate.weight", p->E, p->values, 0, &l->gate) ||
        mat(L, "ssm_out.weight", p->values, p->E, 0, &l->out) || vec(L, "ssm_conv1d.weight", TAPS, p->channels, &conv) ||
        vec(L, "ssm_alpha.weight", p->E, p->hv, &l->alpha) || vec(L, "ssm_beta.weight", p->E, p->hv, &l->beta) ||
        vec(L, "ssm_a", p->hv, 1, &l->a) || vec(L, "ssm_dt.bias", p->hv, 1, &l->dt) || vec(L, "ssm_norm.weight", p->d, 1, &l->norm))
        return -1;
    if (!(l->conv = st_weights_room(L->m->weights, (size_t)TAPS * (size_t)p->channels, L->err))) return -1;
    for (int ch = 0; ch < p->channels; ch++) /* taps outermost: channels ride in lanes */
        for (int t = 0; t < TAPS; t++) l->conv[t * p->channels + ch] = conv[ch * TAPS + t];
    return 0;
}

static int load_attention(const loader *L, layer *l) {
    const qwen *p = L->p;
    int q = p->heads * p->hd, kv = p->kv_heads * p->hd;
    return mat(L, "attn_q.weight", p->E, 2 * q, 0, &l->q) || mat(L, "attn_k.weight", p->E, kv, 0, &l->k) ||
           mat(L, "attn_v.weight", p->E, kv, 0, &l->v) || mat(L, "attn_output.weight", q, p->E, 0, &l->o) ||
           vec(L, "attn_q_norm.weight", p->hd, 1, &l->q_norm) || vec(L, "attn_k_norm.weight", p->hd, 1, &l->k_norm);
}

static int load_experts(const loader *L, layer *l) {
    const qwen *p = L->p;
    return vec(L, "ffn_gate_inp.weight", p->E, p->experts, &l->router) || vec(L, "ffn_gate_inp_shexp.weight", p->E, 1, &l->shared_gate) ||
           mat(L, "ffn_gate_exps.weight", p->E, p->ff, p->experts, &l->gate_e) ||
           mat(L, "ffn_up_exps.weight", p->E, p->ff, p->experts, &l->up_e) ||
           mat(L, "ffn_down_exps.weight", p->ff, p->E, p->experts, &l->down_e) ||
           mat(L, "ffn_gate_shexp.weight", p->E, p->shared_ff, 0, &l->gate_s) ||
           mat(L, "ffn_up_shexp.weight", p->E, p->shared_ff, 0, &l->up_s) || mat(L, "ffn_down_shexp.weight", p->shared_ff, p->E, 0, &l->down_s);
}

static int load_globals(st_model *m, qwen *p, st_error *err) {
    const char *out = st_weights_has(m->weights, "output.weight") ? "output.weight" : "token_embd.weight"; /* tied */
    p->embedding = st_gguf_tensor_find(m->gguf, "token_embd.weight");
    if (!p->embedding) return st_fail(err, "model_format", "tensor token_embd.weight is missing");
    if (p->embedding->ne[1] < 1 || p->embedding->ne[1] > 1 << 24)
        return st_fail(err, "model_format", "tensor token_embd.weight has %lld rows", (long long)p->embedding->ne[1]);
    m->n_vocab = (int)p->embedding->ne[1];
    m->n_embd = p->E;
    if (p->embedding->ne[0] != p->E)
        return st_fail(err, "model_format", "tensor token_embd.weight is %lld wide, embedding_length is %d", (long long)p->embedding->ne[0], p->E);
    if (st_weights_f32(m->weights, "output_norm.weight", p->E, 1, &p->out_norm, err)) return -1;
    return st_weights_mat(m->weights, out, p->E, m->n_vocab, 0, &p->head, err);
}

static int temp_new(const st_kernels *k, const qwen *p, temp *t, int rows) {
    int wide = p->values > p->heads * p->hd ? p->values : p->heads * p->hd, pairs = rows * p->used;
    size_t n = (size_t)pairs, ints = n * 2 + (size_t)p->experts * 2 + 2;
    if (st_act_new(k, &t->h, rows, p->E) || st_act_new(k, &t->mix, rows, wide) || st_act_new(k, &t->pair, pairs, p->ff) ||
        st_act_new(k, &t->shared, rows, p->shared_ff))
        return -1;
    t->logits = malloc(((size_t)rows * (size_t)(p->experts + 1) + 2 * n) * sizeof(float));
    t->expert = malloc(ints * sizeof(int));
    if (!t->logits || !t->expert) return -1;
    t->gate = t->logits + (size_t)rows * (size_t)p->experts;
    t->weight = t->gate + rows;
    t->share = t->weight + n;
    t->token = t->expert + n;
    t->active = t->token + n;
    t->first = t->active + p->experts;
    return 0;
}

static void temp_free(temp *t) {
    free(t->h.x);
    free(t->mix.x);
    free(t->pair.x);
    free(t->shared.x);
    free(t->logits);
    free(t->expert);
}

static float *floats(size_t rows, int width) {
    void *p = NULL;
    return posix_memalign(&p, 64, rows * (size_t)width * sizeof(float) + 64) ? NULL : p;
}

static int make_scratch(st_model *m, qwen *p, st_error *err) {
    size_t R = (size_t)m->max_rows;
    int q = 2 * p->heads * p->hd, kv = 2 * p->kv_heads * p->hd, wide = p->channels > q ? p->channels : q;
    p->members = st_team_size(m->team);
    p->rows = malloc(R * sizeof *p->rows);
    p->x = floats(R, p->E);
    p->u = floats(R, p->channels > kv ? p->channels : kv);
    p->c = floats(R, wide);
    p->z = floats(R, p->values);
    p->cos = floats(R, p->n_rot / 2);
    p->sin = floats(R, p->n_rot / 2);
    p->gate_rows = floats(R * (size_t)p->used, p->ff);
    p->up_rows = floats(R * (size_t)p->used, p->ff);
    p->gate_shared = floats(R, p->shared_ff);
    p->up_shared = floats(R, p->shared_ff);
    p->moe = floats(R, p->E);
    p->small = calloc((size_t)p->members, sizeof *p->small);
    p->next = calloc((size_t)p->n_layers, sizeof *p->next);
    int bad = !p->rows || !p->x || !p->u || !p->c || !p->z || !p->cos || !p->sin || !p->gate_rows || !p->up_rows || !p->gate_shared ||
              !p->up_shared || !p->moe || !p->small || !p->next || temp_new(m->kernels, p, &p->large, m->max_rows);
    for (int i = 0; !bad && i < p->members; i++) bad = temp_new(m->kernels, p, &p->small[i], SMALL_ROWS);
    return bad ? st_fail(err, "no_memory", "no memory for windows of %d rows", m->max_rows) : 0;
}

static void release(st_model *m) {
    qwen *p = m->self;
    free(p->inv_freq);
    free(p->layers);
    float *all[] = {p->x, p->u, p->c, p->z, p->cos, p->sin, p->gate_rows, p->up_rows, p->gate_shared, p->up_shared, p->moe};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p->rows);
    temp_free(&p->large);
    for (int i = 0; p->small && i < p->members; i++) temp_free(&p->small[i]);
    free(p->small);
    free((void *)p->next);
    free(p);
    m->self = NULL;
}

static int load(st_model *m, st_error *err) {
    qwen *p = calloc(1, sizeof *p);
    if (!p) return st_fail(err, "no_memory", "no memory for a model");
    m->self = p;
    if (read_shape(m, p, err)) return -1;
    if (!(p->layers = calloc((size_t)p->n_layers, sizeof *p->layers))) return st_fail(err, "no_memory", "no memory for %d layers", p->n_layers);
    if (layer_kinds(m, p, err) || load_globals(m, p, err)) return -1;
    for (int i = 0; i < p->n_layers; i++) {
        layer *l = &p->layers[i];
        loader L = {m, p, err, i};
        if (vec(&L, "attn_norm.weight", p->E, 1, &l->attn_norm) || vec(&L, "post_attention_norm.weight", p->E, 1, &l->post_norm) ||
            (l->recurrent ? load_delta_net(&L, l) : load_attention(&L, l)) || load_experts(&L, l))
            return -1;
    }
    m->shape.kv_heads = p->kv_heads;
    m->shape.head_dim = p->hd;
    m->shape.state_floats = (size_t)p->hv * (size_t)(p->d * p->d);
    m->shape.conv_floats = (size_t)(TAPS - 1) * (size_t)p->channels;
    return make_scratch(m, p, err);
}

const st_arch st_arch_qwen35moe = {"qwen35moe", load, forward, release};

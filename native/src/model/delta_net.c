/* The gated delta net (rule 7). Value heads are tiled: the key head of value head j is j mod Hk.
 *
 * Draft rows run on a copy of a head's state and leave behind what a replay needs: their raw projections, their keys
 * and values, decay and beta. The rows that were accepted are replayed when the session's next window comes by, with
 * the state at hand; rejected ones have touched nothing. */
#include "arith.h"
#include "model/net.h"

/* One draft row of one layer in a session's draft_rows. */
typedef struct draft_row {
    float *u, *c, *decay, *beta; /* [channels], [channels], [hv], [hv] */
} draft_row;

static draft_row draft_at(const st_net *p, const st_session *s, const st_layer *l, int i) {
    float *row = s->draft_rows + ((size_t)l->index * ST_MAX_DRAFTS + (size_t)i) * s->shape.draft_row_floats;
    return (draft_row){row, row + p->channels, row + 2 * p->channels, row + 2 * p->channels + p->hv};
}

static float *state_of(const st_net *p, const st_session *s, const st_layer *l, int vh) {
    return s->states + ((size_t)l->index * (size_t)p->hv + (size_t)vh) * (size_t)(p->d * p->d);
}

static float *history_of(const st_net *p, const st_session *s, const st_layer *l, int ch) {
    return s->convs + (size_t)l->index * (ST_TAPS - 1) * (size_t)p->channels + ch;
}

/* Raw projections of channel ch, oldest first: the history, accepted drafts, then this window's rows. */
static const float *raw_row(const st_net *p, const st_session *s, const st_layer *l, int i, const float *fresh, int ch) {
    if (i < ST_TAPS - 1) return history_of(p, s, l, ch) + (size_t)i * (size_t)p->channels;
    i -= ST_TAPS - 1;
    if (i < s->pending) return draft_at(p, s, l, i).u + ch;
    return fresh + (size_t)(i - s->pending) * (size_t)p->channels;
}

/* The history after `n` more rows (accepted drafts first): ascending, so that a row moves only to a lower place. */
static void move_history(const st_net *p, const st_session *s, const st_layer *l, int n, const float *fresh, int ch, int width) {
    float *history = history_of(p, s, l, ch);
    for (int t = 0; t < ST_TAPS - 1; t++)
        memmove(history + (size_t)t * (size_t)p->channels, raw_row(p, s, l, n + t, fresh, ch), (size_t)width * sizeof(float));
}

/* c = silu(causal depthwise convolution of u) for channels [ch, ch + n) of every row; the history moves on. */
static void convolve(const st_pass *c, const st_layer *l, int ch, int n) {
    st_net *p = c->p;
    size_t width = (size_t)p->channels;
    for (int i = 0, at = 0; i < c->w->n_runs; at += c->w->runs[i].n, i++) {
        const st_run *run = &c->w->runs[i];
        const st_session *s = run->session;
        const float *fresh = p->u + (size_t)at * width + ch;
        for (int j = 0; j < run->n; j++) {
            const float *taps[ST_TAPS];
            for (int t = 0; t < ST_TAPS; t++) taps[t] = raw_row(p, s, l, s->pending + j + t, fresh, ch);
            c->k->conv4_silu(l->conv + ch, width, taps, n, p->c + (size_t)(at + j) * width + ch);
        }
        move_history(p, s, l, s->pending + run->certain, fresh, ch, n);
    }
}

/* Accepted drafts into a head's state. The output is of no interest. */
static void replay(const st_net *p, const st_kernels *k, const st_session *s, const st_layer *l, int vh, int kh) {
    float unused[ST_MAX_HEAD_DIM];
    int d = p->d;
    for (int i = 0; i < s->pending; i++) {
        draft_row r = draft_at(p, s, l, i);
        k->delta_step(state_of(p, s, l, vh), d, d, r.c + kh * d, r.c + (p->hk + kh) * d, r.c + (2 * p->hk + vh) * d, r.decay[vh],
                      r.beta[vh], unused);
    }
}

/* One value head over every row: S = e^g S + k (beta (v - e^g k^T S))^T, o = q^T S, y = RMS(o, norm) silu(z). */
static void scan_head(const st_pass *c, const st_layer *l, int vh, int kh) {
    st_net *p = c->p;
    int d = p->d;
    float o[ST_MAX_HEAD_DIM], *scratch = p->small[c->member].state;
    for (int i = 0, at = 0; i < c->w->n_runs; i++) {
        const st_run *run = &c->w->runs[i];
        float *S = state_of(p, run->session, l, vh);
        for (int j = 0; j < run->n; j++, at++) {
            const float *h = c->t->h.x + (size_t)at * (size_t)p->E, *qkv = p->c + (size_t)at * (size_t)p->channels;
            size_t v = (size_t)at * (size_t)p->values + (size_t)(vh * d), gate = (size_t)at * (size_t)p->hv + (size_t)vh;
            float a, b;
            c->k->dots(l->alpha + (size_t)vh * (size_t)p->E, 1, p->E, h, &a);
            c->k->dots(l->beta + (size_t)vh * (size_t)p->E, 1, p->E, h, &b);
            p->decay[gate] = st_exp(l->a[vh] * st_softplus(a + l->dt[vh]));
            p->beta[gate] = st_sigmoid(b);
            if (j == run->certain) S = memcpy(scratch, S, (size_t)(d * d) * sizeof *S);
            c->k->delta_step(S, d, d, qkv + kh * d, qkv + (p->hk + kh) * d, qkv + (2 * p->hk + vh) * d, p->decay[gate], p->beta[gate], o);
            c->k->norm_gate(o, l->norm, p->z + v, d, p->eps, p->large.mix.x + v);
        }
    }
}

/* Leave behind what replaying this window's draft rows needs: slices of `width` channels at ch, or one head's scalars. */
static void keep_slice(const st_pass *c, const st_layer *l, int ch, int width) {
    st_net *p = c->p;
    for (int i = 0, at = 0; i < c->w->n_runs; at += c->w->runs[i].n, i++)
        for (int j = c->w->runs[i].certain; j < c->w->runs[i].n; j++) {
            draft_row r = draft_at(p, c->w->runs[i].session, l, j - c->w->runs[i].certain);
            size_t from = (size_t)(at + j) * (size_t)p->channels + (size_t)ch;
            memcpy(r.u + ch, p->u + from, (size_t)width * sizeof(float));
            memcpy(r.c + ch, p->c + from, (size_t)width * sizeof(float));
        }
}
static void keep_scalars(const st_pass *c, const st_layer *l, int vh) {
    st_net *p = c->p;
    for (int i = 0, at = 0; i < c->w->n_runs; at += c->w->runs[i].n, i++)
        for (int j = c->w->runs[i].certain; j < c->w->runs[i].n; j++) {
            draft_row r = draft_at(p, c->w->runs[i].session, l, j - c->w->runs[i].certain);
            r.decay[vh] = p->decay[(size_t)(at + j) * (size_t)p->hv + (size_t)vh];
            r.beta[vh] = p->beta[(size_t)(at + j) * (size_t)p->hv + (size_t)vh];
        }
}

/* A key head with its value heads: everything of it stays on one member. */
static void key_head(const st_pass *c, const st_layer *l, int kh) {
    st_net *p = c->p;
    int d = p->d, q = kh * d, k = (p->hk + kh) * d;
    for (int vh = kh; vh < p->hv; vh += p->hk)
        for (int i = 0; i < c->w->n_runs; i++) replay(p, c->k, c->w->runs[i].session, l, vh, kh);
    convolve(c, l, q, d);
    convolve(c, l, k, d);
    for (int r = 0; r < c->n_rows; r++) {
        float *row = p->c + (size_t)r * (size_t)p->channels;
        c->k->l2_norm(row + q, d, 1.0f / sqrtf((float)d), row + q);
        c->k->l2_norm(row + k, d, 1.0f, row + k);
    }
    for (int vh = kh; vh < p->hv; vh += p->hk) {
        int v = (2 * p->hk + vh) * d;
        convolve(c, l, v, d);
        scan_head(c, l, vh, kh);
        keep_slice(c, l, v, d);
        keep_scalars(c, l, vh);
    }
    keep_slice(c, l, q, d);
    keep_slice(c, l, k, d);
}

void st_stage_delta_net(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    int lo, hi;
    st_columns(c, &c->t->h, c->n_rows, (st_column[]){{&l->qkv, p->u, (size_t)p->channels}, {&l->gate, p->z, (size_t)p->values}}, 2, ST_STORE);
    st_pass_barrier(c);
    st_share(p->hk, c->member, c->size, &lo, &hi);
    for (int kh = lo; kh < hi; kh++) key_head(c, l, kh);
    st_pass_barrier(c);
    st_project_out(c, &l->out);
}

void st_net_settle(st_model *m, st_session *s) {
    const st_net *p = m->self;
    for (int i = 0; i < p->n_layers; i++) {
        const st_layer *l = &p->layers[i];
        if (!l->recurrent) continue;
        for (int vh = 0; vh < p->hv; vh++) replay(p, m->kernels, s, l, vh, vh % p->hk);
        move_history(p, s, l, s->pending, NULL, 0, p->channels);
    }
}

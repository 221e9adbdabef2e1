/* The gated delta net (rule 7). Value heads are tiled: the key head of value head j is j mod Hk. */
#include "arith.h"
#include "model/net.h"

/* c = silu(causal depthwise convolution of u) for channels [ch, ch + n) of every row; the history moves on. */
static void convolve(const st_pass *c, const st_layer *l, int ch, int n) {
    st_net *p = c->p;
    size_t width = (size_t)p->channels;
    for (int i = 0, at = 0; i < c->w->n_runs; at += c->w->runs[i].n, i++) {
        const st_run *run = &c->w->runs[i];
        float *history = run->session->convs + (size_t)l->index * (ST_TAPS - 1) * width + ch;
        const float *fresh = p->u + (size_t)at * width + ch;
        for (int j = 0; j < run->n; j++) {
            const float *taps[ST_TAPS];
            for (int t = 0; t < ST_TAPS; t++) {
                int back = j - (ST_TAPS - 1) + t;
                taps[t] = back < 0 ? history + (size_t)(ST_TAPS - 1 + back) * width : fresh + (size_t)back * width;
            }
            c->k->conv4_silu(l->conv + ch, width, taps, n, p->c + (size_t)(at + j) * width + ch);
        }
        for (int t = 0; t < ST_TAPS - 1; t++) { /* ascending: a row moves only to a lower place */
            int back = run->n - (ST_TAPS - 1) + t;
            const float *from = back < 0 ? history + (size_t)(ST_TAPS - 1 + back) * width : fresh + (size_t)back * width;
            memmove(history + (size_t)t * width, from, (size_t)n * sizeof(float));
        }
    }
}

/* One value head over every row: S = e^g S + k (beta (v - e^g k^T S))^T, o = q^T S, y = RMS(o, norm) silu(z). */
static void scan_head(const st_pass *c, const st_layer *l, int vh, int kh) {
    st_net *p = c->p;
    int d = p->d;
    float o[ST_MAX_HEAD_DIM];
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

void st_stage_delta_net(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    int lo, hi, d = p->d;
    float q_scale = 1.0f / sqrtf((float)d);
    st_columns(c, &c->t->h, c->n_rows, (st_column[]){{&l->qkv, p->u, (size_t)p->channels}, {&l->gate, p->z, (size_t)p->values}}, 2, ST_STORE);
    st_pass_barrier(c);
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
    st_pass_barrier(c);
    st_project_out(c, &l->out);
}

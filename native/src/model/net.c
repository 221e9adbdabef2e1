#include "model/net.h"

#include "math_d.h"

void st_pass_start(st_pass *c, st_model *m, const st_window *w, int member, int size) {
    st_net *p = m->self;
    *c = (st_pass){.m = m, .p = p, .k = m->kernels, .w = w, .member = member, .size = size};
    for (int i = 0; i < w->n_runs; i++) c->n_rows += w->runs[i].n;
    c->small = c->n_rows <= ST_SMALL_ROWS;
    c->t = c->small ? &p->small[member] : &p->large;
}

void st_columns(const st_pass *c, const st_act *in, int rows, const st_column *list, int n, int mode) {
    int total = 0, lo, hi;
    for (int i = 0; i < n; i++) total += list[i].m->n / ST_LANES;
    st_share(total, c->member, c->size, &lo, &hi);
    for (int i = 0, at = 0; i < n; at += list[i].m->n / ST_LANES, i++) {
        int groups = list[i].m->n / ST_LANES, g0 = lo - at > 0 ? lo - at : 0, g1 = hi - at < groups ? hi - at : groups;
        st_product p = {.m = list[i].m, .g0 = g0, .g1 = g1, .in = in, .rows = rows, .y = list[i].y, .ystride = list[i].ystride, .mode = mode};
        st_product_run(c->k, &p);
    }
}

void st_stage_begin(const st_pass *c) {
    st_net *p = c->p;
    int at = 0, half = p->n_rot / 2, lo, hi;
    st_share(c->n_rows, c->member, c->size, &lo, &hi);
    for (int i = 0; i < c->w->n_runs; i++) {
        const st_run *run = &c->w->runs[i];
        for (int j = 0; j < run->n; j++, at++) {
            if (at < lo || at >= hi) continue;
            p->rows[at] = (st_row){run->session, run->session->n + j};
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
    st_pass_barrier(c);
}

void st_stage_norm(const st_pass *c, const float *w) {
    st_net *p = c->p;
    int lo, hi;
    st_my_rows(c, c->n_rows, &lo, &hi);
    for (int r = lo; r < hi; r++) {
        c->k->rms_norm(p->x + (size_t)r * (size_t)p->E, w, p->E, p->eps, c->t->h.x + (size_t)r * (size_t)p->E);
        st_act_quantize(c->k, &c->t->h, r);
    }
    st_rows_ready(c);
}

void st_project_out(const st_pass *c, const st_mat *out) {
    st_net *p = c->p;
    st_act mix = c->t->mix;
    int lo, hi;
    st_my_rows(c, c->n_rows, &lo, &hi);
    mix.k = out->k;
    mix.x = p->large.mix.x;
    for (int r = lo; r < hi; r++) st_act_quantize(c->k, &mix, r);
    st_rows_ready(c);
    st_columns(c, &mix, c->n_rows, &(st_column){out, p->x, (size_t)p->E}, 1, ST_ADD);
    st_pass_barrier(c);
}

void st_stage_head(const st_pass *c) {
    st_net *p = c->p;
    st_temp *t = c->t;
    int lo, hi;
    if (!c->w->n_want) return;
    st_my_rows(c, c->w->n_want, &lo, &hi);
    for (int i = lo; i < hi; i++) {
        size_t r = (size_t)c->w->want[i], E = (size_t)p->E;
        c->k->rms_norm(p->x + r * E, p->out_norm, p->E, p->eps, t->h.x + (size_t)i * E);
        st_act_quantize(c->k, &t->h, i);
    }
    st_rows_ready(c);
    st_columns(c, &t->h, c->w->n_want, &(st_column){&p->head, c->w->logits, (size_t)c->m->n_vocab}, 1, ST_STORE);
}

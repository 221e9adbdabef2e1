#include "model/net.h"

#include "arith.h"
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

static void set_row(const st_pass *c, int at, uint8_t *const *blocks, int pos) {
    st_net *p = c->p;
    int half = p->n_rot / 2;
    p->rows[at] = (st_row){blocks, pos};
    for (int f = 0; f < half; f++) {
        double sn, cs;
        st_sincos_d((double)pos * p->inv_freq[f], &sn, &cs);
        p->cos[at * half + f] = (float)cs;
        p->sin[at * half + f] = (float)sn;
    }
}

static void reset_counters(const st_pass *c) {
    if (c->member) return;
    for (int i = 0; i <= c->p->n_layers; i++) atomic_store_explicit(&c->p->next[i], 0, memory_order_relaxed);
}

void st_stage_begin(const st_pass *c) {
    st_net *p = c->p;
    int at = 0, lo, hi;
    st_share(c->n_rows, c->member, c->size, &lo, &hi);
    for (int i = 0; i < c->w->n_runs; i++) {
        const st_run *run = &c->w->runs[i];
        for (int j = 0; j < run->n; j++, at++) {
            if (at < lo || at >= hi) continue;
            set_row(c, at, run->session->blocks, run->session->n + j);
            st_gguf_row_f32(p->embedding, run->ids[j], p->x + (size_t)at * (size_t)p->E);
        }
    }
    reset_counters(c);
    st_pass_barrier(c);
}

void st_pass_start_draft(st_pass *c, st_model *m, const st_draft *d, int member, int size) {
    st_pass_start(c, m, &(st_window){0}, member, size);
    c->w = NULL;
    c->n_rows = d->n_rows;
    c->small = c->n_rows <= ST_SMALL_ROWS;
    c->t = c->small ? &c->p->small[member] : &c->p->large;
}

/* x = W [RMS(embedding of the token); RMS(hidden of the position before)], embedding first. */
void st_stage_draft_begin(const st_pass *c, const st_draft *d) {
    st_net *p = c->p;
    size_t E = (size_t)p->E;
    st_act in = p->large.draft;
    int lo, hi;
    st_share(c->n_rows, c->member, c->size, &lo, &hi);
    for (int r = lo; r < hi; r++) {
        const st_draft_row *row = &d->rows[r];
        float *e = p->x + (size_t)r * E, *y = in.x + (size_t)r * 2 * E;
        set_row(c, r, row->session->draft_blocks, row->pos);
        st_gguf_row_f32(p->embedding, row->token, e);
        c->k->rms_norm(e, p->draft_token_norm, p->E, p->eps, y);
        if (row->hidden) c->k->rms_norm(row->hidden, p->draft_hidden_norm, p->E, p->eps, y + E);
        else memset(y + E, 0, E * sizeof *y);
        st_act_quantize(c->k, &in, r);
    }
    reset_counters(c);
    st_pass_barrier(c);
    st_columns(c, &in, c->n_rows, &(st_column){&p->draft_in, p->x, E}, 1, ST_STORE);
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

/* The wanted rows through norm and head; `hidden` (NULL: not asked for) receives them, or every row, normed. */
static void head(const st_pass *c, const float *norm, const int *want, int n_want, float *logits, float *hidden, int every) {
    st_net *p = c->p;
    st_temp *t = c->t;
    size_t E = (size_t)p->E;
    int lo, hi;
    if (hidden && every) {
        st_share(c->n_rows, c->member, c->size, &lo, &hi);
        for (int r = lo; r < hi; r++) c->k->rms_norm(p->x + (size_t)r * E, norm, p->E, p->eps, hidden + (size_t)r * E);
    }
    if (!n_want) return;
    st_my_rows(c, n_want, &lo, &hi);
    for (int i = lo; i < hi; i++) {
        c->k->rms_norm(p->x + (size_t)want[i] * E, norm, p->E, p->eps, t->h.x + (size_t)i * E);
        st_act_quantize(c->k, &t->h, i);
        if (hidden && !every && (!c->small || c->member == 0)) memcpy(hidden + (size_t)i * E, t->h.x + (size_t)i * E, E * sizeof *hidden);
    }
    st_rows_ready(c);
    st_columns(c, &t->h, n_want, &(st_column){&p->head, logits, (size_t)c->m->n_vocab}, 1, ST_STORE);
}

/* Rows that hold a value which is not finite: their requests end (rule 1). */
static void find_bad_rows(const st_pass *c) {
    st_net *p = c->p;
    int lo, hi;
    st_share(c->n_rows, c->member, c->size, &lo, &hi);
    for (int r = lo; r < hi; r++) c->w->bad[r] = !(st_amax(p->x + (size_t)r * (size_t)p->E, p->E) <= 3.4028235e38f);
}

void st_stage_head(const st_pass *c) {
    if (c->w->bad) find_bad_rows(c);
    head(c, c->p->out_norm, c->w->want, c->w->n_want, c->w->logits, c->w->hidden, 1);
}

void st_stage_draft_head(const st_pass *c, const st_draft *d) {
    head(c, c->p->draft_out_norm, d->want, d->n_want, d->logits, d->hidden, 0);
}

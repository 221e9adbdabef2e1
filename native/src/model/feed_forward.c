/* Feed-forward stages: routed experts (rule 8) with a gated shared expert, and the dense form. */
#include "arith.h"
#include "model/net.h"

/* The `used` experts of largest logit (ties to the lower index), ascending, with softmax weights made to sum to 1. */
static void choose(const st_pass *c, const st_layer *l, int r) {
    st_net *p = c->p;
    st_temp *t = c->t;
    const float *h = t->h.x + (size_t)r * (size_t)p->E;
    float *logit = t->logits + (size_t)r * (size_t)p->experts, prob[ST_MAX_EXPERTS], gate;
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
static void sort_pairs(const st_pass *c) {
    st_net *p = c->p;
    st_temp *t = c->t;
    int count[ST_MAX_EXPERTS], total = c->n_rows * p->used;
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
static void gate_up(const st_pass *c, const st_layer *l, int i, int g0, int g1) {
    st_net *p = c->p;
    st_temp *t = c->t;
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
static void all_gate_up(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    st_temp *t = c->t;
    int each = 2 * p->ff / ST_LANES, shared = 2 * p->shared_ff / ST_LANES;
    if (!c->small) {
        int i, at = l == p->draft ? p->n_layers : (int)(l - p->layers);
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
static void activate(const st_pass *c, st_act *a, const float *gate, const float *up, int rows) {
    int lo, hi;
    st_my_rows(c, rows, &lo, &hi);
    for (int r = lo; r < hi; r++) {
        size_t at = (size_t)r * (size_t)a->k;
        c->k->silu_mul(gate + at, up + at, a->k, a->x + at);
        st_act_quantize(c->k, a, r);
    }
}

/* A member's columns of sum_k w_k E_k (ascending expert), then the shared expert, then into x. */
static void down(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    st_temp *t = c->t;
    size_t E = (size_t)p->E;
    int g0, g1;
    st_share(p->E / ST_LANES, c->member, c->size, &g0, &g1);
    size_t from = (size_t)g0 * ST_LANES, n = (size_t)(g1 - g0) * ST_LANES;
    for (int r = 0; r < c->n_rows; r++) memset(p->moe + (size_t)r * E + from, 0, n * sizeof(float));
    st_product pr = {.m = &l->down_e, .g0 = g0, .g1 = g1, .in = &t->pair, .y = p->moe, .ystride = E, .mode = ST_FMA_WEIGHT};
    int pair[ST_MAX_ROWS];
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

void st_stage_experts(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    st_temp *t = c->t;
    int lo, hi;
    st_my_rows(c, c->n_rows, &lo, &hi);
    for (int r = lo; r < hi; r++) choose(c, l, r);
    st_rows_ready(c);
    if (c->small || c->member == 0) sort_pairs(c);
    st_rows_ready(c);
    all_gate_up(c, l);
    st_pass_barrier(c);
    activate(c, &t->pair, p->gate_rows, p->up_rows, c->n_rows * p->used);
    activate(c, &t->shared, p->gate_shared, p->up_shared, c->n_rows);
    st_rows_ready(c);
    down(c, l);
    st_pass_barrier(c);
}

/* x += W_down (silu(W_gate h) * W_up h). */
void st_stage_dense(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    st_act a = c->t->shared;
    size_t width = (size_t)p->ff_dense;
    a.k = p->ff_dense;
    st_columns(c, &c->t->h, c->n_rows, (st_column[]){{&l->ff_gate, p->gate_shared, width}, {&l->ff_up, p->up_shared, width}}, 2, ST_STORE);
    st_pass_barrier(c);
    activate(c, &a, p->gate_shared, p->up_shared, c->n_rows);
    st_rows_ready(c);
    st_columns(c, &a, c->n_rows, &(st_column){&l->ff_down, p->x, (size_t)p->E}, 1, ST_ADD);
    st_pass_barrier(c);
}

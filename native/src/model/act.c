#include "model/act.h"

#include "kernels/kernels.h"

#include <math.h>
#include <stdlib.h>

int st_act_new(const st_kernels *t, st_act *a, int rows, int k) {
    size_t n = (size_t)rows * (size_t)k, blocks = (size_t)rows * (size_t)((k + 31) / 32);
    size_t codes = (n * (size_t)t->code_bytes + 63) & ~(size_t)63;
    void *p = NULL;
    if (posix_memalign(&p, 64, n * 4 + codes + blocks * 8 + 256)) return -1;
    a->k = k;
    a->x = p;
    a->d = a->x + n;
    a->sum = (int32_t *)(void *)(a->d + blocks);
    a->q = (int8_t *)(a->sum + blocks);
    return 0;
}

void st_act_quantize(const st_kernels *t, st_act *a, int row) {
    size_t at = (size_t)row * (size_t)a->k, blocks = (size_t)row * (size_t)(a->k / 32);
    t->quantize(a->x + at, a->k, a->q + at * (size_t)t->code_bytes, a->d + blocks, a->sum + blocks);
}

static int row_of(const int *list, int i) { return list ? list[i] : i; }

static void fill_tile(const st_kernels *t, const st_product *p, int r0, st_tile *tile) {
    int nb = p->in->k / 32;
    tile->rows = p->rows - r0 < ST_TILE ? p->rows - r0 : ST_TILE;
    tile->mode = p->mode;
    for (int r = 0; r < tile->rows; r++) {
        size_t in = (size_t)row_of(p->in_row, r0 + r), out = (size_t)row_of(p->out_row, r0 + r);
        tile->q[r] = p->in->q + in * (size_t)(p->in->k * t->code_bytes);
        tile->d[r] = p->in->d + in * (size_t)nb;
        tile->sum[r] = p->in->sum + in * (size_t)nb;
        tile->y[r] = p->y + out * p->ystride + (size_t)p->g0 * ST_LANES;
        tile->weight[r] = p->weight ? p->weight[r0 + r] : 0.0f;
    }
}

static void float_rows(const st_kernels *t, const st_product *p, const uint8_t *w) {
    enum { AT_ONCE = 64 };
    float v[AT_ONCE];
    int n = (p->g1 - p->g0) * ST_LANES, k = p->in->k;
    for (int r = 0; r < p->rows; r++) {
        const float *x = p->in->x + (size_t)row_of(p->in_row, r) * (size_t)k;
        float *y = p->y + (size_t)row_of(p->out_row, r) * p->ystride + (size_t)p->g0 * ST_LANES;
        for (int o = 0; o < n; o += AT_ONCE) {
            int m = n - o < AT_ONCE ? n - o : AT_ONCE;
            t->dots((const float *)(const void *)w + (size_t)o * (size_t)k, m, k, x, v);
            for (int i = 0; i < m; i++)
                y[o + i] = p->mode == ST_STORE ? v[i] : p->mode == ST_ADD ? y[o + i] + v[i] : fmaf(p->weight[r], v[i], y[o + i]);
        }
    }
}

/* Weights of a few groups stay in the first cache while every tile passes over them. */
enum { CACHED = 24 << 10 };

void st_product_run(const st_kernels *t, const st_product *p) {
    const st_mat *m = p->m;
    if (p->g0 >= p->g1 || p->rows <= 0) return;
    const uint8_t *w = m->data + ((size_t)p->expert * (size_t)(m->n / ST_LANES) + (size_t)p->g0) * m->group_bytes;
    if (m->type == ST_GGML_F32) {
        float_rows(t, p, w);
        return;
    }
    void (*mm)(const uint8_t *, size_t, int, int, const st_tile *) = m->type == ST_GGML_Q8_0 ? t->mm_q8_0 : t->mm_q4_0;
    int groups = p->g1 - p->g0, step = p->rows <= ST_TILE ? groups : (int)(CACHED / m->group_bytes);
    if (step < 1) step = 1;
    st_tile tile;
    for (int g = 0; g < groups; g += step) {
        int n = groups - g < step ? groups - g : step;
        for (int r = 0; r < p->rows; r += ST_TILE) {
            fill_tile(t, p, r, &tile);
            for (int i = 0; i < tile.rows; i++) tile.y[i] += (size_t)g * ST_LANES;
            mm(w + (size_t)g * m->group_bytes, m->group_bytes, n, p->in->k / 32, &tile);
        }
    }
}

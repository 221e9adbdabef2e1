#include "model/act.h"

#include "kernels/kernels.h"

#include <math.h>
#include <stdlib.h>

/* Elements of a row in each array of a form. */
typedef struct sizes {
    size_t q, d, sum;
} sizes;

static sizes row_sizes(const st_kernels *t, int form, int k) {
    size_t n = (size_t)k, up = n + 255;
    return form == ST_FORM_32 ? (sizes){n * (size_t)t->code_bytes, (n + 31) / 32, (n + 31) / 32} : (sizes){n, up / 256, up / 256 * 12};
}

/* Hands out pieces of one allocation; before it exists (base NULL) it only counts. */
typedef struct cut {
    uint8_t *base;
    size_t used;
} cut;

static void *piece(cut *c, size_t bytes) {
    void *p = c->base ? c->base + c->used : NULL;
    c->used += (bytes + 63) & ~(size_t)63;
    return p;
}

static void cut_codes(cut *c, const st_kernels *t, int form, size_t rows, int k, st_codes *out) {
    sizes s = row_sizes(t, form, k);
    out->q = piece(c, rows * s.q);
    out->d = piece(c, rows * s.d * sizeof(float));
    out->sum = piece(c, rows * s.sum * sizeof(int32_t));
}

static void cut_act(cut *c, const st_kernels *t, st_act *a, size_t rows, int k) {
    a->x = piece(c, rows * (size_t)k * sizeof(float));
    if (a->forms & ST_FORM_32) cut_codes(c, t, ST_FORM_32, rows, k, &a->c32);
    if (a->forms & ST_FORM_256) cut_codes(c, t, ST_FORM_256, rows, k, &a->c256);
}

int st_act_new(const st_kernels *t, st_act *a, int rows, int k, int forms) {
    cut c = {NULL, 0};
    void *p = NULL;
    *a = (st_act){.k = k, .forms = forms};
    cut_act(&c, t, a, (size_t)rows, k);
    if (posix_memalign(&p, 64, c.used + 64)) return -1;
    c = (cut){p, 0};
    cut_act(&c, t, a, (size_t)rows, k);
    return 0;
}

void st_act_quantize(const st_kernels *t, st_act *a, int row) {
    const float *x = a->x + (size_t)row * (size_t)a->k;
    size_t r = (size_t)row;
    if (a->forms & ST_FORM_32) {
        sizes s = row_sizes(t, ST_FORM_32, a->k);
        t->quantize(x, a->k, a->c32.q + r * s.q, a->c32.d + r * s.d, a->c32.sum + r * s.sum);
    }
    if (a->forms & ST_FORM_256 && a->k % 256 == 0) { /* other widths meet no super-blocks */
        sizes s = row_sizes(t, ST_FORM_256, a->k);
        t->quantize256(x, a->k, a->c256.q + r * s.q, a->c256.d + r * s.d, a->c256.sum + r * s.sum);
    }
}

static int row_of(const int *list, int i) { return list ? list[i] : i; }

static void fill_tile(const st_kernels *t, const st_product *p, int r0, st_tile *tile) {
    const st_codes *c = p->m->form == ST_FORM_256 ? &p->in->c256 : &p->in->c32;
    sizes s = row_sizes(t, p->m->form, p->in->k);
    tile->rows = p->rows - r0 < ST_TILE ? p->rows - r0 : ST_TILE;
    tile->row_codes = p->in->k;
    tile->mode = p->mode;
    for (int r = 0; r < tile->rows; r++) {
        size_t in = (size_t)row_of(p->in_row, r0 + r), out = (size_t)row_of(p->out_row, r0 + r);
        tile->q[r] = c->q + in * s.q;
        tile->d[r] = c->d + in * s.d;
        tile->sum[r] = c->sum + in * s.sum;
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

static void packed_rows(const st_kernels *t, const st_product *p, const uint8_t *w) {
    const st_mat *m = p->m;
    int groups = p->g1 - p->g0, step = p->rows <= ST_TILE ? groups : (int)(CACHED / m->group_bytes);
    if (step < 1) step = 1;
    st_tile tile;
    for (int g = 0; g < groups; g += step) {
        int n = groups - g < step ? groups - g : step;
        for (int r = 0; r < p->rows; r += ST_TILE) {
            fill_tile(t, p, r, &tile);
            for (int i = 0; i < tile.rows; i++) tile.y[i] += (size_t)g * ST_LANES;
            t->mm[m->type](w + (size_t)g * m->group_bytes, m->group_bytes, n, m->k, &tile);
        }
    }
}

/* Out of the mapped file: what is packed for a moment serves several tiles. */
static void mapped_rows(const st_kernels *t, const st_product *p, const uint8_t *w) {
    st_tile tile[ST_TILES];
    for (int r = 0; r < p->rows; r += ST_TILES * ST_TILE) {
        int n = 0;
        for (int at = r; at < p->rows && n < ST_TILES; at += ST_TILE) fill_tile(t, p, at, &tile[n++]);
        st_mm_rows(t, p->m->type, w, p->m->group_bytes / ST_LANES, p->g1 - p->g0, p->m->k, tile, n);
    }
}

void st_product_run(const st_kernels *t, const st_product *p) {
    const st_mat *m = p->m;
    if (p->g0 >= p->g1 || p->rows <= 0) return;
    const uint8_t *w = m->data + ((size_t)p->expert * (size_t)(m->n / ST_LANES) + (size_t)p->g0) * m->group_bytes;
    if (m->storage == ST_FLOATS) float_rows(t, p, w);
    else if (m->storage == ST_MAPPED) mapped_rows(t, p, w);
    else packed_rows(t, p, w);
}

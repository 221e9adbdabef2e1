#include "selftest.h"

#include "arith.h"
#include "errors.h"
#include "kernels/kernels.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef struct rng { uint64_t s; } rng;

static uint32_t next(rng *r) { /* splitmix64 */
    uint64_t z = (r->s += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static int below(rng *r, int n) { return (int)(next(r) % (uint32_t)n); }

/* Values of every size: mostly ordinary, some zero, denormal, tiny or huge. */
static float value(rng *r, int wild) {
    float u = (float)(int32_t)next(r) * (1.0f / 2147483648.0f);
    if (!wild) return u * 4.0f;
    switch (below(r, 12)) {
    case 0: return u < 0 ? -0.0f : 0.0f;
    case 1: return u * 1e-40f;
    case 2: return u * 1e-30f;
    case 3: return u * 1e-12f;
    case 4: return u * 1e9f;
    case 5: return u * 100.0f;
    case 6: return rintf(u * 8.0f) * 0.5f;
    default: return u * 4.0f;
    }
}

static void fill(rng *r, float *x, int n, int wild) {
    for (int i = 0; i < n; i++) x[i] = value(r, wild);
}

enum { MAX = 8192, MAXK = 2048, MAXN = 48, MAX_CODE_BYTES = 4 };

typedef struct work {
    rng r;
    const st_kernels *a, *b; /* the specification and the table under test */
    const char *isa;
    int bad;
    float x[MAX], w[MAX], g[MAX], ya[MAX], yb[MAX];
    uint8_t rows[MAXN * (MAXK / 32) * 34];
    uint8_t *packed, *packed_b; /* for the specification and for the table under test */
    int8_t qa[ST_TILE * MAXK], qb[ST_TILE * MAXK * MAX_CODE_BYTES];
    float da[ST_TILE * MAXK / 32], db[ST_TILE * MAXK / 32];
    int32_t sa[ST_TILE * MAXK / 32], sb[ST_TILE * MAXK / 32];
} work;

/* Equal bits, or NaN on both sides. */
static void same(work *k, const char *what, const float *a, const float *b, int n) {
    for (int i = 0; i < n; i++)
        if (st_f2bits(a[i]) != st_f2bits(b[i]) && !(a[i] != a[i] && b[i] != b[i])) {
            fprintf(stderr, "self-test: %s differs from scalar in %s[%d] of %d: %a, right is %a\n", k->isa, what, i, n,
                    (double)b[i], (double)a[i]);
            k->bad++;
            return;
        }
}

static void same_bytes(work *k, const char *what, const void *a, const void *b, size_t n) {
    if (!memcmp(a, b, n)) return;
    fprintf(stderr, "self-test: %s differs from scalar in %s\n", k->isa, what);
    k->bad++;
}

static void test_elementwise(work *k) {
    int n = 1 + below(&k->r, 700), wild = below(&k->r, 2);
    fill(&k->r, k->x, n, wild);
    fill(&k->r, k->w, n, wild);
    fill(&k->r, k->g, n, wild);
    if (wild) {
        static const float special[] = {88.5f, 88.0f, -87.0f, -87.5f, -104.0f, 1e30f, -1e30f, INFINITY, -INFINITY, NAN};
        for (int i = 0; i < 10 && i < n; i++) k->g[below(&k->r, n)] = special[i];
    }
    k->a->silu_mul(k->g, k->x, n, k->ya), k->b->silu_mul(k->g, k->x, n, k->yb);
    same(k, "silu_mul", k->ya, k->yb, n);
    k->a->sigmoid_mul(k->x, k->g, n, k->ya), k->b->sigmoid_mul(k->x, k->g, n, k->yb);
    same(k, "sigmoid_mul", k->ya, k->yb, n);
    k->a->exp_sub(k->g, n, 0.25f, 0.5f, k->ya), k->b->exp_sub(k->g, n, 0.25f, 0.5f, k->yb);
    same(k, "exp_sub", k->ya, k->yb, n);
    k->a->rms_norm(k->x, k->w, n, 1e-6f, k->ya), k->b->rms_norm(k->x, k->w, n, 1e-6f, k->yb);
    same(k, "rms_norm", k->ya, k->yb, n);
    k->a->l2_norm(k->x, n, 0.125f, k->ya), k->b->l2_norm(k->x, n, 0.125f, k->yb);
    same(k, "l2_norm", k->ya, k->yb, n);
    k->a->norm_gate(k->x, k->w, k->g, n, 1e-6f, k->ya), k->b->norm_gate(k->x, k->w, k->g, n, 1e-6f, k->yb);
    same(k, "norm_gate", k->ya, k->yb, n);
    const float *u[4] = {k->x, k->x + 1, k->x + 2, k->x + 3};
    int c = n < 8 ? 1 : n / 4 - 1;
    k->a->conv4_silu(k->w, (size_t)c, u, c, k->ya), k->b->conv4_silu(k->w, (size_t)c, u, c, k->yb);
    same(k, "conv4_silu", k->ya, k->yb, c);
    int rows = 1 + below(&k->r, 9), d = n / rows;
    if (d) {
        k->a->dots(k->w, rows, d, k->x, k->ya), k->b->dots(k->w, rows, d, k->x, k->yb);
        same(k, "dots", k->ya, k->yb, rows);
    }
    d = n & ~31;
    if (d >= 64) { /* whole 32s take another path */
        k->a->dots(k->w, 2, d / 2 & ~31, k->x, k->ya), k->b->dots(k->w, 2, d / 2 & ~31, k->x, k->yb);
        same(k, "dots", k->ya, k->yb, 2);
    }
    int m = 1 + below(&k->r, 64);
    uint16_t ha = k->a->quantize_kv(k->x, m < n ? m : n, k->qa), hb = k->b->quantize_kv(k->x, m < n ? m : n, k->qb);
    if (ha != hb) same(k, "quantize_kv scale", &(float){ha}, &(float){hb}, 1);
    same_bytes(k, "quantize_kv codes", k->qa, k->qb, (size_t)(m < n ? m : n));
}

/* A long sum crosses the 4,096-value chunks. */
static void test_long_sum(work *k) {
    int n = MAX - below(&k->r, 100);
    fill(&k->r, k->x, n, 0);
    fill(&k->r, k->w, n, 0);
    k->a->dots(k->w, 1, n, k->x, k->ya), k->b->dots(k->w, 1, n, k->x, k->yb);
    same(k, "dots (long)", k->ya, k->yb, 1);
}

static void random_rows(work *k, int type, int n, int nb) {
    int bytes = type == ST_GGML_Q8_0 ? 34 : 18;
    uint8_t *p = k->rows;
    for (int i = 0; i < n * nb; i++, p += bytes) {
        uint16_t d = st_f2h(value(&k->r, below(&k->r, 8) == 0) * 0.01f);
        memcpy(p, &d, 2);
        for (int j = 2; j < bytes; j++) p[j] = (uint8_t)next(&k->r);
    }
}

static float row_reference(const work *k, int type, int row, int nb, int r) {
    const int8_t *q = k->qa + r * nb * 32;
    const float *d = k->da + r * nb;
    return type == ST_GGML_Q8_0 ? st_row_q8_0(k->rows + row * nb * 34, q, d, nb * 32)
                                : st_row_q4_0(k->rows + row * nb * 18, q, d, nb * 32);
}

static void run_mm(const st_kernels *t, const uint8_t *w, int type, const st_tile *tile, int groups, int nb) {
    size_t stride = st_pack_group_bytes(type, nb * 32);
    (type == ST_GGML_Q8_0 ? t->mm_q8_0 : t->mm_q4_0)(w, stride, groups, nb, tile);
}

static void test_products(work *k, int type) {
    static const int ks[] = {32, 64, 96, 256, 288, 384, 576, 640, 1024, 2048};
    int nb = ks[below(&k->r, 10)] / 32, groups = 1 + below(&k->r, 3), rows = 1 + below(&k->r, ST_TILE);
    int bytes = type == ST_GGML_Q8_0 ? 34 : 18, n = groups * ST_LANES - below(&k->r, ST_LANES);
    size_t stride = st_pack_group_bytes(type, nb * 32);
    random_rows(k, type, n, nb);
    for (int g = 0; g < groups; g++) {
        int left = n - g * ST_LANES < ST_LANES ? n - g * ST_LANES : ST_LANES;
        const uint8_t *rows16 = k->rows + g * ST_LANES * nb * bytes;
        st_pack_group(k->a, type, rows16, (size_t)(nb * bytes), left, nb * 32, k->packed + (size_t)g * stride);
        st_pack_group(k->b, type, rows16, (size_t)(nb * bytes), left, nb * 32, k->packed_b + (size_t)g * stride);
    }
    st_tile ta = {.rows = rows, .mode = below(&k->r, 3)}, tb = ta;
    for (int r = 0; r < rows; r++) {
        fill(&k->r, k->x, nb * 32, below(&k->r, 3) == 0);
        k->a->quantize(k->x, nb * 32, k->qa + r * nb * 32, k->da + r * nb, k->sa + r * nb);
        int8_t *qb = k->qb + r * nb * 32 * k->b->code_bytes;
        k->b->quantize(k->x, nb * 32, qb, k->db + r * nb, k->sb + r * nb);
        same_bytes(k, "quantize codes", k->qa + r * nb * 32, qb, (size_t)(nb * 32));
        ta.q[r] = k->qa + r * nb * 32, ta.d[r] = k->da + r * nb, ta.sum[r] = k->sa + r * nb, ta.y[r] = k->ya + r * 64;
        tb.q[r] = qb, tb.d[r] = k->db + r * nb, tb.sum[r] = k->sb + r * nb, tb.y[r] = k->yb + r * 64;
        ta.weight[r] = tb.weight[r] = value(&k->r, 0);
    }
    same(k, "quantize scales", k->da, k->db, rows * nb);
    same_bytes(k, "quantize sums", k->sa, k->sb, (size_t)(rows * nb) * 4);
    fill(&k->r, k->ya, rows * 64, 0);
    memcpy(k->yb, k->ya, sizeof k->ya);
    run_mm(k->a, k->packed, type, &ta, groups, nb);
    run_mm(k->b, k->packed_b, type, &tb, groups, nb);
    for (int r = 0; r < rows; r++) {
        same(k, type == ST_GGML_Q8_0 ? "mm_q8_0" : "mm_q4_0", ta.y[r], tb.y[r], groups * ST_LANES);
        if (ta.mode != ST_STORE) continue;
        for (int o = 0; o < n; o++) { /* the packed layout against the file's own rows */
            float want = row_reference(k, type, o, nb, r);
            same(k, "packed rows", &want, &ta.y[r][o], 1);
        }
    }
}

static void test_delta(work *k) {
    static const int dims[] = {16, 32, 64, 128, 48, 24};
    int dk = dims[below(&k->r, 4)], dv = dims[below(&k->r, 6)];
    float *Sa = malloc(2 * (size_t)(dk * dv) * sizeof *Sa), *Sb = Sa ? Sa + dk * dv : NULL;
    if (!Sa) return;
    fill(&k->r, Sa, dk * dv, below(&k->r, 3) == 0);
    memcpy(Sb, Sa, (size_t)(dk * dv) * sizeof *Sa);
    fill(&k->r, k->x, 3 * 128, 0);
    float decay = st_exp(-fabsf(value(&k->r, 0))), beta = st_sigmoid(value(&k->r, 0));
    for (int t = 0; t < 3; t++) {
        k->a->delta_step(Sa, dk, dv, k->x, k->x + 128, k->x + 256, decay, beta, k->ya);
        k->b->delta_step(Sb, dk, dv, k->x, k->x + 128, k->x + 256, decay, beta, k->yb);
        same(k, "delta_step output", k->ya, k->yb, dv);
    }
    same(k, "delta_step state", Sa, Sb, dk * dv);
    free(Sa);
}

static void test_attend(work *k) {
    static const int dims[] = {64, 128, 256, 80, 32, 72};
    int hd = dims[below(&k->r, 6)], npos = 1 + below(&k->r, below(&k->r, 2) ? 1500 : 200);
    int blocks = (npos + ST_POSBLOCK - 1) / ST_POSBLOCK;
    size_t bytes = st_kv_head_bytes(hd);
    uint8_t *base = malloc(bytes * (size_t)blocks);
    const uint8_t *list[32];
    if (!base) return;
    for (int b = 0; b < blocks; b++) {
        uint8_t *p = base + bytes * (size_t)b;
        list[b] = p;
        for (size_t i = 0; i < (size_t)hd * 128; i++) {
            int code = below(&k->r, 255) - 127;
            p[i] = i < (size_t)hd * 64 ? (uint8_t)(code + 128) : (uint8_t)(int8_t)code;
        }
        for (size_t i = (size_t)hd * 128; i < bytes; i += 2) {
            uint16_t h = st_f2h(fminf(fabsf(value(&k->r, below(&k->r, 16) == 0)) * 0.01f, 60000.0f));
            memcpy(p + i, &h, 2);
        }
    }
    fill(&k->r, k->x, hd, below(&k->r, 4) == 0);
    st_attend a = {.blocks = list, .offset = 0, .hd = hd, .npos = npos, .scale = 1.0f / sqrtf((float)hd), .query = k->x, .out = k->ya};
    k->a->attend(&a);
    a.out = k->yb;
    k->b->attend(&a);
    same(k, "attend", k->ya, k->yb, hd);
    free(base);
}

static work *work_new(const char *isa, uint64_t seed, st_error *err) {
    const char *why = "";
    const st_kernels *table = st_kernels_find(isa, &why);
    if (!table) {
        st_fail(err, "usage", "--isa %s: %s", isa, why);
        return NULL;
    }
    work *k = calloc(1, sizeof *k);
    if (!k || posix_memalign((void **)&k->packed, 64, 8 << 20)) {
        free(k);
        st_fail(err, "no_memory", "no memory for the self-test");
        return NULL;
    }
    k->packed_b = k->packed + (4 << 20);
    k->a = &st_kernels_scalar;
    k->b = table;
    k->isa = table->isa;
    k->r.s = seed;
    return k;
}

int st_selftest(const char *isa, int rounds, uint64_t seed, st_error *err) {
    work *k = work_new(isa, seed, err);
    if (!k) return -1;
    for (int i = 0; i < rounds && k->bad < 20; i++) {
        test_elementwise(k);
        test_products(k, ST_GGML_Q8_0);
        test_products(k, ST_GGML_Q4_0);
        test_delta(k);
        if (i % 4 == 0) test_attend(k);
        if (i % 16 == 0) test_long_sum(k);
    }
    int bad = k->bad;
    free(k->packed);
    free(k);
    return bad;
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void bench_product(work *k, int type, int kk, int rows) {
    int nb = kk / 32, groups = (int)((3u << 20) / st_pack_group_bytes(type, kk)); /* 3 MB of weights: L3, not L2 */
    if (groups * ST_LANES > MAX / rows) groups = MAX / rows / ST_LANES;
    st_tile t = {.rows = rows, .mode = ST_STORE};
    for (int r = 0; r < rows; r++) {
        fill(&k->r, k->x, kk, 0);
        int8_t *q = k->qb + r * kk * k->b->code_bytes;
        k->b->quantize(k->x, kk, q, k->db + r * nb, k->sb + r * nb);
        t.q[r] = q, t.d[r] = k->db + r * nb, t.sum[r] = k->sb + r * nb, t.y[r] = k->yb + r * groups * ST_LANES;
    }
    double best = 1e9;
    for (int i = 0; i < 30; i++) {
        double t0 = seconds();
        run_mm(k->b, k->packed_b, type, &t, groups, nb);
        double dt = seconds() - t0;
        best = dt < best ? dt : best;
    }
    double bytes = (double)groups * (double)st_pack_group_bytes(type, kk), ops = 2.0 * groups * ST_LANES * kk * rows;
    printf("%-7s %s k=%-5d rows=%d  %7.1f GB/s  %7.1f GOP/s\n", k->isa, type == ST_GGML_Q8_0 ? "q8_0" : "q4_0", kk, rows,
           bytes / best * 1e-9, ops / best * 1e-9);
}

static void bench_delta(work *k, int d) {
    float *S = calloc((size_t)(d * d), sizeof *S), best = 1e9f;
    if (!S) return;
    fill(&k->r, k->x, 3 * 128, 0);
    for (int i = 0; i < 200; i++) {
        double t0 = seconds();
        k->b->delta_step(S, d, d, k->x, k->x + 128, k->x + 256, 0.9f, 0.5f, k->yb);
        float dt = (float)(seconds() - t0);
        best = dt < best ? dt : best;
    }
    printf("%-7s delta_step %dx%d  %.2f us\n", k->isa, d, d, (double)best * 1e6);
    free(S);
}

int st_selftest_bench(const char *isa, st_error *err) {
    work *k = work_new(isa, 1, err);
    if (!k) return -1;
    memset(k->packed_b, 0x35, 4 << 20);
    for (int type = ST_GGML_Q4_0; type <= ST_GGML_Q8_0; type += ST_GGML_Q8_0 - ST_GGML_Q4_0)
        for (int kk = 64; kk <= MAXK; kk = kk == 64 ? 384 : kk == 384 ? 2048 : MAXK + 1)
            for (int rows = 1; rows <= ST_TILE; rows *= 2) bench_product(k, type, kk, rows);
    bench_delta(k, 64);
    bench_delta(k, 128);
    free(k->packed);
    free(k);
    return 0;
}

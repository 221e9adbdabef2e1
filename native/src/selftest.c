#include "selftest.h"

#include "arith.h"
#include "errors.h"
#include "kernels/kernels.h"

#include <ctype.h>
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
    uint8_t rows[MAXN * (MAXK / 32) * 34]; /* Q8_0 has the largest */
    uint8_t *packed, *packed_b; /* for the specification and for the table under test */
    int8_t qa[ST_TILE * MAXK], qb[ST_TILE * MAXK * MAX_CODE_BYTES];
    float da[ST_TILE * MAXK / 32], db[ST_TILE * MAXK / 32];
    int32_t sa[ST_TILE * MAXK / 256 * 12], sb[ST_TILE * MAXK / 256 * 12]; /* super-blocks have more sums */
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

/* Where the f16 scales of a file's block are: bytes 0 (and 2: a minimum), but for Q6_K at its end. */
static void random_rows(work *k, const st_weight_type *w, int n, int blocks) {
    uint8_t *p = k->rows;
    for (int i = 0; i < n * blocks; i++, p += w->block_bytes) {
        for (int j = 0; j < w->block_bytes; j++) p[j] = (uint8_t)next(&k->r);
        uint16_t d = st_f2h(value(&k->r, below(&k->r, 8) == 0) * 0.01f), m = st_f2h(value(&k->r, below(&k->r, 8) == 0) * 0.01f);
        memcpy(p + (w->id == ST_GGML_Q6_K ? 208 : 0), &d, 2);
        if (w->has_min) memcpy(p + 2, &m, 2);
    }
}

/* One activation row r in both tables' forms, into both tiles. */
static void quantize_row(work *k, const st_weight_type *w, int kk, int r, st_tile *ta, st_tile *tb) {
    int blocks = kk / w->block, sums = w->form == ST_FORM_256 ? kk / 256 * 12 : kk / 32;
    int8_t *qa = k->qa + r * kk, *qb = k->qb + r * kk * k->b->code_bytes;
    float *da = k->da + r * blocks, *db = k->db + r * blocks;
    int32_t *sa = k->sa + r * sums, *sb = k->sb + r * sums;
    fill(&k->r, k->x, kk, below(&k->r, 3) == 0);
    if (below(&k->r, 8) == 0) memset(k->x, 0, 32 * sizeof(float));
    (w->form == ST_FORM_256 ? k->a->quantize256 : k->a->quantize)(k->x, kk, qa, da, sa);
    (w->form == ST_FORM_256 ? k->b->quantize256 : k->b->quantize)(k->x, kk, qb, db, sb);
    same_bytes(k, "quantize codes", qa, qb, (size_t)kk);
    same(k, "quantize scales", da, db, blocks);
    same_bytes(k, "quantize sums", sa, sb, (size_t)sums * 4);
    ta->row_codes = tb->row_codes = kk;
    ta->q[r] = qa, ta->d[r] = da, ta->sum[r] = sa, ta->y[r] = k->ya + r * 64;
    tb->q[r] = qb, tb->d[r] = db, tb->sum[r] = sb, tb->y[r] = k->yb + r * 64;
    ta->weight[r] = tb->weight[r] = value(&k->r, 0);
}

/* Packed products of both tables, the same out of the file's rows, and the specification's rows. */
static void test_products(work *k, int type) {
    static const int ks[] = {32, 64, 96, 256, 288, 384, 576, 640, 1024, 2048}, supers[] = {256, 512, 768, 1024, 2048};
    const st_weight_type *w = st_weight_type_at(type);
    int kk = w->block == 256 ? supers[below(&k->r, 5)] : ks[below(&k->r, 10)], blocks = kk / w->block;
    int groups = 1 + below(&k->r, 3), rows = 1 + below(&k->r, ST_TILE), n = groups * ST_LANES - below(&k->r, ST_LANES);
    size_t stride = st_pack_group_bytes(type, kk), row_bytes = (size_t)(blocks * w->block_bytes);
    random_rows(k, w, groups * ST_LANES, blocks);
    for (int g = 0; g < groups; g++) {
        int left = n - g * ST_LANES < ST_LANES ? n - g * ST_LANES : ST_LANES;
        const uint8_t *rows16 = k->rows + (size_t)(g * ST_LANES) * row_bytes;
        st_pack_group(k->a, type, rows16, row_bytes, left, kk, k->packed + (size_t)g * stride);
        st_pack_group(k->b, type, rows16, row_bytes, left, kk, k->packed_b + (size_t)g * stride);
    }
    st_tile ta = {.rows = rows, .mode = below(&k->r, 3)}, tb = ta;
    for (int r = 0; r < rows; r++) quantize_row(k, w, kk, r, &ta, &tb);
    fill(&k->r, k->g, rows * 64, 0);
    memcpy(k->ya, k->g, sizeof k->g);
    memcpy(k->yb, k->g, sizeof k->g);
    k->a->mm[type](k->packed, stride, groups, kk, &ta);
    k->b->mm[type](k->packed_b, stride, groups, kk, &tb);
    for (int r = 0; r < rows; r++) {
        same(k, w->name, ta.y[r], tb.y[r], n);
        for (int o = 0; o < n && ta.mode == ST_STORE; o++) { /* the packed layout against the file's own rows */
            float want = w->row(k->rows + (size_t)o * row_bytes, ta.q[r], ta.d[r], kk);
            same(k, "packed rows", &want, &ta.y[r][o], 1);
        }
    }
    memcpy(k->yb, k->g, sizeof k->g);
    st_mm_rows(k->b, type, k->rows, row_bytes, groups, kk, &tb, 1);
    for (int r = 0; r < rows; r++) same(k, "rows of the file", ta.y[r], tb.y[r], n);
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
        st_fail(err, "usage", "--isa %s: %s", isa && *isa ? isa : "(from STRATA_ISA)", why);
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
        for (int type = 0; type < ST_WEIGHT_TYPES; type++) test_products(k, type);
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

/* Speed of one type at one shape, packed or out of the file's rows. */
static void bench_product(work *k, int type, int kk, int rows, int from_rows) {
    const st_weight_type *w = st_weight_type_at(type);
    size_t stride = st_pack_group_bytes(type, kk), row_bytes = (size_t)(kk / w->block * w->block_bytes);
    size_t group = from_rows ? row_bytes * ST_LANES : stride;
    int groups = (int)((3u << 20) / stride); /* 3 MB of weights: L3, not L2 */
    if (groups * ST_LANES > MAX / rows) groups = MAX / rows / ST_LANES;
    st_tile ta = {.rows = rows}, t = {.rows = rows, .mode = ST_STORE};
    for (int r = 0; r < rows; r++) {
        quantize_row(k, w, kk, r, &ta, &t);
        t.y[r] = k->yb + r * groups * ST_LANES;
    }
    double best = 1e9;
    for (int i = 0; i < 30; i++) {
        double t0 = seconds();
        if (from_rows) st_mm_rows(k->b, type, k->packed_b, row_bytes, groups, kk, &t, 1);
        else k->b->mm[type](k->packed_b, stride, groups, kk, &t);
        double dt = seconds() - t0;
        best = dt < best ? dt : best;
    }
    double bytes = (double)groups * (double)group, ops = 2.0 * groups * ST_LANES * kk * rows;
    char name[24];
    snprintf(name, sizeof name, "%s%s", w->name, from_rows ? "-mapped" : "");
    for (char *c = name; *c; c++) *c = (char)tolower((unsigned char)*c);
    printf("%-7s %s k=%-5d rows=%d  %7.1f GB/s  %7.1f GOP/s\n", k->isa, name, kk, rows, bytes / best * 1e-9, ops / best * 1e-9);
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
    static const int ks[] = {64, 384, 2048};
    for (int type = 0; type < ST_WEIGHT_TYPES; type++)
        for (int i = 0; i < 3; i++)
            for (int rows = 1; rows <= ST_TILE && ks[i] % st_weight_type_at(type)->block == 0; rows *= 2) {
                bench_product(k, type, ks[i], rows, 0);
                if (ks[i] == MAXK) bench_product(k, type, ks[i], rows, 1);
            }
    bench_delta(k, 64);
    bench_delta(k, 128);
    free(k->packed);
    free(k);
    return 0;
}

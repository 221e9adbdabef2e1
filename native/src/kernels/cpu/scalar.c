/* The specification as a kernel table: arith.h on the packed layouts. Slow on purpose, never clever. */
#include "arith.h"
#include "kernels/kernels.h"

static void quantize(const float *x, int k, int8_t *q, float *d, int32_t *sum) {
    for (int b = 0; b < k / ST_QBLOCK; b++) d[b] = st_quantize_block(x + b * ST_QBLOCK, ST_QBLOCK, q + b * ST_QBLOCK, sum + b);
}

static float half_at(const uint8_t *p) { return st_h2f((uint16_t)(p[0] | p[1] << 8)); }

static void finish(const st_tile *t, int row, int at, float v) {
    float *y = t->y[row] + at;
    if (t->mode == ST_STORE) *y = v;
    else if (t->mode == ST_ADD) *y += v;
    else *y = ST_FMA(t->weight[row], v, *y);
}

static int code_q8_0(const uint8_t *codes, int b, int i, int lane) {
    return (int)codes[((b * 8 + i / 4) * ST_LANES + lane) * 4 + i % 4] - 128;
}
static int code_q4_0(const uint8_t *codes, int b, int i, int lane) {
    int byte = codes[((b * 4 + i % 16 / 4) * ST_LANES + lane) * 4 + i % 4];
    return (i < 16 ? byte & 15 : byte >> 4) - 8;
}

static void mm(int (*code)(const uint8_t *, int, int, int), const uint8_t *w, size_t stride, int groups, int nb,
               const st_tile *t) {
    for (int g = 0; g < groups; g++, w += stride)
        for (int r = 0; r < t->rows; r++)
            for (int lane = 0; lane < ST_LANES; lane++) {
                st_rowsum s;
                st_rowsum_start(&s);
                for (int b = 0; b < nb; b++) {
                    int32_t isum = 0;
                    for (int i = 0; i < ST_QBLOCK; i++)
                        isum += code(w + st_pack_scale_bytes(nb * 32), b, i, lane) * t->q[r][b * ST_QBLOCK + i];
                    st_rowsum_block(&s, half_at(w + (b * ST_LANES + lane) * 2), t->d[r][b], isum);
                }
                finish(t, r, g * ST_LANES + lane, st_rowsum_end(&s));
            }
}

static void mm_q8_0(const uint8_t *w, size_t stride, int groups, int nb, const st_tile *t) {
    mm(code_q8_0, w, stride, groups, nb, t);
}
static void mm_q4_0(const uint8_t *w, size_t stride, int groups, int nb, const st_tile *t) {
    mm(code_q4_0, w, stride, groups, nb, t);
}

static void dots(const float *w, int n, int k, const float *x, float *y) {
    for (int i = 0; i < n; i++) y[i] = st_dot(w + (size_t)i * (size_t)k, x, k);
}

static void rms_norm(const float *x, const float *w, int n, float eps, float *y) {
    float r = st_rms_scale(x, n, eps);
    for (int i = 0; i < n; i++) y[i] = (x[i] * r) * w[i];
}

static void l2_norm(const float *x, int n, float scale, float *y) {
    float r = st_l2_scale(x, n);
    for (int i = 0; i < n; i++) y[i] = (x[i] * r) * scale;
}

static void silu_mul(const float *gate, const float *up, int n, float *y) {
    for (int i = 0; i < n; i++) y[i] = st_silu(gate[i]) * up[i];
}

static void sigmoid_mul(const float *x, const float *gate, int n, float *y) {
    for (int i = 0; i < n; i++) y[i] = x[i] * st_sigmoid(gate[i]);
}

static void norm_gate(const float *x, const float *w, const float *gate, int n, float eps, float *y) {
    float r = st_rms_scale(x, n, eps);
    for (int i = 0; i < n; i++) y[i] = ((x[i] * r) * w[i]) * st_silu(gate[i]);
}

static void conv4_silu(const float *w, size_t wstride, const float *const *u, int n, float *y) {
    for (int c = 0; c < n; c++) {
        float wc[4], uc[4];
        for (int t = 0; t < 4; t++) {
            wc[t] = w[(size_t)t * wstride + (size_t)c];
            uc[t] = u[t][c];
        }
        y[c] = st_conv_silu(wc, uc, 4);
    }
}

static void delta_step(float *S, int dk, int dv, const float *q, const float *k, const float *v, float decay,
                       float beta, float *o) {
    st_delta_step(S, dk, dv, q, k, v, decay, beta, o);
}

static uint16_t quantize_kv(const float *x, int n, int8_t *q) { return st_quantize_kv(x, n, q); }

static float block_score(const st_attend *a, const uint8_t *head, int pos, const int8_t *q, const float *qs) {
    float s = 0.0f;
    for (int g = 0; g * ST_KVGROUP < a->hd; g++) {
        int32_t isum = 0;
        for (int j = g * ST_KVGROUP; j < a->hd && j < (g + 1) * ST_KVGROUP; j++)
            isum += ((int)head[(j / 4 * ST_POSBLOCK + pos) * 4 + j % 4] - 128) * q[j];
        float ks = half_at(head + st_kv_kscale_offset(a->hd) + (size_t)(g * ST_POSBLOCK + pos) * 2);
        s = ST_FMA(qs[g] * ks, (float)isum, s);
    }
    return s * a->scale;
}

static float value_group(const st_attend *a, const uint8_t *head, int g, const float *score, int n, float *out, float *den) {
    int8_t v[ST_POSBLOCK * ST_KVGROUP];
    float vs[ST_POSBLOCK];
    int dv = a->hd - g * ST_KVGROUP < ST_KVGROUP ? a->hd - g * ST_KVGROUP : ST_KVGROUP;
    const int8_t *codes = (const int8_t *)head + st_kv_v_offset(a->hd);
    for (int i = 0; i < n; i++) {
        vs[i] = half_at(head + st_kv_vscale_offset(a->hd) + (size_t)(g * ST_POSBLOCK + i) * 2);
        for (int j = 0; j < dv; j++) v[i * dv + j] = codes[(i / 4 * a->hd + g * ST_KVGROUP + j) * 4 + i % 4];
    }
    return st_attn_block(score, n, v, dv, vs, dv, out, den);
}

enum { MAX_HD = 1024 };

static void attend(const st_attend *a) {
    int8_t q[MAX_HD];
    float qs[MAX_HD / ST_KVGROUP], total[MAX_HD] = {0}, span[MAX_HD], out[MAX_HD], score[ST_POSBLOCK];
    for (int g = 0; g * ST_KVGROUP < a->hd; g++) {
        int n = a->hd - g * ST_KVGROUP < ST_KVGROUP ? a->hd - g * ST_KVGROUP : ST_KVGROUP;
        qs[g] = st_h2f(st_quantize_kv(a->query + g * ST_KVGROUP, n, q + g * ST_KVGROUP));
    }
    st_soft all = {-INFINITY, 0.0f}, s = all;
    int blocks = (a->npos + ST_POSBLOCK - 1) / ST_POSBLOCK;
    for (int b = 0; b < blocks; b++) {
        const uint8_t *head = a->blocks[b] + a->offset;
        int n = a->npos - b * ST_POSBLOCK < ST_POSBLOCK ? a->npos - b * ST_POSBLOCK : ST_POSBLOCK;
        for (int i = 0; i < n; i++) score[i] = block_score(a, head, i, q, qs);
        float m = 0.0f, den = 0.0f;
        for (int g = 0; g * ST_KVGROUP < a->hd; g++) m = value_group(a, head, g, score, n, out + g * ST_KVGROUP, &den);
        if (b % ST_SPAN == 0) {
            s = (st_soft){-INFINITY, 0.0f};
            memset(span, 0, sizeof span);
        }
        st_fold(&s, span, m, den, out, a->hd);
        if (b % ST_SPAN == ST_SPAN - 1 || b == blocks - 1) st_fold(&all, total, s.m, s.l, span, a->hd);
    }
    float inv = 1.0f / all.l;
    for (int j = 0; j < a->hd; j++) a->out[j] = total[j] * inv;
}

static void exp_sub(const float *x, int n, float m, float scale, float *y) {
    for (int i = 0; i < n; i++) y[i] = st_exp((x[i] - m) * scale);
}

const st_kernels st_kernels_scalar = {
    .isa = "scalar",
    .code_bytes = 1,
    .q8_bias = 128,
    .quantize = quantize,
    .mm_q8_0 = mm_q8_0,
    .mm_q4_0 = mm_q4_0,
    .dots = dots,
    .rms_norm = rms_norm,
    .l2_norm = l2_norm,
    .silu_mul = silu_mul,
    .sigmoid_mul = sigmoid_mul,
    .norm_gate = norm_gate,
    .conv4_silu = conv4_silu,
    .delta_step = delta_step,
    .quantize_kv = quantize_kv,
    .attend = attend,
    .exp_sub = exp_sub,
};

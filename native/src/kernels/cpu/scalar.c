/* The specification as a kernel table: arith.h on the packed layouts. Slow on purpose, never clever. */
#include "arith.h"
#include "kernels/kernels.h"

static void quantize(const float *x, int k, int8_t *q, float *d, int32_t *sum) {
    for (int b = 0; b < k / ST_QBLOCK; b++) d[b] = st_quantize_block(x + b * ST_QBLOCK, ST_QBLOCK, q + b * ST_QBLOCK, sum + b);
}

static void quantize256(const float *x, int k, int8_t *q, float *d, int32_t *sum) {
    for (int b = 0; b < k / 256; b++, q += 256, sum += 12) {
        int16_t sums[24] = {0};
        int32_t all;
        d[b] = st_quantize_block(x + b * 256, 256, q, &all);
        for (int i = 0; i < 256; i++) {
            sums[i / 16] = (int16_t)(sums[i / 16] + q[i]);
            sums[16 + i / 32] = (int16_t)(sums[16 + i / 32] + q[i]);
        }
        memcpy(sum, sums, sizeof sums);
    }
}

static void finish(const st_tile *t, int row, int at, float v) {
    float *y = t->y[row] + at;
    if (t->mode == ST_STORE) *y = v;
    else if (t->mode == ST_ADD) *y += v;
    else *y = ST_FMA(t->weight[row], v, *y);
}

/* The type is a constant where these are inlined: a specification, but one that tests run whole models with. */
#define INLINE static inline __attribute__((always_inline))

/* Code i of a block of 32 in lane `lane` (layouts: kernels.h). */
INLINE int code_of(int bits, const uint8_t *v, int lane, int i) {
    int s = i / 4, t = i % 4, step = bits == 8 ? s : s & 3;
    int byte = v[step * 64 + lane * 4 + t];
    if (bits == 8) return byte;
    if (bits == 4) return s < 4 ? byte & 15 : byte >> 4;
    return s < 4 ? byte & 31 : byte >> 5 | (v[4 * 64 + lane * 4 + t] >> 2 * step & 3) << 3;
}

/* Code i of 16 codes of 6 bits. */
INLINE int code_of_6(const uint8_t *v, int lane, int i) {
    const uint8_t *p = v + lane * 4 + i % 4;
    return i < 12 ? p[i / 4 * 64] & 63 : p[0] >> 6 | p[64] >> 6 << 2 | p[128] >> 6 << 4;
}

INLINE void unpack32(const int type, const uint8_t *w, int blocks, int b, int lane, st_block32 *out) {
    const uint8_t *v = w + st_pack_blocks_at(type, blocks) + (size_t)b * (size_t)st_weight_vectors(type) * 64;
    out->d = st_half_at(w + (b * ST_LANES + lane) * 2);
    out->m = st_weight_has_min(type) ? st_half_at(w + st_pack_scale_bytes(blocks) + (b * ST_LANES + lane) * 2) : 0.0f;
    for (int i = 0; i < 32; i++) {
        int code = code_of(st_weight_bits(type), v, lane, i);
        out->q[i] = (int8_t)(type == ST_W_IQ4_NL ? st_iq4_nl_value(code) : code - (type == ST_W_Q8_0 ? 128 : st_weight_offset(type)));
    }
}

INLINE void unpack256(const int type, const uint8_t *w, int blocks, int b, int lane, st_block256 *out) {
    const uint8_t *v = w + st_pack_blocks_at(type, blocks) + (size_t)b * (size_t)st_weight_vectors(type) * 64;
    const uint8_t *codes = v + st_weight_head(type) * 64;
    int six = st_weight_bits(type) == 6;
    out->d = st_half_at(w + (b * ST_LANES + lane) * 2);
    out->dmin = six ? 0.0f : st_half_at(w + st_pack_scale_bytes(blocks) + (b * ST_LANES + lane) * 2);
    for (int g = 0; g < 16; g++) { /* of 16 values */
        int at = six ? g : g / 2;
        out->sc[g] = (int8_t)v[at / 4 * 64 + lane * 4 + at % 4];
        if (!six) out->mn[at] = (int8_t)v[(2 + at / 4) * 64 + lane * 4 + at % 4];
        for (int i = 0; i < 16; i++)
            out->q[16 * g + i] = (int8_t)(six ? code_of_6(codes + 3 * g * 64, lane, i) - 32
                                              : code_of(st_weight_bits(type), codes + at * st_weight_bits(type) * 64, lane, g % 2 * 16 + i));
    }
}

INLINE void mm32(const int type, const uint8_t *w, size_t stride, int groups, int k, const st_tile *t) {
    st_block32 block;
    for (int g = 0; g < groups; g++, w += stride)
        for (int lane = 0; lane < ST_LANES; lane++) {
            st_rowsum s[ST_TILE];
            for (int r = 0; r < t->rows; r++) st_rowsum_start(&s[r]);
            for (int b = 0; b < k / 32; b++) {
                unpack32(type, w, k / 32, b, lane, &block);
                for (int r = 0; r < t->rows; r++)
                    st_block32_join(&s[r], &block, st_weight_has_min(type), t->q[r] + b * 32, t->d[r][b]);
            }
            for (int r = 0; r < t->rows; r++) finish(t, r, g * ST_LANES + lane, st_rowsum_end(&s[r]));
        }
}

INLINE void mm256(const int type, const uint8_t *w, size_t stride, int groups, int k, const st_tile *t) {
    st_block256 block;
    for (int g = 0; g < groups; g++, w += stride)
        for (int lane = 0; lane < ST_LANES; lane++) {
            st_rowsum s[ST_TILE];
            for (int r = 0; r < t->rows; r++) st_rowsum_start(&s[r]);
            for (int b = 0; b < k / 256; b++) {
                unpack256(type, w, k / 256, b, lane, &block);
                for (int r = 0; r < t->rows; r++)
                    st_block256_join(&s[r], &block, st_weight_has_min(type), t->q[r] + b * 256, t->d[r][b]);
            }
            for (int r = 0; r < t->rows; r++) finish(t, r, g * ST_LANES + lane, st_rowsum_end(&s[r]));
        }
}

#define MM(U, l, size, bytes, bits, offset, min) \
    static void mm_##l(const uint8_t *w, size_t stride, int groups, int k, const st_tile *t) { \
        mm##size(ST_W_##U, w, stride, groups, k, t); \
    }
ST_WEIGHT_LIST(MM)

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
        float ks = st_half_at(head + st_kv_kscale_offset(a->hd) + (size_t)(g * ST_POSBLOCK + pos) * 2);
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
        vs[i] = st_half_at(head + st_kv_vscale_offset(a->hd) + (size_t)(g * ST_POSBLOCK + i) * 2);
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
    .quantize256 = quantize256,
#define MEMBER(U, l, size, bytes, bits, offset, min) [ST_W_##U] = mm_##l,
    .mm = {ST_WEIGHT_LIST(MEMBER)},
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

/* The specification of Strata's arithmetic: every float operation of the forward pass, scalar, in the one order.
 *
 * Shared by C and CUDA. A kernel is right when it gives these bits. `native/ARITHMETIC.md` states the rules in words;
 * the rule numbers below are its. Readable first, fast never: the kernels are fast.
 *
 * Compile with -ffp-contract=off (nvcc: -fmad=false): a fused multiply-add exists only where ST_FMA is written. */
#ifndef ST_ARITH_H
#define ST_ARITH_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define ST_ARITH_VERSION 1

#ifdef __CUDACC__
#define ST_HD __host__ __device__ static inline
#else
#define ST_HD static inline
#endif
#ifdef __CUDA_ARCH__
#define ST_FMA(a, b, c) __fmaf_rn(a, b, c)
#else
#define ST_FMA(a, b, c) fmaf(a, b, c)
#endif

enum {
    ST_QBLOCK = 32,     /* values under one activation scale */
    ST_SEGMENT = 256,   /* values summed from 0 before a segment joins the row's total */
    ST_STRIDE = 32,     /* partial sums of a float dot product */
    ST_SUMCHUNK = 4096, /* longest run of a float sum before chunks are added in order */
    ST_POSBLOCK = 64,   /* positions of an attention block, counted from position 0 */
    ST_SPAN = 8,        /* blocks folded into one span before spans are folded */
    ST_KVGROUP = 64,    /* values under one K, V or query scale */
    ST_KEYSEG = 32      /* key rows of a recurrent sum before segments are added */
};

/* 2^-100: an amplitude below this is stored as all zero. */
#define ST_TINY 7.888609052210118e-31f

ST_HD uint32_t st_f2bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
ST_HD float st_bits2f(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }

/* IEEE half to float, exact. */
ST_HD float st_h2f(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exp = (h >> 10) & 31u, man = h & 1023u;
    if (exp == 31) return st_bits2f(sign | 0x7f800000u | (man << 13));
    if (exp) return st_bits2f(sign | ((exp + 112u) << 23) | (man << 13));
    float f = (float)man * 5.9604644775390625e-8f; /* 2^-24: subnormal halves are exact floats */
    return sign ? -f : f;
}

/* Float to IEEE half, round to nearest even; overflow becomes infinity, NaN a quiet NaN. */
ST_HD uint16_t st_f2h(float f) {
    uint32_t u = st_f2bits(f), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
    if (a >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (a >= 0x38800000u) { /* normal half */
        uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
        return (uint16_t)(sign | ((r - 0x38000000u) >> 13));
    }
    if (a < 0x33000000u) return (uint16_t)sign;
    uint32_t e = a >> 23, m = (a & 0x7fffffu) | 0x800000u, shift = 126u - e; /* 14..24 */
    uint32_t q = m >> shift, rest = m & ((1u << shift) - 1u), half = 1u << (shift - 1u);
    if (rest > half || (rest == half && (q & 1u))) q++;
    return (uint16_t)(sign | q);
}

/* ---- elementary functions (rule 1) -------------------------------------------------------------------------- */

/* exp(x), relative error <= 8.5e-8 over [-86, 88] (every float tried); 0 below -87, clamped above 88; NaN stays NaN.
 * Cody-Waite reduction by ln 2 in two parts, degree 6 polynomial (coefficients: Cephes expf, Moshier). */
ST_HD float st_exp(float x) {
    if (!(x >= -87.0f)) return x != x ? x : 0.0f;
    if (x > 88.0f) x = 88.0f;
    float n = rintf(x * 1.44269504088896341f);
    float r = ST_FMA(n, -0.693359375f, x);
    r = ST_FMA(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = ST_FMA(p, r, 1.3981999507e-3f);
    p = ST_FMA(p, r, 8.3334519073e-3f);
    p = ST_FMA(p, r, 4.1665795894e-2f);
    p = ST_FMA(p, r, 1.6666665459e-1f);
    p = ST_FMA(p, r, 5.0000001201e-1f);
    float y = ST_FMA(p, r * r, r) + 1.0f;
    return y * st_bits2f((uint32_t)((int32_t)n + 127) << 23);
}

ST_HD float st_sigmoid(float x) { return 1.0f / (1.0f + st_exp(-x)); }
ST_HD float st_silu(float x) { return x / (1.0f + st_exp(-x)); }

/* log(1 + e^x) = max(x, 0) + log1p(e^-|x|); log1p(e) = 2 atanh(e / (2 + e)) by its series to degree 15, where
 * e / (2 + e) <= 1/3. Relative error <= 2.8e-7 (every float in [-86, 88] tried). */
ST_HD float st_softplus(float x) {
    float e = st_exp(x > 0.0f ? -x : x);
    float s = e / (2.0f + e), q = s * s;
    float p = 1.0f / 15.0f;
    p = ST_FMA(p, q, 1.0f / 13.0f);
    p = ST_FMA(p, q, 1.0f / 11.0f);
    p = ST_FMA(p, q, 1.0f / 9.0f);
    p = ST_FMA(p, q, 1.0f / 7.0f);
    p = ST_FMA(p, q, 1.0f / 5.0f);
    p = ST_FMA(p, q, 1.0f / 3.0f);
    p = ST_FMA(p, q, 1.0f);
    float l = (2.0f * s) * p;
    return x > 0.0f ? x + l : l;
}

/* ---- sums (rules 4, 5) -------------------------------------------------------------------------------------- */

/* Halving tree over 32 partial sums: 16, 8, 4, 2, 1. Destroys p. */
ST_HD float st_tree32(float *p) {
    for (int w = ST_STRIDE / 2; w; w >>= 1)
        for (int i = 0; i < w; i++) p[i] += p[i + w];
    return p[0];
}

/* <a, b> in 32 strided partial sums by fma, then the tree; above 4,096 values chunks are added in order. */
ST_HD float st_dot(const float *a, const float *b, int n) {
    float total = 0.0f;
    for (int c = 0; c < n; c += ST_SUMCHUNK) {
        float p[ST_STRIDE] = {0};
        int end = n - c < ST_SUMCHUNK ? n : c + ST_SUMCHUNK;
        for (int i = c; i < end; i++) p[(i - c) % ST_STRIDE] = ST_FMA(a[i], b[i], p[(i - c) % ST_STRIDE]);
        total += st_tree32(p);
    }
    return total;
}

/* Sum of a in the same order. */
ST_HD float st_sum(const float *a, int n) {
    float total = 0.0f;
    for (int c = 0; c < n; c += ST_SUMCHUNK) {
        float p[ST_STRIDE] = {0};
        int end = n - c < ST_SUMCHUNK ? n : c + ST_SUMCHUNK;
        for (int i = c; i < end; i++) p[(i - c) % ST_STRIDE] += a[i];
        total += st_tree32(p);
    }
    return total;
}

/* 1 / sqrt(mean(x^2) + eps): RMSNorm(x, w) = (x * r) * w. */
ST_HD float st_rms_scale(const float *x, int n, float eps) {
    return 1.0f / sqrtf(st_dot(x, x, n) / (float)n + eps);
}

/* 1 / sqrt(sum(x^2) + 1e-6): the L2 norm of the gated delta net's queries and keys. */
ST_HD float st_l2_scale(const float *x, int n) { return 1.0f / sqrtf(st_dot(x, x, n) + 1e-6f); }

/* ---- integer products (rules 2, 3) -------------------------------------------------------------------------- */

/* Largest |x| as an integer maximum of the absolute bits (so that every order gives the same). */
ST_HD float st_amax(const float *x, int n) {
    uint32_t m = 0;
    for (int i = 0; i < n; i++) {
        uint32_t a = st_f2bits(x[i]) & 0x7fffffffu;
        if (a > m) m = a;
    }
    return st_bits2f(m);
}

/* Scale of a block of that amplitude: 0 below 2^-100 (all codes are zero then), NaN for a non-finite one, so that it is
 * not lost: every product of the row becomes NaN, and its request ends with an error. */
ST_HD float st_scale_of(float amax) {
    if (!(amax <= 3.4028235e38f)) return st_bits2f(0x7fc00000u);
    return amax >= ST_TINY ? amax / 127.0f : 0.0f;
}

/* One block of activations to int8: scale amax / 127, codes rint(x * (127 / amax)), all zero where the scale is 0
 * or NaN. Returns the scale (st_scale_of), *sum = sum of codes. */
ST_HD float st_quantize_block(const float *x, int n, int8_t *q, int32_t *sum) {
    float amax = st_amax(x, n), scale = st_scale_of(amax);
    int32_t s = 0;
    if (!(scale > 0.0f)) {
        for (int i = 0; i < n; i++) q[i] = 0;
        *sum = 0;
        return scale;
    }
    float inv = 127.0f / amax;
    for (int i = 0; i < n; i++) {
        q[i] = (int8_t)(int32_t)rintf(x[i] * inv);
        s += q[i];
    }
    *sum = s;
    return scale;
}

/* ---- weights (rule 3) --------------------------------------------------------------------------------------- */

/* A block of 32 weights out of a file, decoded: value i = d * q[i] + m. Types without a minimum have m = 0. */
typedef struct { float d, m; int8_t q[32]; } st_block32;

/* A super-block of 256: value i = (d * sc[i / 16]) * q[i] - dmin * mn[i / 32]. Q6_K has no minimum (dmin = 0). */
typedef struct { float d, dmin; int8_t sc[16], mn[8], q[256]; } st_block256;

ST_HD float st_half_at(const uint8_t *p) { return st_h2f((uint16_t)(p[0] | p[1] << 8)); }
ST_HD uint32_t st_u32_at(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }

/* 32 nibbles of 16 bytes: value i < 16 is the low half of byte i, value i + 16 the high half. */
ST_HD int st_nibble(const uint8_t *p, int i) { return i < 16 ? p[i] & 15 : p[i - 16] >> 4; }

/* Q8_0, 34 bytes: f16 d, int8 q[32]. */
ST_HD void st_decode_q8_0(const uint8_t *w, st_block32 *b) {
    b->d = st_half_at(w), b->m = 0.0f;
    for (int i = 0; i < 32; i++) b->q[i] = (int8_t)w[2 + i];
}
/* Q4_0, 18 bytes: f16 d, nibbles; minus 8. */
ST_HD void st_decode_q4_0(const uint8_t *w, st_block32 *b) {
    b->d = st_half_at(w), b->m = 0.0f;
    for (int i = 0; i < 32; i++) b->q[i] = (int8_t)(st_nibble(w + 2, i) - 8);
}
/* Q4_1, 20 bytes: f16 d, f16 m, nibbles. */
ST_HD void st_decode_q4_1(const uint8_t *w, st_block32 *b) {
    b->d = st_half_at(w), b->m = st_half_at(w + 2);
    for (int i = 0; i < 32; i++) b->q[i] = (int8_t)st_nibble(w + 4, i);
}
/* Q5_0, 22 bytes: f16 d, the fifth bits in 32, nibbles; minus 16. */
ST_HD void st_decode_q5_0(const uint8_t *w, st_block32 *b) {
    uint32_t high = st_u32_at(w + 2);
    b->d = st_half_at(w), b->m = 0.0f;
    for (int i = 0; i < 32; i++) b->q[i] = (int8_t)((st_nibble(w + 6, i) | (int)(high >> i & 1u) << 4) - 16);
}
/* Q5_1, 24 bytes: f16 d, f16 m, the fifth bits in 32, nibbles. */
ST_HD void st_decode_q5_1(const uint8_t *w, st_block32 *b) {
    uint32_t high = st_u32_at(w + 4);
    b->d = st_half_at(w), b->m = st_half_at(w + 2);
    for (int i = 0; i < 32; i++) b->q[i] = (int8_t)(st_nibble(w + 8, i) | (int)(high >> i & 1u) << 4);
}
/* IQ4_NL, 18 bytes: f16 d, nibbles that choose among 16 values. */
ST_HD int st_iq4_nl_value(int code) {
    const int8_t values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return values[code];
}
ST_HD void st_decode_iq4_nl(const uint8_t *w, st_block32 *b) {
    b->d = st_half_at(w), b->m = 0.0f;
    for (int i = 0; i < 32; i++) b->q[i] = (int8_t)st_iq4_nl_value(st_nibble(w + 2, i));
}

/* Scale and minimum of group g (32 values) out of the 12 bytes of Q4_K and Q5_K, 6 bits each. */
ST_HD void st_k_scales(const uint8_t *s, int g, int8_t *sc, int8_t *mn) {
    *sc = (int8_t)(g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
    *mn = (int8_t)(g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4);
}
ST_HD void st_decode_k_head(const uint8_t *w, st_block256 *b) {
    b->d = st_half_at(w), b->dmin = st_half_at(w + 2);
    for (int g = 0; g < 8; g++) {
        st_k_scales(w + 4, g, &b->sc[2 * g], &b->mn[g]);
        b->sc[2 * g + 1] = b->sc[2 * g];
    }
}
/* Q4_K, 144 bytes: f16 d, f16 dmin, 12 bytes of scales, 128 of nibbles: groups 2j (low) and 2j + 1 share 32 bytes. */
ST_HD void st_decode_q4_k(const uint8_t *w, st_block256 *b) {
    st_decode_k_head(w, b);
    for (int i = 0; i < 256; i++) b->q[i] = (int8_t)(w[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15);
}
/* Q5_K, 176 bytes: as Q4_K with 32 bytes of fifth bits before the nibbles, bit g for group g. */
ST_HD void st_decode_q5_k(const uint8_t *w, st_block256 *b) {
    st_decode_k_head(w, b);
    for (int i = 0; i < 256; i++)
        b->q[i] = (int8_t)((w[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15) | (w[16 + i % 32] >> (i / 32) & 1) << 4);
}
/* Q6_K, 210 bytes: low nibbles [128], two high bits [64], int8 scales [16], f16 d; minus 32. */
ST_HD void st_decode_q6_k(const uint8_t *w, st_block256 *b) {
    b->d = st_half_at(w + 208), b->dmin = 0.0f;
    for (int i = 0; i < 16; i++) b->sc[i] = (int8_t)w[192 + i];
    for (int i = 0; i < 8; i++) b->mn[i] = 0;
    for (int i = 0; i < 256; i++) {
        int n = i / 128, j = i % 128 / 32, l = i % 32;
        int low = w[64 * n + 32 * (j & 1) + l] >> (4 * (j >> 1)) & 15, high = w[128 + 32 * n + l] >> (2 * j) & 3;
        b->q[i] = (int8_t)((low | high << 4) - 32);
    }
}

/* Running row total of rule 3: blocks inside a segment by fma, segments added in order. */
typedef struct { float total, acc; int left; } st_rowsum;

ST_HD void st_rowsum_start(st_rowsum *r) { r->total = 0.0f; r->acc = 0.0f; r->left = ST_SEGMENT / ST_QBLOCK; }
ST_HD void st_rowsum_block(st_rowsum *r, float wscale, float xscale, int32_t isum) {
    r->acc = ST_FMA(wscale * xscale, (float)isum, r->acc);
    if (--r->left == 0) { r->total += r->acc; r->acc = 0.0f; r->left = ST_SEGMENT / ST_QBLOCK; }
}
ST_HD float st_rowsum_end(st_rowsum *r) {
    if (r->left != ST_SEGMENT / ST_QBLOCK) r->total += r->acc;
    return r->total;
}

/* One block of 32 times its activations; `min` where the type has a minimum: its term follows the product. */
ST_HD void st_block32_join(st_rowsum *r, const st_block32 *w, int min, const int8_t *xq, float xd) {
    int32_t isum = 0, bsum = 0;
    for (int i = 0; i < ST_QBLOCK; i++) {
        isum += (int32_t)w->q[i] * xq[i];
        bsum += xq[i];
    }
    float acc = ST_FMA(w->d * xd, (float)isum, r->acc);
    r->acc = min ? ST_FMA(w->m * xd, (float)bsum, acc) : acc;
    if (--r->left == 0) { r->total += r->acc; r->acc = 0.0f; r->left = ST_SEGMENT / ST_QBLOCK; }
}

/* One super-block, a segment by itself: both sums are exact in int32 and become floats by rounding to nearest even. */
ST_HD void st_block256_join(st_rowsum *r, const st_block256 *w, int min, const int8_t *xq, float xd) {
    int32_t isum = 0, msum = 0;
    for (int i = 0; i < ST_SEGMENT; i++) {
        isum += (int32_t)w->sc[i / 16] * w->q[i] * xq[i];
        msum += (int32_t)w->mn[i / 32] * xq[i];
    }
    float acc = ST_FMA(w->d * xd, (float)isum, 0.0f);
    r->total += min ? ST_FMA(-(w->dmin * xd), (float)msum, acc) : acc;
}

/* st_row_<type>(w, xq, xd, k): a row of the file times a quantised activation row. Blocks of 32 have an activation
 * scale for each 32 values (k is a multiple of 32), super-blocks one for each 256 (k is a multiple of 256). */
#define ST_ROW(type, size, bytes, min) \
    ST_HD float st_row_##type(const uint8_t *w, const int8_t *xq, const float *xd, int k) { \
        st_block##size b; \
        st_rowsum r; \
        st_rowsum_start(&r); \
        for (int i = 0; i < k / size; i++) { \
            st_decode_##type(w + (size_t)i * bytes, &b); \
            st_block##size##_join(&r, &b, min, xq + i * size, xd[i]); \
        } \
        return st_rowsum_end(&r); \
    }
ST_ROW(q8_0, 32, 34, 0)
ST_ROW(q4_0, 32, 18, 0)
ST_ROW(q4_1, 32, 20, 1)
ST_ROW(q5_0, 32, 22, 0)
ST_ROW(q5_1, 32, 24, 1)
ST_ROW(iq4_nl, 32, 18, 0)
ST_ROW(q4_k, 256, 144, 1)
ST_ROW(q5_k, 256, 176, 1)
ST_ROW(q6_k, 256, 210, 0)

/* A decoded block as floats (embedding rows, vectors): each operation rounds. */
ST_HD void st_block32_floats(const st_block32 *b, int min, float *y) {
    for (int i = 0; i < 32; i++) y[i] = min ? b->d * (float)b->q[i] + b->m : b->d * (float)b->q[i];
}
ST_HD void st_block256_floats(const st_block256 *b, int min, float *y) {
    for (int i = 0; i < 256; i++) {
        float v = (b->d * (float)b->sc[i / 16]) * (float)b->q[i];
        y[i] = min ? v - b->dmin * (float)b->mn[i / 32] : v;
    }
}

/* ---- attention (rule 6) ------------------------------------------------------------------------------------- */

/* One group (<= 64 values) of a key, value or query to int8 with an f16 scale; codes are made with that f16's value. */
ST_HD uint16_t st_quantize_kv(const float *x, int n, int8_t *q) {
    float amax = st_amax(x, n);
    float d = amax <= 3.4028235e38f ? amax / 127.0f : st_bits2f(0x7fc00000u);
    uint16_t h = st_f2h(d > 65504.0f ? 65504.0f : d);
    float df = st_h2f(h);
    float inv = df > 0.0f ? 1.0f / df : 0.0f;
    for (int i = 0; i < n; i++) {
        float v = rintf(x[i] * inv);
        if (!(v <= 127.0f)) v = 127.0f;
        if (v < -127.0f) v = -127.0f;
        q[i] = inv > 0.0f ? (int8_t)(int32_t)v : 0;
    }
    return h;
}

/* One block of float weights (F16, BF16) as Q8_0: d = f16(amax / 127), codes by the value of that f16 (st_quantize_kv's
 * rule on 32 values). A matrix of such weights is held this way unless it is kept as it is (float32, rule 4). */
ST_HD uint16_t st_quantize_weights(const float *w, int8_t *q) { return st_quantize_kv(w, ST_QBLOCK, q); }

/* One attention block: n (1..64) positions of scores against values. v: codes of position i at v + i * vstride, scale
 * vs[i]. Writes the weighted values to out[dv] (dv <= 64: one value group), returns the block maximum; *den the sum. */
ST_HD float st_attn_block(const float *score, int n, const int8_t *v, int vstride, const float *vs, int dv, float *out,
                          float *den) {
    float m = score[0], p[ST_POSBLOCK], w[ST_POSBLOCK], big = 0.0f;
    for (int i = 1; i < n; i++) m = score[i] > m ? score[i] : m;
    for (int i = 0; i < n; i++) p[i] = st_exp(score[i] - m);
    *den = st_sum(p, n);
    for (int i = 0; i < n; i++) {
        w[i] = p[i] * vs[i];
        big = w[i] > big ? w[i] : big;
    }
    if (!(big >= ST_TINY)) {
        for (int j = 0; j < dv; j++) out[j] = 0.0f;
        return m;
    }
    float up = 32767.0f / big, down = big * (1.0f / 32767.0f);
    int32_t u[ST_POSBLOCK];
    for (int i = 0; i < n; i++) u[i] = w[i] > 0.0f ? (int32_t)rintf(w[i] * up) : 0;
    for (int j = 0; j < dv; j++) {
        int32_t s = 0;
        for (int i = 0; i < n; i++) s += u[i] * v[i * vstride + j];
        out[j] = down * (float)s;
    }
    return m;
}

/* Float keys and values (the reference beside int8): what differs from the above.
 *
 *   score_i = st_dot(q, k_i, hd) * softmax scale        q as it is, k_i in float32 or widened from f16
 *   block:    m, p_i, denominator as above; out[j] = fma over i ascending, from 0, of p_i * v_i[j]
 *
 * An f16 row is made by st_f2h of each value. Blocks of 64 positions, spans and folds are the same.
 * st_attn_weights makes the block's scores its weights p_i, in place; returns the maximum, *den the sum. */
ST_HD float st_attn_weights(float *score, int n, float *den) {
    float m = score[0];
    for (int i = 1; i < n; i++) m = score[i] > m ? score[i] : m;
    for (int i = 0; i < n; i++) score[i] = st_exp(score[i] - m);
    *den = st_sum(score, n);
    return m;
}

/* State of a running softmax: maximum, denominator (the weighted values lie beside it). Starts at {-inf, 0}, acc 0. */
typedef struct { float m, l; } st_soft;

/* Fold a block or a span {bm, bl, bo[n]} into a running {s, acc[n]}. */
ST_HD void st_fold(st_soft *s, float *acc, float bm, float bl, const float *bo, int n) {
    float m = s->m > bm ? s->m : bm;
    float ea = st_exp(s->m - m), eb = st_exp(bm - m);
    s->l = ST_FMA(s->l, ea, bl * eb);
    for (int j = 0; j < n; j++) acc[j] = ST_FMA(acc[j], ea, bo[j] * eb);
    s->m = m;
}

/* ---- gated delta net (rule 7) ------------------------------------------------------------------------------- */

/* One token of one head. S[dk][dv] is the state (row-major over the key dimension), decay = exp(g), beta in 0..1:
 * d = beta (v - decay (k^T S)); S = decay S + k d^T; o = q^T S. Sums over dk in segments of 32, each from 0.
 * (The decay multiplies the finished sum, not each state value: a quarter of the first pass less.) */
ST_HD void st_delta_step(float *S, int dk, int dv, const float *q, const float *k, const float *v, float decay,
                         float beta, float *o) {
    for (int j = 0; j < dv; j++) {
        float ks = 0.0f, out = 0.0f;
        for (int s = 0; s < dk; s += ST_KEYSEG) {
            float a = 0.0f;
            for (int i = s; i < s + ST_KEYSEG && i < dk; i++) a = ST_FMA(k[i], S[i * dv + j], a);
            ks += a;
        }
        float d = beta * (v[j] - ks * decay);
        for (int s = 0; s < dk; s += ST_KEYSEG) {
            float a = 0.0f;
            for (int i = s; i < s + ST_KEYSEG && i < dk; i++) {
                float t = ST_FMA(k[i], d, S[i * dv + j] * decay);
                S[i * dv + j] = t;
                a = ST_FMA(q[i], t, a);
            }
            out += a;
        }
        o[j] = out;
    }
}

/* ---- small pieces ------------------------------------------------------------------------------------------- */

/* Rotate one pair by the angle with cosine c and sine s (rope, rule 1). */
ST_HD void st_rope_pair(float *a, float *b, float c, float s) {
    float x = *a, y = *b;
    *a = x * c - y * s;
    *b = y * c + x * s;
}

/* Causal depthwise convolution of one channel over taps oldest to newest, then silu. */
ST_HD float st_conv_silu(const float *w, const float *u, int taps) {
    float a = 0.0f;
    for (int i = 0; i < taps; i++) a = ST_FMA(w[i], u[i], a);
    return st_silu(a);
}

#endif

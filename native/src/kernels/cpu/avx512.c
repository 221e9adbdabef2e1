/* AVX-512 with VNNI (F, BW, DQ, VL, VNNI): one vector is 16 lanes, vpdpbusd does the integer products. */
#include "arith.h"
#include "kernels/kernels.h"

#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __mmask16 vm;

static inline vf vf_set1(float x) { return _mm512_set1_ps(x); }
static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
static inline vm vm_first(int n) { return n >= 16 ? (vm)0xffff : (vm)((1u << n) - 1u); }
static inline vf vf_loadn(const float *p, int n) { return _mm512_maskz_loadu_ps(vm_first(n), p); }
static inline void vf_storen(float *p, int n, vf x) { _mm512_mask_storeu_ps(p, vm_first(n), x); }
static inline vf vf_loadh(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)p)); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vf_neg(vf a) { return _mm512_xor_ps(a, _mm512_set1_ps(-0.0f)); }
static inline vf vf_rint(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vm vm_ge(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
static inline vf vf_pick(vm m, vf clear, vf set) { return _mm512_mask_blend_ps(m, clear, set); }
static inline vi vi_cvt(vf a) { return _mm512_cvtps_epi32(a); }
static inline vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
static inline vf vi_exp2(vi n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
static inline vi vf_abs_bits(vf a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
static inline void vi_store8(int8_t *p, vi a) { _mm_storeu_si128((__m128i *)(void *)p, _mm512_cvtepi32_epi8(a)); }
static inline int32_t vi_hadd(vi a) { return _mm512_reduce_add_epi32(a); }
static inline int32_t vi_hmax(vi a) { return _mm512_reduce_max_epi32(a); }
static inline float vf_hmax(vf a) { return _mm512_reduce_max_ps(a); }

static inline float vf_tree(vf lo, vf hi) {
    vf s = _mm512_add_ps(lo, hi);
    __m256 e = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}

#include "simd.inc"

static inline vi load64(const void *p) { return _mm512_loadu_si512(p); }
static inline vi dup32(const void *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm512_set1_epi32(v);
}

INLINE void other_codes(int8_t *q, int k) { (void)q, (void)k; }

/* Scores of 64 positions (without the softmax scale): per 64-group fma of (qs * ks) * isum; codes carry +128. */
INLINE void block_scores(const uint8_t *head, int hd, const int8_t *q, const float *qs, const int32_t *qsum, vf *score) {
    for (int i = 0; i < 4; i++) score[i] = _mm512_setzero_ps();
    const uint16_t *scales = (const uint16_t *)(const void *)(head + st_kv_kscale_offset(hd));
    for (int g = 0; g * ST_KVGROUP < hd; g++) {
        int end = (g + 1) * ST_KVGROUP < hd ? (g + 1) * ST_KVGROUP : hd;
        vi s0 = _mm512_set1_epi32(-128 * qsum[g]), s1 = s0, s2 = s0, s3 = s0;
        for (int j = g * ST_KVGROUP; j < end; j += 4) {
            const uint8_t *k = head + (size_t)j * ST_POSBLOCK;
            vi qj = dup32(q + j);
            s0 = _mm512_dpbusd_epi32(s0, load64(k), qj);
            s1 = _mm512_dpbusd_epi32(s1, load64(k + 64), qj);
            s2 = _mm512_dpbusd_epi32(s2, load64(k + 128), qj);
            s3 = _mm512_dpbusd_epi32(s3, load64(k + 192), qj);
        }
        vf qg = vf_set1(qs[g]);
        const uint16_t *kg = scales + g * ST_POSBLOCK;
        score[0] = vf_fma(vf_mul(qg, vf_loadh(kg)), _mm512_cvtepi32_ps(s0), score[0]);
        score[1] = vf_fma(vf_mul(qg, vf_loadh(kg + 16)), _mm512_cvtepi32_ps(s1), score[1]);
        score[2] = vf_fma(vf_mul(qg, vf_loadh(kg + 32)), _mm512_cvtepi32_ps(s2), score[2]);
        score[3] = vf_fma(vf_mul(qg, vf_loadh(kg + 48)), _mm512_cvtepi32_ps(s3), score[3]);
    }
}

/* down * sum over n positions of u * V, for dv values: 15-bit u as two bytes, so that vpdpbusd serves (exact). */
INLINE void block_values(const uint8_t *v, int hd, int dv, int n, const vi *u, float down, float *out) {
    _Alignas(64) int8_t lo[64], hi[64];
    for (int i = 0; i < 4; i++) {
        vi_store8(lo + 16 * i, u[i]);
        vi_store8(hi + 16 * i, _mm512_srli_epi32(u[i], 8));
    }
    int steps = (n + 3) / 4;
    for (int j = 0; j < dv; j += 16) {
        vi l0 = _mm512_setzero_si512(), h0 = l0, l1 = l0, h1 = l0;
        for (int s = 0; s < steps; s += 2) { /* an odd last step meets u = 0, or is left out below 64 positions */
            vi v0 = load64(v + ((size_t)s * (size_t)hd + (size_t)j) * 4);
            l0 = _mm512_dpbusd_epi32(l0, dup32(lo + 4 * s), v0);
            h0 = _mm512_dpbusd_epi32(h0, dup32(hi + 4 * s), v0);
            if (s + 1 < steps) {
                vi v1 = load64(v + ((size_t)(s + 1) * (size_t)hd + (size_t)j) * 4);
                l1 = _mm512_dpbusd_epi32(l1, dup32(lo + 4 * s + 4), v1);
                h1 = _mm512_dpbusd_epi32(h1, dup32(hi + 4 * s + 4), v1);
            }
        }
        vi sum = _mm512_add_epi32(_mm512_add_epi32(l0, l1), _mm512_slli_epi32(_mm512_add_epi32(h0, h1), 8));
        vf_store(out + j, vf_mul(vf_set1(down), _mm512_cvtepi32_ps(sum)));
    }
}

/* ---- what products.inc asks for, 16 lanes at once ---------------------------------------------------------------- */

typedef __m512i pi;
typedef __m512 pf;
enum { PART = 16 };
#define ROWS_AT_ONCE 8

INLINE pi pi_load(const void *p) { return load64(p); }
INLINE pi pi_zero(void) { return _mm512_setzero_si512(); }
INLINE pi pi_dup(const void *p) { return dup32(p); }
INLINE pi pi_each(const int32_t *p) { return _mm512_set1_epi32(*p); }
INLINE pi pi_bytes(pi x, char mask) { return _mm512_and_si512(x, _mm512_set1_epi8(mask)); }
INLINE pi pi_or(pi x, pi y) { return _mm512_or_si512(x, y); }
INLINE pi pi_right16(pi x, unsigned n) { return _mm512_srli_epi16(x, n); }
INLINE pi pi_left16(pi x, unsigned n) { return _mm512_slli_epi16(x, n); }
INLINE pi pi_signed_right16(pi x, unsigned n) { return _mm512_srai_epi16(x, n); }
INLINE pi pi_signed_right32(pi x, unsigned n) { return _mm512_srai_epi32(x, n); }
INLINE pi pi_left32(pi x, unsigned n) { return _mm512_slli_epi32(x, n); }
INLINE pi pi_sub32(pi x, pi y) { return _mm512_sub_epi32(x, y); }
INLINE pi pi_add32(pi x, pi y) { return _mm512_add_epi32(x, y); }
INLINE pi pi_look_up(const uint8_t *table, pi index) { return _mm512_shuffle_epi8(load64(table), index); }
INLINE pi pi_shuffle(pi x, const uint8_t *mask) { return _mm512_shuffle_epi8(x, load64(mask)); }
INLINE pf pf_zero(void) { return _mm512_setzero_ps(); }
INLINE pf pf_each(const float *p) { return _mm512_set1_ps(*p); }
INLINE pf pf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void pf_store(float *p, pf x) { _mm512_storeu_ps(p, x); }
INLINE pf pf_halves(const uint8_t *p) { return vf_loadh((const uint16_t *)(const void *)p); }
INLINE pf pf_add(pf x, pf y) { return _mm512_add_ps(x, y); }
INLINE pf pf_mul(pf x, pf y) { return _mm512_mul_ps(x, y); }
INLINE pf pf_fma(pf x, pf y, pf z) { return _mm512_fmadd_ps(x, y, z); }
INLINE pf pf_fnma(pf x, pf y, pf z) { return _mm512_fnmadd_ps(x, y, z); } /* -(x * y) + z */
INLINE pf pf_cvt(pi x) { return _mm512_cvtepi32_ps(x); }
INLINE pi pi_dot(pi sum, pi w, pi x) { return _mm512_dpbusd_epi32(sum, w, x); }
INLINE pi pi_dot16(pi sum, pi w, pi x) { return _mm512_dpwssd_epi32(sum, w, x); }
INLINE pi pi_scaled(pi sum, pi part, pi scale) { return _mm512_add_epi32(sum, _mm512_mullo_epi32(part, scale)); }

/* Keeps a running sum in its register. */
#define SETTLE(v) __asm__("" : "+v"(v))

#include "vnni.inc"
#include "products.inc"

const st_kernels st_kernels_avx512 = KERNEL_TABLE("avx512", 1, 128);

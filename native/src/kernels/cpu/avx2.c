/* AVX2 with FMA and F16C: a vector of 16 lanes is two of 8. Integer products go by vpmaddubsw, whose 16-bit sums are
 * exact here: |w| <= 128 and |x| <= 127 give at most 32,512 for a pair, and 4-bit codes leave room for eight steps. */
#include "arith.h"
#include "kernels/kernels.h"

#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef struct { __m256 a, b; } vm;

#define EACH(type, x, y) ((type){(x), (y)})

static inline vf vf_set1(float x) { return EACH(vf, _mm256_set1_ps(x), _mm256_set1_ps(x)); }
static inline vf vf_load(const float *p) { return EACH(vf, _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
static inline void vf_store(float *p, vf x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
static inline vm vm_first(int n) {
    const __m256i at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return EACH(vm, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), at)),
                _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), at)));
}
static inline vf vf_loadn(const float *p, int n) {
    vm m = vm_first(n);
    return EACH(vf, _mm256_maskload_ps(p, _mm256_castps_si256(m.a)), _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b)));
}
static inline void vf_storen(float *p, int n, vf x) {
    vm m = vm_first(n);
    _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), x.a);
    _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), x.b);
}
static inline vf vf_loadh(const uint16_t *p) {
    return EACH(vf, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)p)),
                _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(p + 8))));
}
static inline vf vf_add(vf x, vf y) { return EACH(vf, _mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)); }
static inline vf vf_sub(vf x, vf y) { return EACH(vf, _mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)); }
static inline vf vf_mul(vf x, vf y) { return EACH(vf, _mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)); }
static inline vf vf_div(vf x, vf y) { return EACH(vf, _mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)); }
static inline vf vf_fma(vf x, vf y, vf z) { return EACH(vf, _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)); }
static inline vf vf_min(vf x, vf y) { return EACH(vf, _mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)); }
static inline vf vf_max(vf x, vf y) { return EACH(vf, _mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)); }
static inline vf vf_neg(vf x) {
    const __m256 s = _mm256_set1_ps(-0.0f);
    return EACH(vf, _mm256_xor_ps(x.a, s), _mm256_xor_ps(x.b, s));
}
static inline vf vf_rint(vf x) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    return EACH(vf, _mm256_round_ps(x.a, NEAREST), _mm256_round_ps(x.b, NEAREST));
}
static inline vm vm_ge(vf x, vf y) { return EACH(vm, _mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)); }
static inline vf vf_pick(vm m, vf clear, vf set) {
    return EACH(vf, _mm256_blendv_ps(clear.a, set.a, m.a), _mm256_blendv_ps(clear.b, set.b, m.b));
}
static inline vi vi_cvt(vf x) { return EACH(vi, _mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); }
static inline vf vf_cvt(vi x) { return EACH(vf, _mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)); }
static inline vi vi_add(vi x, vi y) { return EACH(vi, _mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)); }
static inline vi vi_max(vi x, vi y) { return EACH(vi, _mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)); }
static inline vf vi_exp2(vi n) {
    const __m256i bias = _mm256_set1_epi32(127);
    return EACH(vf, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.a, bias), 23)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.b, bias), 23)));
}
static inline vi vf_abs_bits(vf x) {
    const __m256i m = _mm256_set1_epi32(0x7fffffff);
    return EACH(vi, _mm256_and_si256(_mm256_castps_si256(x.a), m), _mm256_and_si256(_mm256_castps_si256(x.b), m));
}
/* 16 values in -128..127 to bytes. */
static inline void vi_store8(int8_t *p, vi x) {
    __m256i w = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
    _mm_storeu_si128((__m128i *)(void *)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
static inline int32_t vi_hadd(vi x) {
    __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i f = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    f = _mm_add_epi32(f, _mm_unpackhi_epi64(f, f));
    return _mm_cvtsi128_si32(f) + _mm_extract_epi32(f, 1);
}
static inline int32_t vi_hmax(vi x) {
    __m256i s = _mm256_max_epi32(x.a, x.b);
    __m128i f = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    f = _mm_max_epi32(f, _mm_unpackhi_epi64(f, f));
    f = _mm_max_epi32(f, _mm_shuffle_epi32(f, 0x55));
    return _mm_cvtsi128_si32(f);
}
static inline float vf_hmax(vf x) {
    __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 f = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    f = _mm_max_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_max_ss(f, _mm_movehdup_ps(f)));
}
static inline float vf_tree(vf lo, vf hi) {
    vf s = vf_add(lo, hi);
    __m256 e = _mm256_add_ps(s.a, s.b);
    __m128 f = _mm_add_ps(_mm256_castps256_ps128(e), _mm256_extractf128_ps(e, 1));
    f = _mm_add_ps(f, _mm_movehl_ps(f, f));
    return _mm_cvtss_f32(_mm_add_ss(f, _mm_movehdup_ps(f)));
}

#include "simd.inc"

static inline __m256i load32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline __m256i dup32(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, 4);
    return _mm256_set1_epi32(v);
}
static inline __m256i pairs(__m256i words) { return _mm256_madd_epi16(words, _mm256_set1_epi16(1)); }

/* Key codes carry +128; the query's magnitude is the unsigned factor, its sign goes to the key. */
INLINE void block_scores(const uint8_t *head, int hd, const int8_t *q, const float *qs, const int32_t *qsum, vf *score) {
    (void)qsum;
    const __m256i flip = _mm256_set1_epi8(-128);
    const uint16_t *scales = (const uint16_t *)(const void *)(head + st_kv_kscale_offset(hd));
    for (int i = 0; i < 4; i++) score[i] = vf_set1(0.0f);
    for (int g = 0; g * ST_KVGROUP < hd; g++) {
        int end = (g + 1) * ST_KVGROUP < hd ? (g + 1) * ST_KVGROUP : hd;
        __m256i s[8];
        for (int i = 0; i < 8; i++) s[i] = _mm256_setzero_si256();
        for (int j = g * ST_KVGROUP; j < end; j += 4) {
            __m256i qj = dup32(q + j), qa = _mm256_abs_epi8(qj);
            for (int i = 0; i < 8; i++) {
                __m256i k = _mm256_xor_si256(load32(head + (size_t)j * ST_POSBLOCK + 32 * i), flip);
                s[i] = _mm256_add_epi32(s[i], pairs(_mm256_maddubs_epi16(qa, _mm256_sign_epi8(k, qj))));
            }
        }
        for (int i = 0; i < 4; i++) {
            vf w = vf_mul(vf_set1(qs[g]), vf_loadh(scales + g * ST_POSBLOCK + 16 * i));
            score[i] = vf_fma(w, vf_cvt(EACH(vi, s[2 * i], s[2 * i + 1])), score[i]);
        }
    }
}

/* 16 bytes hold 4 values x 4 positions; widened, vpmaddwd gives two partial sums per value, joined at the end. */
INLINE void block_values(const uint8_t *v, int hd, int dv, int n, const vi *u, float down, float *out) {
    _Alignas(32) int16_t w[ST_POSBLOCK];
    for (int i = 0; i < 4; i++) {
        __m256i p = _mm256_permute4x64_epi64(_mm256_packs_epi32(u[i].a, u[i].b), 0xd8);
        _mm256_store_si256((__m256i *)(void *)(w + 16 * i), p);
    }
    for (int j = 0; j < dv; j += 8) {
        __m256i s0 = _mm256_setzero_si256(), s1 = s0;
        for (int step = 0; step < (n + 3) / 4; step++) {
            const __m128i *p = (const __m128i *)(const void *)(v + ((size_t)step * (size_t)hd + (size_t)j) * 4);
            int64_t four;
            memcpy(&four, w + 4 * step, 8);
            __m256i f = _mm256_set1_epi64x(four);
            s0 = _mm256_add_epi32(s0, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p)), f));
            s1 = _mm256_add_epi32(s1, _mm256_madd_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p + 1)), f));
        }
        __m256i s = _mm256_permute4x64_epi64(_mm256_hadd_epi32(s0, s1), 0xd8);
        _mm256_storeu_ps(out + j, _mm256_mul_ps(_mm256_set1_ps(down), _mm256_cvtepi32_ps(s)));
    }
}

/* Sixteen registers hold the sums of four activation rows against eight weight rows; a group is two such halves and a
 * tile two such quarters. `codes` points at the half's first vector, steps are 64 bytes apart. */
enum { QUARTER = 4, SEGMENT_BLOCKS = ST_SEGMENT / ST_QBLOCK };

/* One value of a row's table in every lane, from memory: no detour by a general register. */
INLINE __m256 each_float(const float *p) { return _mm256_broadcast_ss(p); }
INLINE __m256i each_int(const int32_t *p) { return _mm256_castps_si256(_mm256_broadcast_ss((const float *)(const void *)p)); }

/* Keeps a running sum in its register: without it gcc gathers all products of a block first and spills them. */
#define SETTLE(v) __asm__("" : "+x"(v))

INLINE __m256 half_scales(const uint8_t *w, int b, int half) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(w + b * 32 + half * 16)));
}

INLINE __m256 join_block(__m256 acc, __m256 ws, const float *d, __m256i isum) {
    return _mm256_fmadd_ps(_mm256_mul_ps(ws, each_float(d)), _mm256_cvtepi32_ps(isum), acc);
}

INLINE void finish_half(const st_tile *t, int r, int at, __m256 v) {
    float *y = t->y[r] + at;
    if (t->mode == ST_ADD) v = _mm256_add_ps(_mm256_loadu_ps(y), v);
    else if (t->mode == ST_FMA_WEIGHT) v = _mm256_fmadd_ps(_mm256_set1_ps(t->weight[r]), v, _mm256_loadu_ps(y));
    _mm256_storeu_ps(y, v);
}

/* 8-bit codes as two halves of 16 bits: in a word of codes (v0, v1) the low byte is v0, the high byte v1, so the four
 * codes of a lane become (v0, v2) and (v1, v3), and each pair meets its like in one vpmaddwd. */
INLINE __m256i even(__m256i c) { return _mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8); }
INLINE __m256i odd(__m256i c) { return _mm256_srai_epi16(c, 8); }

/* Behind k codes: k bytes of even pairs, k bytes of odd pairs, in the order of the codes' 4-value steps. */
INLINE void other_codes(int8_t *q, int k) {
    for (int i = 0; i < k; i += 32) {
        __m256i c = load32(q + i);
        _mm256_storeu_si256((__m256i *)(void *)(q + k + i), even(c));
        _mm256_storeu_si256((__m256i *)(void *)(q + 2 * k + i), odd(c));
    }
}

/* One row: |w| as the unsigned factor of vpmaddubsw and the activation with the weight's sign. */
INLINE __m256i block_q8_0_single(const uint8_t *codes, const int8_t *q) {
    __m256i a = _mm256_setzero_si256(), b = a;
    for (int s = 0; s < 8; s += 2) {
        __m256i c = load32(codes + 64 * s), d = load32(codes + 64 * s + 64);
        a = _mm256_add_epi32(a, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(dup32(q + 4 * s), c))));
        b = _mm256_add_epi32(b, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(d), _mm256_sign_epi8(dup32(q + 4 * s + 4), d))));
    }
    return _mm256_add_epi32(a, b);
}

/* Several rows: the widened weights serve all of them. */
INLINE void block_q8_0(const uint8_t *codes, int k, const int8_t *const *q, int at, __m256i *sum, const int R) {
    for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
    for (int s = 0; s < 8; s++) {
        __m256i c = load32(codes + 64 * s), e = even(c), o = odd(c);
        for (int r = 0; r < R; r++) {
            const int8_t *x = q[r] + k + at + 4 * s;
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(e, dup32(x)));
            SETTLE(sum[r]);
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(o, dup32(x + k)));
            SETTLE(sum[r]);
        }
    }
}

INLINE void half_q8_0(const uint8_t *w, int nb, const st_tile *t, int r0, int at, int half, const int R) {
    const uint8_t *codes = w + st_pack_scale_bytes(nb * 32) + half * 32;
    __m256 total[QUARTER];
    const int8_t *q[QUARTER];
    const float *d[QUARTER];
    for (int r = 0; r < R; r++) {
        total[r] = _mm256_setzero_ps();
        q[r] = t->q[r0 + r];
        d[r] = t->d[r0 + r];
    }
    for (int b = 0; b < nb;) {
        int end = b + SEGMENT_BLOCKS < nb ? b + SEGMENT_BLOCKS : nb;
        __m256 acc[QUARTER];
        for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
        for (; b < end; b++, codes += 512) {
            __m256i sum[QUARTER];
            if (R == 1) sum[0] = block_q8_0_single(codes, q[0] + b * 32);
            else block_q8_0(codes, nb * 32, q, b * 32, sum, R);
            __m256 ws = half_scales(w, b, half);
            for (int r = 0; r < R; r++) acc[r] = join_block(acc[r], ws, d[r] + b, sum[r]);
        }
        for (int r = 0; r < R; r++) total[r] = _mm256_add_ps(total[r], acc[r]);
    }
    for (int r = 0; r < R; r++) finish_half(t, r0 + r, at + 8 * half, total[r]);
}

/* 16-bit sums: eight steps of at most 2 * 15 * 127 fit, so one vpmaddwd ends a block. */
INLINE void half_q4_0(const uint8_t *w, int nb, const st_tile *t, int r0, int at, int half, const int R) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const uint8_t *codes = w + st_pack_scale_bytes(nb * 32) + half * 32;
    __m256 total[QUARTER];
    const int8_t *q[QUARTER];
    const float *d[QUARTER];
    const int32_t *bsum[QUARTER];
    for (int r = 0; r < R; r++) {
        total[r] = _mm256_setzero_ps();
        q[r] = t->q[r0 + r];
        d[r] = t->d[r0 + r];
        bsum[r] = t->sum[r0 + r];
    }
    for (int b = 0; b < nb;) {
        int end = b + SEGMENT_BLOCKS < nb ? b + SEGMENT_BLOCKS : nb;
        __m256 acc[QUARTER];
        for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
        for (; b < end; b++, codes += 256) {
            __m256i sum[QUARTER];
            for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
            for (int s = 0; s < 4; s++) {
                __m256i c = load32(codes + 64 * s);
                __m256i lo = _mm256_and_si256(c, nibble), hi = _mm256_and_si256(_mm256_srli_epi16(c, 4), nibble);
                for (int r = 0; r < R; r++) {
                    const int8_t *x = q[r] + b * 32 + 4 * s;
                    sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(lo, dup32(x)));
                    SETTLE(sum[r]);
                    sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(hi, dup32(x + 16)));
                    SETTLE(sum[r]);
                }
            }
            __m256 ws = half_scales(w, b, half);
            for (int r = 0; r < R; r++) {
                __m256i isum = _mm256_sub_epi32(pairs(sum[r]), _mm256_slli_epi32(each_int(bsum[r] + b), 3));
                acc[r] = join_block(acc[r], ws, d[r] + b, isum);
            }
        }
        for (int r = 0; r < R; r++) total[r] = _mm256_add_ps(total[r], acc[r]);
    }
    for (int r = 0; r < R; r++) finish_half(t, r0 + r, at + 8 * half, total[r]);
}

INLINE void group_q8_0(const uint8_t *w, int nb, const st_tile *t, int at, const int R) {
    for (int half = 0; half < 2; half++) {
        half_q8_0(w, nb, t, 0, at, half, R < QUARTER ? R : QUARTER);
        if (R > QUARTER) half_q8_0(w, nb, t, QUARTER, at, half, R - QUARTER);
    }
}

INLINE void group_q4_0(const uint8_t *w, int nb, const st_tile *t, int at, const int R) {
    for (int half = 0; half < 2; half++) {
        half_q4_0(w, nb, t, 0, at, half, R < QUARTER ? R : QUARTER);
        if (R > QUARTER) half_q4_0(w, nb, t, QUARTER, at, half, R - QUARTER);
    }
}

const st_kernels st_kernels_avx2 = KERNEL_TABLE("avx2", 3, 0);

/* AVX2 with FMA and F16C. Integer products go by vpmaddubsw: 16-bit sums of unsigned codes times signed ones, exact as
 * long as |w| * 127 * 2 * steps stays below 32,768: eight steps of 4-bit codes, four of 5 bits, two of 6 bits. One
 * vpmaddwd then widens a sum, and multiplies it by its group's scale on the way. */
#include "arith.h"
#include "kernels/kernels.h"
#include "ymm.inc"

#define ROWS_AT_ONCE 4

INLINE pi pi_dot(pi part, pi w, pi x) { return _mm256_add_epi16(part, _mm256_maddubs_epi16(w, x)); }
INLINE pi pi_dot16(pi sum, pi w, pi x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
INLINE pi pi_scaled(pi sum, pi part, pi scale) { return _mm256_add_epi32(sum, _mm256_madd_epi16(part, scale)); }
INLINE pi pi_taken(pi part) { return pairs(part); }
INLINE int steps_that_fit(const int bits) { return bits == 4 ? 8 : bits == 5 ? 4 : 2; }

/* A scale in both words of its lane. */
#define SPREAD_MASK(g) MASK(g, -1, g, -1)
#define SPREAD_SIGNED_MASK(g) MASK(-1, g, -1, g)
INLINE pi signed_spread(pi x) { return pi_signed_right16(x, 8); }

/* Q8_0 is multiplied with its signs; IQ4_NL's values get 128 added as they are looked up. */
INLINE int code_offset(const int type) { return type == ST_W_IQ4_NL ? 128 : st_weight_offset(type); }

/* ---- Q8_0 -------------------------------------------------------------------------------------------------------- */

/* 8-bit codes as two halves of 16 bits: in a word of codes (v0, v1) the low byte is v0, the high byte v1, so the four
 * codes of a lane become (v0, v2) and (v1, v3), and each pair meets its like in one vpmaddwd. */
INLINE pi even(pi c) { return _mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8); }
INLINE pi odd(pi c) { return _mm256_srai_epi16(c, 8); }

/* Behind k codes: k bytes of even pairs, k bytes of odd pairs, in the order of the codes' 4-value steps. */
INLINE void other_codes(int8_t *q, int k) {
    for (int i = 0; i < k; i += 32) {
        pi c = load32(q + i);
        _mm256_storeu_si256((__m256i *)(void *)(q + k + i), even(c));
        _mm256_storeu_si256((__m256i *)(void *)(q + 2 * k + i), odd(c));
    }
}

/* One row: |w| as the unsigned factor of vpmaddubsw and the activation with the weight's sign. */
INLINE pi block_q8_0_single(const uint8_t *v, const int8_t *x) {
    pi a = pi_zero(), b = a;
    for (int s = 0; s < 8; s += 2) {
        pi c = load32(v + 64 * s), d = load32(v + 64 * s + 64);
        a = _mm256_add_epi32(a, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(c), _mm256_sign_epi8(dup32(x + 4 * s), c))));
        b = _mm256_add_epi32(b, pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(d), _mm256_sign_epi8(dup32(x + 4 * s + 4), d))));
    }
    return _mm256_add_epi32(a, b);
}

/* Several rows: the widened weights serve all of them. */
INLINE void block_q8_0(const uint8_t *v, int row_codes, const int8_t *const *q, int at, pi *sum, const int R) {
    for (int s = 0; s < 8; s++) {
        pi c = load32(v + 64 * s), e = even(c), o = odd(c);
        for (int r = 0; r < R; r++) {
            const int8_t *x = q[r] + row_codes + at + 4 * s;
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(e, dup32(x)));
            SETTLE(sum[r]);
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(o, dup32(x + row_codes)));
            SETTLE(sum[r]);
        }
    }
}

/* ---- IQ4_NL ------------------------------------------------------------------------------------------------------ */

/* A value plus 128 is 16 * high + low, each a nibble: two 16-bit sums that hold a whole block. */
#define NL_HIGH 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 13, 15
#define NL_LOW 1, 8, 13, 15, 15, 13, 10, 6, 1, 13, 9, 6, 5, 5, 9, 1
_Alignas(32) static const uint8_t HIGH[32] = {NL_HIGH, NL_HIGH}, LOW[32] = {NL_LOW, NL_LOW};

INLINE void block_iq4_nl(const uint8_t *v, const int8_t *const *q, int at, pi *sum, const int R) {
    pi high[ROWS_AT_ONCE], low[ROWS_AT_ONCE];
    for (int r = 0; r < R; r++) high[r] = low[r] = pi_zero();
    for (int s = 0; s < 8; s++) {
        pi c = load32(v + 64 * (s & 3)), code = pi_bytes(s < 4 ? c : pi_right16(c, 4), 15);
        pi h = pi_look_up(HIGH, code), l = pi_look_up(LOW, code);
        for (int r = 0; r < R; r++) {
            pi x = dup32(q[r] + at + 4 * s);
            high[r] = pi_dot(high[r], h, x);
            SETTLE(high[r]);
            low[r] = pi_dot(low[r], l, x);
            SETTLE(low[r]);
        }
    }
    for (int r = 0; r < R; r++) sum[r] = pi_dot16(pairs(low[r]), high[r], _mm256_set1_epi16(16));
}

INLINE int own_block(const int type, const uint8_t *v, const st_tile *t, const int8_t *const *q, int at, pi *sum, const int R) {
    if (type == ST_W_IQ4_NL) block_iq4_nl(v, q, at, sum, R);
    else if (type == ST_W_Q8_0 && R == 1) sum[0] = block_q8_0_single(v, q[0] + at);
    else if (type == ST_W_Q8_0) block_q8_0(v, t->row_codes, q, at, sum, R);
    else return 0;
    return 1;
}

#include "products.inc"

const st_kernels st_kernels_avx2 = KERNEL_TABLE("avx2", 3, 0);

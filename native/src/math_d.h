/* Elementary functions in double, with the same bits everywhere: for the few numbers that the host computes once and
 * shares (log-softmax, rope tables). Only + - * /, rint and fma, all exactly rounded by IEEE 754: no other libm call.
 *
 * Measured against 60-digit values (tests/native/test_sampling.py asserts them), in units in the last place:
 *   st_exp_d < 1 over the whole normal range, st_log_d < 1, st_sincos_d < 1 for |x| <= 1e7,
 *   st_pow_d relative error <= 2^-53 * (3 + 2 |y log x|).
 * Compile with -ffp-contract=off. */
#ifndef ST_MATH_D_H
#define ST_MATH_D_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* ln 2 = HIGH (32 bits) + LOW; pi / 2 = A (29 bits) + B (29 bits) + C + D. */
#define ST_LN2_HIGH 0x1.62e42fee00000p-1
#define ST_LN2_LOW 0x1.a39ef35793c76p-33
#define ST_PIO2_A 0x1.921fb54000000p+0
#define ST_PIO2_B 0x1.10b4611000000p-30
#define ST_PIO2_C 0x1.4c4c6628b80dcp-59
#define ST_PIO2_D 0x1.cd129024e088ap-115

/* Largest |x| that st_sincos_d takes; beyond it both results are NaN, so that misuse shows. */
#define ST_SINCOS_MAX 1e7

static inline double st_bits2d(uint64_t u) { double d; memcpy(&d, &u, 8); return d; }
static inline uint64_t st_d2bits(double d) { uint64_t u; memcpy(&u, &d, 8); return u; }

/* 2^n for n in -1022..1023. */
static inline double st_pow2_d(int n) { return st_bits2d((uint64_t)(n + 1023) << 52); }

/* exp(x). Reduction by ln 2 in two parts (the high one has 32 bits, so that n * high is exact), Taylor series to
 * degree 13 on |r| <= 0.3466 (truncation 4e-18). Infinity above 709.79, subnormal and then 0 below -708.4. */
static inline double st_exp_d(double x) {
    static const double inverse[] = {/* 1/13! ... 1/2! */
        1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0,
        1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5};
    if (x != x) return x;
    if (x > 710.0) return INFINITY;
    if (x < -746.0) return 0.0;
    double n = rint(x * 1.44269504088896340736);
    double high = x - n * ST_LN2_HIGH, low = n * ST_LN2_LOW;
    double r = high - low, lost = (high - r) - low; /* x - n ln 2 = r + lost */
    double p = inverse[0];
    for (int i = 1; i < 12; i++) p = fma(p, r, inverse[i]);
    double y = 1.0 + (r + fma(r * r, p, lost));
    int e = (int)n, half = e / 2; /* in two steps: 2^1024 and the subnormals are no normal power of two */
    return y * st_pow2_d(half) * st_pow2_d(e - half);
}

/* Natural logarithm. x = 2^k (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); log(1 + f) = 2 atanh(s), s = f / (2 + f), its
 * series to s^23, written as f - (f^2/2 - s (f^2/2 + series)) so that the leading term f is exact.
 * -infinity at 0, NaN below. */
static inline double st_log_d(double x) {
    if (x != x || x == INFINITY) return x;
    if (x <= 0.0) return x == 0.0 ? -INFINITY : (double)NAN;
    int k = 0;
    if (x < 2.2250738585072014e-308) { /* subnormal: 2^54 up */
        x *= 18014398509481984.0;
        k = -54;
    }
    uint64_t bits = st_d2bits(x);
    k += (int)(bits >> 52) - 1023;
    x = st_bits2d((bits & 0xfffffffffffffu) | 0x3ff0000000000000u);
    if (x > 1.41421356237309504880) {
        x *= 0.5;
        k++;
    }
    double f = x - 1.0, s = f / (2.0 + f), q = s * s, h = 0.5 * f * f;
    double p = 2.0 / 23.0;
    for (int d = 21; d >= 3; d -= 2) p = fma(p, q, 2.0 / (double)d);
    p *= q;
    double dk = (double)k;
    return dk * ST_LN2_HIGH - ((h - (s * (h + p) + dk * ST_LN2_LOW)) - f);
}

/* sin and cos of x (radians), |x| <= 1e7. Reduction by pi/2 in four parts: the first two have 29 bits, so that their
 * products with n (24 bits) are exact; C and D carry the digits that matter where x is next to a multiple of pi/2 and
 * r as small as 2^-60. r + t is the reduced argument. Taylor series to degree 17 and 16 on |r| <= pi/4 (truncation
 * below 2e-18). */
static inline void st_sincos_d(double x, double *sin_out, double *cos_out) {
    if (!(x >= -ST_SINCOS_MAX && x <= ST_SINCOS_MAX)) {
        *sin_out = *cos_out = (double)NAN;
        return;
    }
    double n = rint(x * 0.63661977236758134308);
    double w = x - n * ST_PIO2_A, v = n * ST_PIO2_B;
    double a = w - v, bb = a - w;
    double rest = (w - (a - bb)) - (v + bb); /* w - v = a + rest, exactly */
    double c = n * ST_PIO2_C, d = fma(n, ST_PIO2_C, -c);
    double g = a - c, gb = g - a;
    rest += (((a - (g - gb)) - (c + gb)) - d) - n * ST_PIO2_D;
    double r = g + rest, t = (g - r) + rest;

    double z = r * r;
    double ps = 1.0 / 355687428096000.0; /* 1/17! */
    ps = fma(ps, z, -1.0 / 1307674368000.0);
    ps = fma(ps, z, 1.0 / 6227020800.0);
    ps = fma(ps, z, -1.0 / 39916800.0);
    ps = fma(ps, z, 1.0 / 362880.0);
    ps = fma(ps, z, -1.0 / 5040.0);
    ps = fma(ps, z, 1.0 / 120.0);
    ps = fma(ps, z, -1.0 / 6.0);
    double s = r + fma(r * z, ps, fma(-0.5 * z, t, t));

    double pc = 1.0 / 20922789888000.0; /* 1/16! */
    pc = fma(pc, z, -1.0 / 87178291200.0);
    pc = fma(pc, z, 1.0 / 479001600.0);
    pc = fma(pc, z, -1.0 / 3628800.0);
    pc = fma(pc, z, 1.0 / 40320.0);
    pc = fma(pc, z, -1.0 / 720.0);
    pc = fma(pc, z, 1.0 / 24.0);
    double hz = 0.5 * z, one = 1.0 - hz;
    double co = one + (((1.0 - one) - hz) + fma(z * z, pc, -r * t));

    switch ((int)n & 3) { /* n mod 4, also for negative n in two's complement */
    case 0: *sin_out = s; *cos_out = co; break;
    case 1: *sin_out = co; *cos_out = -s; break;
    case 2: *sin_out = -s; *cos_out = -co; break;
    default: *sin_out = -co; *cos_out = s; break;
    }
}

/* x^y for x > 0, by exp(y log x). NaN for x < 0. */
static inline double st_pow_d(double x, double y) { return st_exp_d(y * st_log_d(x)); }

#endif

/* Philox4x32-10: the counter-based random numbers of sampling (Salmon, Moraes, Dror, Shaw: "Parallel random numbers:
 * as easy as 1, 2, 3", SC 2011). A number is a function of (key, counter) alone, so a token's draw does not depend on
 * how many draws came before it. Header only, so that a kernel on another device can include it. */
#ifndef ST_PHILOX_H
#define ST_PHILOX_H

#include <stdint.h>

#ifdef __CUDACC__
#define ST_PHILOX_FN __host__ __device__ static inline
#else
#define ST_PHILOX_FN static inline
#endif

enum { ST_PHILOX_ROUNDS = 10 };

/* Ten rounds over counter[4] with key[2]; the four words go to out (which may be the counter). */
ST_PHILOX_FN void st_philox4x32(const uint32_t *counter, const uint32_t *key, uint32_t *out) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int r = 0; r < ST_PHILOX_ROUNDS; r++) {
        uint64_t a = (uint64_t)c0 * 0xd2511f53u, b = (uint64_t)c2 * 0xcd9e8d57u;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u; /* the golden ratio and sqrt(3) - 1, as 32-bit fractions */
        k1 += 0xbb67ae85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* A uniform number in [0, 1), a multiple of 2^-32: word 0 of key (seed low, seed high), counter (position, draw,
 * choice, 0). */
ST_PHILOX_FN double st_philox_uniform(uint64_t seed, uint32_t position, uint32_t draw, uint32_t choice) {
    uint32_t counter[4] = {position, draw, choice, 0}, key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, out[4];
    st_philox4x32(counter, key, out);
    return (double)out[0] * 2.3283064365386962890625e-10; /* 2^-32 */
}

#endif

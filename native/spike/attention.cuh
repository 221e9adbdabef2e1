// Rule 6 on int8 tensor cores: scores, softmax blocks of 64 positions, integer P V, folding in spans of 8 blocks.
//
// A warp takes 16 query rows (query position x head of a group) against one block of 64 positions. The 15-bit weights u
// are split into two bytes, u = 256 hi + lo, so P V is two int8 products and one exact int32. Positions are dealt to the
// columns of the score product so that a lane owns positions 16 c + 4 t .. + 3: four neighbours, one word of the P V
// operand; and the denominator's halving tree (16, 8, 4, 2, 1) is additions inside a lane and two shuffles.
// Layout of a page: keys [position][D]; values [position / 4][D][4 positions]; scales [D / 64][position].
#ifndef SPIKE_ATTENTION_CUH
#define SPIKE_ATTENTION_CUH
#include "common.cuh"

static constexpr float NEG_INF = -INFINITY;

// Score of one key: its 64-value groups in order, then the softmax scale.
ST_HD float score_step(float score, float qs, float ks, int isum) { return ST_FMA(qs * ks, (float)isum, score); }

// One layer of one K/V head's cache, 64-position blocks padded to whole blocks.
struct Cache {
    const int8_t *k, *v;
    const __half *ks, *vs;
    int padded; // positions, a multiple of 64
};

__device__ static inline void unpack4(float (&f)[4], const __half *p) {
    uint2 u = *(const uint2 *)p;
    float2 a = __half22float2(*(__half2 *)&u.x), b = __half22float2(*(__half2 *)&u.y);
    f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y;
}

// One block for 16 rows. q: codes of the 16 rows, row stride D (any memory); qs[h][group]: scale of row g + 8 h. k, v:
// this block's keys and value words with strides kst (bytes a position) and vst (bytes a quad of positions). ks, vs: this
// block's scales, groups `padded` apart. n[h]: valid positions of row g + 8 h. Gives m[h], l[h] and, through
// sink(dim, h, value), the weighted values of row g + 8 h.
// ROLLED keeps the value groups a loop: less code, for a kernel that runs once through it.
template <int D, bool ROLLED, typename Sink>
__device__ static inline void attend_block(const int8_t *q, const float (&qs)[2][D / 64], const int8_t *k, int kst,
                                           const int8_t *v, int vst, const __half *ks, const __half *vs, int padded,
                                           const int (&n)[2], float scale, float (&m)[2], float (&l)[2], Sink sink) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float sc[8][4] = {}; // [product j][c]: position 16 (j / 2) + 4 t + 2 (j & 1) + (c & 1) of row g + 8 (c / 2)
#pragma unroll
    for (int gr = 0; gr < D / 64; gr++) {
        uint4 a = *(const uint4 *)(q + g * D + gr * 64 + t * 16),
              b = *(const uint4 *)(q + (g + 8) * D + gr * 64 + t * 16);
        float kf[4][4];
#pragma unroll
        for (int c = 0; c < 4; c++) unpack4(kf[c], ks + (size_t)gr * padded + 16 * c + 4 * t);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            int pos = 16 * (j >> 1) + (g >> 1) * 4 + (j & 1) * 2 + (g & 1);
            uint4 w = *(const uint4 *)(k + pos * kst + gr * 64 + t * 16);
            int d[4] = {};
            mma_s8(d, a.x, b.x, a.y, b.y, w.x, w.y, d);
            mma_s8(d, a.z, b.z, a.w, b.w, w.z, w.w, d);
#pragma unroll
            for (int c = 0; c < 4; c++)
                sc[j][c] = score_step(sc[j][c], qs[c >> 1][gr], kf[j >> 1][(j & 1) * 2 + (c & 1)], d[c]);
        }
    }
    m[0] = m[1] = NEG_INF;
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            int pos = 16 * (j >> 1) + 4 * t + 2 * (j & 1) + (c & 1);
            sc[j][c] = pos < n[c >> 1] ? sc[j][c] * scale : NEG_INF;
            m[c >> 1] = fmaxf(m[c >> 1], sc[j][c]);
        }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], 1));
        m[h] = fmaxf(m[h], __shfl_xor_sync(~0u, m[h], 2));
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int c = 0; c < 4; c++) sc[j][c] = n[c >> 1] > 0 ? exp_select(sc[j][c] - m[c >> 1]) : 0.0f;
#pragma unroll
    for (int h = 0; h < 2; h++) { // i and i + 32, + 16, + 8, + 4, + 2, + 1
        float s[2][2];            // [j & 1][c & 1]
#pragma unroll
        for (int o = 0; o < 2; o++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int c = 2 * h + e;
                s[o][e] = (sc[o][c] + sc[4 + o][c]) + (sc[2 + o][c] + sc[6 + o][c]);
                s[o][e] += __shfl_xor_sync(~0u, s[o][e], 2);
                s[o][e] += __shfl_xor_sync(~0u, s[o][e], 1);
            }
        l[h] = (s[0][0] + s[1][0]) + (s[0][1] + s[1][1]);
    }
#pragma unroll(ROLLED ? 1 : D / 64)
    for (int gr = 0; gr < D / 64; gr++) {
        float vf[4][4], big[2] = {0.0f, 0.0f}, up[2], down[2];
#pragma unroll
        for (int c = 0; c < 4; c++) unpack4(vf[c], vs + (size_t)gr * padded + 16 * c + 4 * t);
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) big[c >> 1] = fmaxf(big[c >> 1], sc[j][c] * vf[j >> 1][(j & 1) * 2 + (c & 1)]);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            big[h] = fmaxf(big[h], __shfl_xor_sync(~0u, big[h], 1));
            big[h] = fmaxf(big[h], __shfl_xor_sync(~0u, big[h], 2));
            bool any = big[h] >= ST_TINY;
            up[h] = any ? 32767.0f / big[h] : 0.0f;
            down[h] = any ? big[h] * (1.0f / 32767.0f) : 0.0f;
        }
        uint32_t lo[4][2], hi[4][2]; // [16 positions][row half]: a word is 4 positions
#pragma unroll
        for (int c16 = 0; c16 < 4; c16++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                uint32_t u[4];
#pragma unroll
                for (int i = 0; i < 4; i++) { // adding 1.5 * 2^23 rounds to the nearest integer, ties to even
                    float w = sc[2 * c16 + (i >> 1)][2 * h + (i & 1)] * vf[c16][i];
                    u[i] = __float_as_uint(w * up[h] + 12582912.0f);
                }
                uint32_t p = __byte_perm(u[0], u[1], 0x5410), r = __byte_perm(u[2], u[3], 0x5410);
                lo[c16][h] = __byte_perm(p, r, 0x6420);
                hi[c16][h] = __byte_perm(p, r, 0x7531);
            }
#pragma unroll
        for (int dc = 0; dc < 2; dc++) { // 32 value dimensions
            int slo[4][4] = {}, shi[4][4] = {};
#pragma unroll
            for (int s = 0; s < 2; s++) {
                const int8_t *at = v + (8 * s + t) * vst + (gr * 64 + dc * 32 + 4 * g) * 4;
                uint4 b0 = *(const uint4 *)at, b1 = *(const uint4 *)(at + 4 * vst);
                const uint32_t x0[4] = {b0.x, b0.y, b0.z, b0.w}, x1[4] = {b1.x, b1.y, b1.z, b1.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    mma_u8s8(slo[j], lo[2 * s][0], lo[2 * s][1], lo[2 * s + 1][0], lo[2 * s + 1][1], x0[j], x1[j]);
                    mma_u8s8(shi[j], hi[2 * s][0], hi[2 * s][1], hi[2 * s + 1][0], hi[2 * s + 1][1], x0[j], x1[j]);
                }
            }
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sink(gr * 64 + dc * 32 + 8 * t + 4 * (c & 1) + j, c >> 1,
                         down[c >> 1] * (float)(slo[j][c] + (shi[j][c] << 8)));
        }
    }
}

// Slot of a lane's value for a dimension (the inverse of the sink's order): compile-time once unrolled.
template <int D> __device__ static constexpr int slot(int dim, int t) { return dim / 32 * 8 + (dim % 32 - 8 * t); }

// Coefficients of folding `count` partial rows in order: the running maximum needs only the maxima, so every e(m - m')
// is made at once and only the fma chains are sequential.
__device__ static inline void fold_step(float &m, float bm, float *ea, float *eb) {
    float to = m > bm ? m : bm;
    *ea = exp_select(m - to);
    *eb = exp_select(bm - to);
    m = to;
}

// ---- one query: a CTA a span and K/V head, a warp a block, then the span is folded in order ------------------------
// q: [heads_kv][16][D] (rows past `rows` are zero), qs: [heads_kv][16][D/64]. part: [heads_kv][spans][rows][D + 2].
__device__ static inline void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

template <int D>
__global__ void __launch_bounds__(256)
    decode_kernel(const int8_t *q, const float *qs, Cache cache, int T, int rows, float scale, float *part) {
    extern __shared__ float blocks_out[]; // [8 blocks][rows][D], then m, l, ea, eb [8][16] each
    const int span = blockIdx.x, hk = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2;
    float *bm = blocks_out + 8 * rows * D, *bl = bm + 128, *ea = bl + 128, *eb = ea + 128;
    const int block = span * ST_SPAN + warp, first = block * 64, groups = D / 64;
    const int count = min(ST_SPAN, (T + 63) / 64 - span * ST_SPAN);
    if (warp < count) {
        const size_t head = (size_t)hk * cache.padded;
        for (int i = lane * 128; i < 64 * D;
             i += 32 * 128) { // the warp's whole block is under way before its first use
            prefetch(cache.k + (head + first) * D + i);
            prefetch(cache.v + (head + first) * D + i);
        }
        if (lane < groups) prefetch(cache.vs + (head * groups + lane * (size_t)cache.padded) + first);
        float scales[2][D / 64], m[2], l[2];
        for (int gr = 0; gr < groups; gr++)
            for (int h = 0; h < 2; h++) scales[h][gr] = qs[(hk * 16 + g + 8 * h) * groups + gr];
        const int n[2] = {min(64, T - first), min(64, T - first)};
        float *out = blocks_out + warp * rows * D;
        attend_block<D, true>(q + (size_t)hk * 16 * D, scales, cache.k + (head + first) * D, D,
                              cache.v + (head + first) * D, 4 * D, cache.ks + head * groups + first,
                              cache.vs + head * groups + first, cache.padded, n, scale, m, l,
                              [&](int dim, int h, float x) {
                                  if (g + 8 * h < rows) out[(g + 8 * h) * D + dim] = x;
                              });
        if ((lane & 3) == 0)
            for (int h = 0; h < 2; h++) bm[warp * 16 + g + 8 * h] = m[h], bl[warp * 16 + g + 8 * h] = l[h];
    }
    __syncthreads();
    float *to = part + (((size_t)hk * gridDim.x + span) * rows) * (D + 2);
    if (threadIdx.x < rows) {
        int r = threadIdx.x;
        float m = NEG_INF, l = 0.0f;
        for (int b = 0; b < count; b++) {
            fold_step(m, bm[b * 16 + r], &ea[b * 16 + r], &eb[b * 16 + r]);
            l = __fmaf_rn(l, ea[b * 16 + r], bl[b * 16 + r] * eb[b * 16 + r]);
        }
        to[r * (D + 2) + D] = m;
        to[r * (D + 2) + D + 1] = l;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < rows * D; i += 256) {
        int r = i / D;
        float acc = 0.0f;
        for (int b = 0; b < count; b++)
            acc = __fmaf_rn(acc, ea[b * 16 + r], blocks_out[b * rows * D + i] * eb[b * 16 + r]);
        to[r * (D + 2) + i % D] = acc;
    }
}

// Folds the spans in order. Grid (rows, heads_kv), D threads.
template <int D> __global__ void fold_kernel(const float *part, int spans, int rows, float *o) {
    extern __shared__ float co[]; // m, l, ea, eb of every span
    const int r = blockIdx.x, hk = blockIdx.y;
    float *sm = co, *sl = co + spans, *ea = sl + spans, *eb = ea + spans;
    __shared__ float inv;
    const float *p = part + ((size_t)hk * spans * rows + r) * (D + 2);
    const size_t step = (size_t)rows * (D + 2);
    for (int s = threadIdx.x; s < spans; s += D) sm[s] = p[s * step + D], sl[s] = p[s * step + D + 1];
    __syncthreads();
    for (int s = threadIdx.x; s < spans; s += D) {
        float before = NEG_INF; // the running maximum before span s: a maximum has no order
        for (int i = 0; i < s; i++) before = fmaxf(before, sm[i]);
        fold_step(before, sm[s], &ea[s], &eb[s]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        float l = 0.0f;
        for (int s = 0; s < spans; s++) l = __fmaf_rn(l, ea[s], sl[s] * eb[s]);
        inv = 1.0f / l;
    }
    float acc = 0.0f;
#pragma unroll 16
    for (int s = 0; s < spans; s++) acc = __fmaf_rn(acc, ea[s], p[s * step + threadIdx.x] * eb[s]);
    __syncthreads();
    o[((size_t)hk * rows + r) * D + threadIdx.x] = acc * inv;
}

// ---- a prompt: a CTA of WARPS x 16 query rows walks the blocks; keys and values in shared memory ---------------------
// Rows are padded so that the 16-byte reads of a quarter warp meet different banks.
template <int D> struct SharedBlock {
    static constexpr int KST = D + (D % 128 ? 0 : 64), VST = 4 * D + 32;
    int8_t k[64 * KST], v[16 * VST];
    __half ks[D], vs[D];
};

// q: [heads_kv][R][D], qs: [heads_kv][R][D/64], limit[R]: positions that a row sees. R a multiple of 16 WARPS.
template <int D, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, D <= 128 ? 2 : 1)
    prompt_attention_kernel(const int8_t *__restrict__ q, const float *__restrict__ qs, Cache cache,
                            const int *__restrict__ limit, int R, float scale, float *__restrict__ o) {
    constexpr int NV = D / 4, G = D / 64;
    using Page = SharedBlock<D>;
    extern __shared__ __align__(16) uint8_t raw[];
    Page *page = (Page *)raw;
    int8_t *qb = (int8_t *)(page + 2);
    float *all = (float *)(qb + WARPS * 16 * D); // running totals of the rows, [WARPS][2 NV][32 lanes]
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, hk = blockIdx.y;
    const int row0 = (gridDim.x - 1 - blockIdx.x) * WARPS * 16; // the longest rows first
    const size_t head = (size_t)hk * cache.padded, rows = (size_t)hk * R + row0;
    for (int i = threadIdx.x; i < WARPS * 16 * D / 16; i += WARPS * 32) cp_async16(qb + i * 16, q + rows * D + i * 16);
    float scales[2][G];
    int lim[2], last = 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        lim[h] = limit[row0 + warp * 16 + g + 8 * h];
#pragma unroll
        for (int gr = 0; gr < G; gr++) scales[h][gr] = qs[(rows + warp * 16 + g + 8 * h) * G + gr];
    }
    for (int i = 0; i < WARPS * 16; i++) last = max(last, limit[row0 + i]);
    float acc[2][NV], m[2] = {NEG_INF, NEG_INF}, l[2] = {0, 0}, tm[2] = {NEG_INF, NEG_INF}, tl[2] = {0, 0};
    float *mine = all + warp * 2 * NV * 32 + lane;
#pragma unroll
    for (int i = 0; i < NV; i++) acc[0][i] = acc[1][i] = 0.0f, mine[i * 64] = mine[i * 64 + 32] = 0.0f;
    const int blocks = (last + 63) / 64;
    auto fetch = [&](int b) {
        Page &to = page[b & 1];
        const int8_t *kg = cache.k + (head + b * 64) * D, *vg = cache.v + (head + b * 64) * D;
        for (int i = threadIdx.x; i < 64 * D / 16; i += WARPS * 32) {
            cp_async16(to.k + i / (D / 16) * Page::KST + i % (D / 16) * 16, kg + i * 16);
            cp_async16(to.v + i / (D / 4) * Page::VST + i % (D / 4) * 16, vg + i * 16);
        }
        for (int i = threadIdx.x; i < G * 8; i += WARPS * 32) {
            size_t at = head * G + (size_t)(i / 8) * cache.padded + b * 64 + i % 8 * 8;
            cp_async16(to.ks + i * 8, cache.ks + at);
            cp_async16(to.vs + i * 8, cache.vs + at);
        }
    };
    fetch(0);
    cp_async_commit();
    for (int b = 0; b < blocks; b++) {
        if (b + 1 < blocks) fetch(b + 1);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        const Page &at = page[b & 1];
        const int n[2] = {min(64, lim[0] - b * 64), min(64, lim[1] - b * 64)};
        if (__any_sync(~0u, n[0] > 0 || n[1] > 0)) {
            float bm[2], bl[2], ea[2], eb[2];
            bool ready = false;
            attend_block<D, false>(qb + warp * 16 * D, scales, at.k, Page::KST, at.v, Page::VST, at.ks, at.vs, 64, n,
                                   scale, bm, bl, [&](int dim, int h, float x) {
                                       if (!ready) { // the first value: the block's maxima are known, fold the scalars
#pragma unroll
                                           for (int i = 0; i < 2; i++) {
                                               ea[i] = 1.0f,
                                               eb[i] = 0.0f; // a row that sees nothing of this block stays as it is
                                               if (n[i] > 0)
                                                   fold_step(m[i], bm[i], &ea[i], &eb[i]),
                                                       l[i] = __fmaf_rn(l[i], ea[i], bl[i] * eb[i]);
                                           }
                                           ready = true;
                                       }
                                       float &a = acc[h][slot<D>(dim, t)];
                                       a = __fmaf_rn(a, ea[h], x * eb[h]);
                                   });
        }
        __syncthreads(); // everybody has read the page that the next fetch overwrites
        if (b % ST_SPAN == ST_SPAN - 1 || b == blocks - 1) {
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (m[h] == NEG_INF) continue; // nothing of this span was seen
                float ea, eb;
                fold_step(tm[h], m[h], &ea, &eb);
                tl[h] = __fmaf_rn(tl[h], ea, l[h] * eb);
#pragma unroll
                for (int i = 0; i < NV; i++) {
                    float &x = mine[i * 64 + h * 32];
                    x = __fmaf_rn(x, ea, acc[h][i] * eb);
                    acc[h][i] = 0.0f;
                }
                m[h] = NEG_INF, l[h] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float inv = 1.0f / tl[h];
        float *out = o + (rows + warp * 16 + g + 8 * h) * D;
#pragma unroll
        for (int i = 0; i < NV; i++) out[i / 8 * 32 + 8 * t + i % 8] = mine[i * 64 + h * 32] * inv;
    }
}

// ---- host side -------------------------------------------------------------------------------------------------------
struct HostCache {
    int D, heads, padded;
    std::vector<int8_t> k, v;     // v as the device wants it
    std::vector<int8_t> v_rows;   // [head][position][D], for the specification
    std::vector<uint16_t> ks, vs; // [head][D / 64][position]
};

inline HostCache random_cache(int D, int heads, int T) {
    HostCache c{D, heads, (T + 63) / 64 * 64, {}, {}, {}, {}, {}};
    const int G = D / 64, P = c.padded;
    c.k.resize((size_t)heads * P * D), c.v.resize(c.k.size()), c.v_rows.resize(c.k.size());
    c.ks.resize((size_t)heads * P * G), c.vs.resize(c.ks.size());
    parallel_for((size_t)heads * P, 16, [&](size_t r) {
        size_t h = r / P, p = r % P;
        for (int gr = 0; gr < G; gr++) {
            float k[64], v[64];
            for (int i = 0; i < 64; i++) {
                k[i] = normal(61, (r * G + gr) * 64 + i) * (p % 97 == 3 ? 40.0f : 1.0f);
                v[i] = normal(62, (r * G + gr) * 64 + i) * (p % 131 == 7   ? 0.0f
                                                            : p % 61 == 5  ? 1e-5f
                                                            : p % 201 == 9 ? 1e6f
                                                                           : 1.0f);
            }
            size_t s = (h * G + gr) * P + p, row = r * D + gr * 64;
            c.ks[s] = st_quantize_kv(k, 64, &c.k[row]);
            c.vs[s] = st_quantize_kv(v, 64, &c.v_rows[row]);
            for (int i = 0; i < 64; i++) c.v[(h * P + p / 4 * 4) * D + (gr * 64 + i) * 4 + p % 4] = c.v_rows[row + i];
        }
    });
    return c;
}

// The specification: one query row against the first n positions of a head.
inline void attend_reference(const HostCache &c, int head, const int8_t *q, const float *qs, int n, float scale,
                             float *o) {
    const int D = c.D, G = D / 64;
    st_soft all = {NEG_INF, 0.0f}, span = {NEG_INF, 0.0f};
    std::vector<float> acc(D, 0.0f), sacc(D, 0.0f), row(D);
    const int blocks = (n + 63) / 64;
    for (int b = 0; b < blocks; b++) {
        int cnt = std::min(64, n - b * 64);
        float score[64], vs[64], den = 0, m = 0;
        for (int i = 0; i < cnt; i++) {
            size_t p = (size_t)head * c.padded + b * 64 + i;
            float s = 0.0f;
            for (int gr = 0; gr < G; gr++) {
                int isum = 0;
                for (int e = 0; e < 64; e++) isum += (int)q[gr * 64 + e] * c.k[p * D + gr * 64 + e];
                s = score_step(s, qs[gr], st_h2f(c.ks[((size_t)head * G + gr) * c.padded + b * 64 + i]), isum);
            }
            score[i] = s * scale;
        }
        for (int gr = 0; gr < G; gr++) {
            for (int i = 0; i < cnt; i++) vs[i] = st_h2f(c.vs[((size_t)head * G + gr) * c.padded + b * 64 + i]);
            m = st_attn_block(score, cnt, &c.v_rows[((size_t)head * c.padded + b * 64) * D + gr * 64], D, vs, 64,
                              &row[gr * 64], &den);
        }
        st_fold(&span, sacc.data(), m, den, row.data(), D);
        if (b % ST_SPAN == ST_SPAN - 1 || b == blocks - 1) {
            st_fold(&all, acc.data(), span.m, span.l, sacc.data(), D);
            span = {NEG_INF, 0.0f};
            std::fill(sacc.begin(), sacc.end(), 0.0f);
        }
    }
    float inv = 1.0f / all.l;
    for (int i = 0; i < D; i++) o[i] = acc[i] * inv;
}

inline void random_queries(int D, size_t rows, std::vector<int8_t> *q, std::vector<float> *qs) {
    q->resize(rows * D), qs->resize(rows * D / 64);
    parallel_for(rows * D / 64, 64, [&](size_t gr) {
        float x[64];
        for (int i = 0; i < 64; i++) x[i] = normal(63, gr * 64 + i) * 3.0f;
        (*qs)[gr] = st_h2f(st_quantize_kv(x, 64, &(*q)[gr * 64]));
    });
}

template <int D> void check_decode(const Limits &lim, int heads_kv, int rows, int T) {
    HostCache c = random_cache(D, heads_kv, T);
    std::vector<int8_t> q;
    std::vector<float> qs, ref((size_t)heads_kv * rows * D);
    random_queries(D, heads_kv * 16, &q, &qs);
    const float scale = 1.0f / sqrtf((float)D);
    parallel_for(heads_kv * rows, 1, [&](size_t i) {
        size_t hk = i / rows, r = hk * 16 + i % rows;
        attend_reference(c, (int)hk, &q[r * D], &qs[r * D / 64], T, scale, &ref[i * D]);
    });
    const size_t kb = c.k.size(), sb = c.ks.size();
    const int layers = (int)std::min<size_t>(256, 200000000 / (2 * kb) + 1),
              spans = (T + 511) / 512; // stream past the cache
    Device<int8_t> dk(kb * layers), dv(kb * layers), dq(q);
    Device<uint16_t> dks(sb * layers), dvs(sb * layers);
    for (int i = 0; i < layers; i++) {
        CHECK(cudaMemcpy(dk.p + i * kb, c.k.data(), kb, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(dv.p + i * kb, c.v.data(), kb, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(dks.p + i * sb, c.ks.data(), sb * 2, cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(dvs.p + i * sb, c.vs.data(), sb * 2, cudaMemcpyHostToDevice));
    }
    Device<float> dqs(qs), part((size_t)heads_kv * spans * rows * (D + 2)), o(ref.size());
    const int smem = (8 * rows * D + 512) * 4;
    CHECK(cudaFuncSetAttribute(decode_kernel<D>, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    double us = time_us(std::max(layers, 8), [&](int i, cudaStream_t s) {
        i %= layers;
        Cache cache{dk.p + i * kb, dv.p + i * kb, (__half *)(dks.p + i * sb), (__half *)(dvs.p + i * sb), c.padded};
        decode_kernel<D><<<dim3(spans, heads_kv), 256, smem, s>>>(dq.p, dqs.p, cache, T, rows, scale, part.p);
        fold_kernel<D><<<dim3(rows, heads_kv), D, spans * 16, s>>>(part.p, spans, rows, o.p);
    });
    double bytes = 2.0 * heads_kv * T * (D + D / 32.0);
    report(text("attention, 1 query, %dx%d heads of %d, %d positions", heads_kv, rows, D, T), differing(o.host(), ref),
           ref.size(), us, std::max(bytes / lim.read_gbs / 1e3, 2 * lim.launch_us), "read bandwidth or 2 launches");
}

template <int D, int WARPS>
void check_prompt_attention(const Limits &lim, int heads_kv, int group, int queries, int past) {
    const int T = past + queries, R = queries * group;
    HostCache c = random_cache(D, heads_kv, T);
    std::vector<int8_t> q;
    std::vector<float> qs, ref((size_t)heads_kv * R * D);
    random_queries(D, (size_t)heads_kv * R, &q, &qs);
    std::vector<int> limit(R);
    double scores = 0;
    for (int r = 0; r < R; r++) limit[r] = past + r / group + 1, scores += (double)limit[r] * heads_kv;
    const float scale = 1.0f / sqrtf((float)D);
    parallel_for((size_t)heads_kv * R, 4, [&](size_t i) {
        attend_reference(c, (int)(i / R), &q[i * D], &qs[i * D / 64], limit[i % R], scale, &ref[i * D]);
    });
    Device<int8_t> dk(c.k), dv(c.v), dq(q);
    Device<uint16_t> dks(c.ks), dvs(c.vs);
    Device<float> dqs(qs), o(ref.size());
    Device<int> dl(limit);
    Cache cache{dk.p, dv.p, (__half *)dks.p, (__half *)dvs.p, c.padded};
    const int smem = 2 * (int)sizeof(SharedBlock<D>) + WARPS * 16 * D * 5;
    auto kernel = prompt_attention_kernel<D, WARPS>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    double us = time_us(10, [&](int, cudaStream_t s) {
        kernel<<<dim3(R / (WARPS * 16), heads_kv), WARPS * 32, smem, s>>>(dq.p, dqs.p, cache, dl.p, R, scale, o.p);
    });
    double ops = scores * D * 2 * 3; // Q K once, P V twice
    report(text("attention, %d queries after %d, %dx%d heads of %d", queries, past, heads_kv, group, D),
           differing(o.host(), ref), ref.size(), us, ops / lim.int8_tops / 1e6, "int8 mma peak");
    std::printf("    %.1f float-unit slots a score (%.0f TOP/s counted as Q K + P V once)\n",
                lim.fp32_tops * us * 1e6 / scores, scores * D * 4 / us / 1e6);
}

inline void attention(const Limits &lim) {
    for (int T : {1, 63, 64, 65, 511, 512, 513, 4096, 32768}) check_decode<128>(lim, 2, 8, T);
    for (int T : {1, 1000, 32768}) check_decode<64>(lim, 4, 3, T);
    for (int T : {1, 1000, 32768}) check_decode<256>(lim, 2, 12, T);
    check_prompt_attention<128, 4>(lim, 4, 8, 64, 0);
    check_prompt_attention<128, 4>(lim, 4, 8, 512, 0);
    check_prompt_attention<128, 4>(lim, 4, 8, 512, 3584);
    check_prompt_attention<64, 4>(lim, 4, 4, 512, 1000);
    check_prompt_attention<256, 4>(lim, 2, 8, 512, 1000);
}
#endif

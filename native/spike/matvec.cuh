// Rule 3 for one row of activations: Q8_0, Q4_0 (32-blocks) and Q4_K, Q6_K (super-blocks) times int8.
//
// Layout: 32 weight rows are interleaved in pieces of 16 bytes, [rows / 32][piece of the row][32 rows][16 B], so lane =
// row: every load is one coalesced 512 bytes, a sum stays in its lane and no shuffle is needed whatever K is. A warp
// takes one segment of 32 rows; the first warp of a row group adds the segments in order.
#ifndef SPIKE_MATVEC_CUH
#define SPIKE_MATVEC_CUH
#include "common.cuh"

enum Format { Q8_0, Q4_0, Q4_K, Q6_K };
struct FormatInfo {
    const char *name;
    int values, bytes; // of a block in the file
    int pieces;        // 16-byte pieces of a block in the interleaved form
    bool scale_apart;  // the f16 d lies in an array of its own [rows / 32][block][32 rows]
};
static const FormatInfo FORMAT[] = {
    {"Q8_0", 32, 34, 2, true}, {"Q4_0", 32, 18, 1, true}, {"Q4_K", 256, 144, 9, false}, {"Q6_K", 256, 210, 13, true}};

// ---- the scalar specification of the super-block rows --------------------------------------------------------------
// One activation scale spans 256 values (st_quantize_block with n = 256).

ST_HD void q4_k_group(const uint8_t *scales, int g, int *sc, int *mn) {
    if (g < 4) {
        *sc = scales[g] & 63;
        *mn = scales[g + 4] & 63;
    } else {
        *sc = (scales[g + 4] & 15) | (scales[g - 4] >> 6) << 4;
        *mn = scales[g + 4] >> 4 | (scales[g] >> 6) << 4;
    }
}

inline float row_q4_k(const uint8_t *w, const int8_t *xq, const float *xd, int k) {
    float total = 0.0f;
    for (int b = 0; b < k / 256; b++, w += 144, xq += 256) {
        int32_t isum = 0, msum = 0;
        for (int g = 0; g < 8; g++) {
            int sc, mn;
            q4_k_group(w + 4, g, &sc, &mn);
            int32_t dot = 0, bsum = 0;
            for (int l = 0; l < 32; l++) {
                dot += ((w[16 + 32 * (g / 2) + l] >> (4 * (g & 1))) & 15) * xq[g * 32 + l];
                bsum += xq[g * 32 + l];
            }
            isum += sc * dot;
            msum += mn * bsum;
        }
        float d = st_h2f((uint16_t)(w[0] | w[1] << 8)), dmin = st_h2f((uint16_t)(w[2] | w[3] << 8));
        float acc = ST_FMA(d * xd[b], (float)isum, 0.0f);
        acc = ST_FMA(-(dmin * xd[b]), (float)msum, acc);
        total += acc;
    }
    return total;
}

inline float row_q6_k(const uint8_t *w, const int8_t *xq, const float *xd, int k) {
    float total = 0.0f;
    for (int b = 0; b < k / 256; b++, w += 210, xq += 256) {
        int32_t isum = 0;
        for (int i = 0; i < 256; i++) {
            int n = i / 128, j = i % 128 / 32, l = i % 32;
            int q = ((w[64 * n + 32 * (j & 1) + l] >> (4 * (j >> 1))) & 15) | ((w[128 + 32 * n + l] >> (2 * j)) & 3)
                                                                                  << 4;
            isum += (int8_t)w[192 + 8 * n + 2 * j + l / 16] * (q - 32) * xq[i];
        }
        total += ST_FMA(st_h2f((uint16_t)(w[208] | w[209] << 8)) * xd[b], (float)isum, 0.0f);
    }
    return total;
}

inline float row_reference(Format f, const uint8_t *w, const int8_t *xq, const float *xd, int k) {
    switch (f) {
    case Q8_0: return st_row_q8_0(w, xq, xd, k);
    case Q4_0: return st_row_q4_0(w, xq, xd, k);
    case Q4_K: return row_q4_k(w, xq, xd, k);
    default: return row_q6_k(w, xq, xd, k);
    }
}

// ---- kernels ---------------------------------------------------------------------------------------------------------
__device__ static inline int dot16(uint4 w, int4 x, int s) {
    s = __dp4a((int)w.x, x.x, s);
    s = __dp4a((int)w.y, x.y, s);
    s = __dp4a((int)w.z, x.z, s);
    return __dp4a((int)w.w, x.w, s);
}
__device__ static inline uint4 nibbles(uint4 w, int shift) {
    return {(w.x >> shift) & 0x0f0f0f0fu, (w.y >> shift) & 0x0f0f0f0fu, (w.z >> shift) & 0x0f0f0f0fu,
            (w.w >> shift) & 0x0f0f0f0fu};
}

// Activations: codes, one scale per block of the format, sums of the codes per 16 and per 32 values.
struct Activations {
    const int4 *q;
    const float *d;
    const int *sum16, *sum32;
};

// Sum of the blocks [b, b + n) of one segment (FULL: all 256 values, every load in flight at once); w and ws point at
// this lane's row and block b.
template <Format F> struct Segment;

template <> struct Segment<Q8_0> {
    template <bool FULL>
    static __device__ float sum(const uint4 *w, const __half *ws, const Activations &x, int b, int n) {
        st_rowsum r;
        st_rowsum_start(&r);
        uint4 p[16];
        float d[8];
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (FULL || i < n)
                p[2 * i] = __ldcs(w + i * 64), p[2 * i + 1] = __ldcs(w + i * 64 + 32), d[i] = __half2float(ws[i * 32]);
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (FULL || i < n)
                st_rowsum_block(&r, d[i], x.d[b + i],
                                dot16(p[2 * i + 1], x.q[2 * (b + i) + 1], dot16(p[2 * i], x.q[2 * (b + i)], 0)));
        return st_rowsum_end(&r);
    }
};
template <> struct Segment<Q4_0> {
    template <bool FULL>
    static __device__ float sum(const uint4 *w, const __half *ws, const Activations &x, int b, int n) {
        st_rowsum r;
        st_rowsum_start(&r);
#pragma unroll
        for (int h = 0; h < 8; h += 4) { // four loads in flight: more cost registers, and so warps
            uint4 p[4];
            float d[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (FULL || h + i < n) p[i] = __ldcs(w + (h + i) * 32), d[i] = __half2float(ws[(h + i) * 32]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (FULL || h + i < n) {
                    int at = b + h + i, is = -8 * x.sum32[at];
                    is = dot16(nibbles(p[i], 0), x.q[2 * at], is);
                    st_rowsum_block(&r, d[i], x.d[at], dot16(nibbles(p[i], 4), x.q[2 * at + 1], is));
                }
        }
        return st_rowsum_end(&r);
    }
};
template <> struct Segment<Q4_K> {
    template <bool FULL> static __device__ float sum(const uint4 *w, const __half *, const Activations &x, int b, int) {
        uint4 head = __ldcs(w), p[8];
#pragma unroll
        for (int i = 0; i < 8; i++) p[i] = __ldcs(w + (1 + i) * 32);
        int isum = 0, msum = 0;
        // Scales and minima of groups 0..3 and 4..7, one a byte.
        uint32_t sc[2] = {head.y & 0x3f3f3f3fu, (head.w & 0x0f0f0f0fu) | ((head.y >> 2) & 0x30303030u)};
        uint32_t mn[2] = {head.z & 0x3f3f3f3fu, ((head.w >> 4) & 0x0f0f0f0fu) | ((head.z >> 2) & 0x30303030u)};
#pragma unroll
        for (int g = 0; g < 8; g += 2) {
            uint4 p0 = p[g], p1 = p[g + 1];
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const int4 *q = x.q + 16 * b + 2 * (g + h);
                int dot = dot16(nibbles(p1, 4 * h), q[1], dot16(nibbles(p0, 4 * h), q[0], 0));
                int bsum = x.sum32[8 * b + g + h];
                isum += (int)((sc[(g + h) / 4] >> (8 * ((g + h) % 4))) & 255) * dot;
                msum += (int)((mn[(g + h) / 4] >> (8 * ((g + h) % 4))) & 255) * bsum;
            }
        }
        float d = __half2float(__ushort_as_half(head.x & 0xffff)), dmin = __half2float(__ushort_as_half(head.x >> 16));
        float acc = __fmaf_rn(d * x.d[b], (float)isum, 0.0f);
        return 0.0f + __fmaf_rn(-(dmin * x.d[b]), (float)msum, acc);
    }
};
template <> struct Segment<Q6_K> {
    static __device__ uint4 join(uint4 lo, uint4 hi, int ls, int hs) {
        uint4 r = nibbles(lo, ls);
        r.x |= ((hi.x >> hs) & 0x03030303u) << 4;
        r.y |= ((hi.y >> hs) & 0x03030303u) << 4;
        r.z |= ((hi.z >> hs) & 0x03030303u) << 4;
        r.w |= ((hi.w >> hs) & 0x03030303u) << 4;
        return r;
    }
    template <bool FULL>
    static __device__ float sum(const uint4 *w, const __half *ws, const Activations &x, int b, int) {
        uint4 s4 = __ldcs(w + 12 * 32);
        const uint32_t sc[4] = {s4.x, s4.y, s4.z, s4.w};
        uint4 p[12];
        float d = __half2float(*ws);
#pragma unroll
        for (int i = 0; i < 12; i++) p[i] = __ldcs(w + i * 32);
        int isum = 0;
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int h = 0; h < 2; h++) { // 16 values: l = 16 h ..
                    int at = 8 * n + 2 * j + h;
                    uint4 q = join(p[4 * n + 2 * (j & 1) + h], p[8 + 2 * n + h], 4 * (j >> 1), 2 * j);
                    int dot = dot16(q, x.q[16 * b + at], -32 * x.sum16[16 * b + at]);
                    isum += (int)(int8_t)(sc[at / 4] >> (8 * (at % 4))) * dot;
                }
        }
        return 0.0f + __fmaf_rn(d * x.d[b], (float)isum, 0.0f);
    }
};

// blockDim = 32 * warps a group * groups a block. nseg segments of `per` blocks (the last may be short).
template <Format F>
__global__ void __launch_bounds__(512)
    matvec_kernel(const uint4 *__restrict__ w, const __half *__restrict__ ws, Activations x, float *__restrict__ y,
                  int groups, int blocks, int per, int nseg, int warps) {
    extern __shared__ float part[];
    constexpr int P = F == Q8_0 ? 2 : F == Q4_0 ? 1 : F == Q4_K ? 9 : 13;
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, sub = warp / warps;
    int group = blockIdx.x * (blockDim.x / 32 / warps) + sub;
    float *mine = part + sub * nseg * 32;
    if (group < groups)
        for (int s = warp % warps; s < nseg; s += warps) {
            size_t at = (size_t)group * blocks + s * per;
            const uint4 *rows = w + at * P * 32 + lane;
            const __half *scales = ws + at * 32 + lane;
            int n = min(per, blocks - s * per);
            mine[s * 32 + lane] = n == per ? Segment<F>::template sum<true>(rows, scales, x, s * per, n)
                                           : Segment<F>::template sum<false>(rows, scales, x, s * per, n);
        }
    __syncthreads();
    if (group < groups && warp % warps == 0) {
        float total = 0.0f;
        for (int s = 0; s < nseg; s++) total += mine[s * 32 + lane];
        y[group * 32 + lane] = total;
    }
}

// ---- host side -------------------------------------------------------------------------------------------------------
// Rows in the file's form with random codes and scales; the first rows hold the odd scales (0, -0, subnormal, largest).
inline std::vector<uint8_t> random_rows(Format f, size_t rows, int k) {
    const FormatInfo &fi = FORMAT[f];
    const size_t row_bytes = (size_t)k / fi.values * fi.bytes;
    std::vector<uint8_t> w(rows * row_bytes);
    const uint16_t odd[] = {0x0000, 0x8000, 0x0001, 0x83ff, 0x7bff, 0xfbff, 0x0400, 0x3c00};
    parallel_for(rows, 64, [&](size_t r) {
        uint8_t *p = &w[r * row_bytes];
        for (size_t i = 0; i < row_bytes; i += 2) {
            uint32_t h = hash32(11 + f, r * row_bytes + i);
            p[i] = (uint8_t)h;
            p[i + 1] = (uint8_t)(h >> 8);
        }
        for (int b = 0; b < k / fi.values; b++) {
            uint16_t d = st_f2h(uniform(21, r * 4096 + b) * 0.02f), m = st_f2h(uniform(22, r * 4096 + b) * 0.02f);
            if (r < 8) d = odd[(r + b) % 8], m = odd[(r + 3 * b) % 8];
            uint8_t *block = p + (size_t)b * fi.bytes;
            memcpy(block + (f == Q6_K ? 208 : 0), &d, 2);
            if (f == Q4_K) memcpy(block + 2, &m, 2);
        }
    });
    return w;
}

// The interleaved form: 16-byte pieces and, where they lie apart, the scales.
inline void interleave(Format f, const std::vector<uint8_t> &file, size_t rows, int k, std::vector<uint8_t> *w,
                       std::vector<uint16_t> *scales) {
    const FormatInfo &fi = FORMAT[f];
    const size_t blocks = k / fi.values;
    const int skip = f == Q8_0 || f == Q4_0 ? 2 : 0; // the block begins with d
    w->resize(rows * blocks * fi.pieces * 16);
    scales->assign(fi.scale_apart ? rows * blocks : 32, 0);
    parallel_for(rows, 64, [&](size_t r) {
        for (size_t b = 0; b < blocks; b++) {
            const uint8_t *src = &file[(r * blocks + b) * fi.bytes];
            for (int p = 0; p < fi.pieces; p++)
                memcpy(&(*w)[((((r / 32) * blocks + b) * fi.pieces + p) * 32 + r % 32) * 16], src + skip + p * 16, 16);
            if (fi.scale_apart)
                memcpy(&(*scales)[((r / 32) * blocks + b) * 32 + r % 32], src + (f == Q6_K ? 208 : 0), 2);
        }
    });
}

template <Format F> void check_matvec(const Limits &lim, size_t rows, int k) {
    const FormatInfo &fi = FORMAT[F];
    const int blocks = k / fi.values, per = std::max(1, 256 / fi.values), nseg = (blocks + per - 1) / per;
    const int xblocks = k / fi.values;
    std::vector<int8_t> xq(k);
    std::vector<float> xd(xblocks);
    std::vector<int> sum16(k / 16, 0), sum32(k / 32, 0);
    for (int b = 0; b < xblocks; b++) {
        std::vector<float> x(fi.values);
        for (int i = 0; i < fi.values; i++)
            x[i] = b % 16 == 3 ? 0.0f : normal(31, b * 256 + i) * (b % 16 == 5 ? 1e-28f : 1.0f);
        int32_t s;
        xd[b] = st_quantize_block(x.data(), fi.values, &xq[b * fi.values], &s);
    }
    for (int i = 0; i < k; i++) sum16[i / 16] += xq[i], sum32[i / 32] += xq[i];
    std::vector<uint8_t> file = random_rows(F, rows, k), inter;
    std::vector<uint16_t> scales;
    interleave(F, file, rows, k, &inter, &scales);
    std::vector<float> ref(rows);
    const size_t row_bytes = (size_t)blocks * fi.bytes;
    parallel_for(rows, 64, [&](size_t r) { ref[r] = row_reference(F, &file[r * row_bytes], xq.data(), xd.data(), k); });

    // Enough copies that a graph of launches streams from memory, not from the second-level cache.
    const int copies = (int)std::min<size_t>(64, std::max<size_t>(1, (size_t)300000000 / file.size() + 1));
    Device<uint8_t> w(inter.size() * copies);
    Device<uint16_t> ws(scales.size() * copies);
    for (int c = 0; c < copies; c++) {
        CHECK(cudaMemcpy(w.p + c * inter.size(), inter.data(), inter.size(), cudaMemcpyHostToDevice));
        CHECK(cudaMemcpy(ws.p + c * scales.size(), scales.data(), scales.size() * 2, cudaMemcpyHostToDevice));
    }
    Device<int8_t> q(xq);
    Device<float> d(xd), y(rows);
    Device<int> s16(sum16), s32(sum32);
    const int groups = (int)(rows / 32), warps = std::min(nseg, 16), each = std::max(1, 4 / warps);
    Activations x{(const int4 *)q.p, d.p, s16.p, s32.p};
    auto launch = [&](int i, cudaStream_t s) {
        matvec_kernel<F><<<(groups + each - 1) / each, 32 * warps * each, (size_t)each * nseg * 32 * 4, s>>>(
            (const uint4 *)(w.p + (i % copies) * inter.size()), (const __half *)(ws.p + (i % copies) * scales.size()),
            x, y.p, groups, blocks, per, nseg, warps);
    };
    double us = time_us(std::max(copies, 4), launch);
    report(text("%s, %zu rows of %d", fi.name, rows, k), differing(y.host(), ref), rows, us,
           rows * row_bytes / lim.read_gbs / 1e3, "read bandwidth");
}

inline void matvec(const Limits &lim) {
    for (size_t rows : {4096, 151936})
        for (int k : {64, 384, 576, 640, 2048, 4096}) {
            check_matvec<Q8_0>(lim, rows, k);
            check_matvec<Q4_0>(lim, rows, k);
        }
    for (size_t rows : {4096, 151936})
        for (int k : {256, 2048, 4096}) {
            check_matvec<Q4_K>(lim, rows, k);
            check_matvec<Q6_K>(lim, rows, k);
        }
}
#endif

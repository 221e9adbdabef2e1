// Rule 7: the gated delta net on a GPU. Four lanes share a column of the state, each holding the 32 keys of one segment
// in registers; a token costs two chains of 32 fma, two ordered sums of four by shuffle and one barrier.
#ifndef SPIKE_RECURRENT_CUH
#define SPIKE_RECURRENT_CUH
#include "common.cuh"

// In order from 0, over the DK / 32 lanes that share a column.
template <int SEGS> __device__ static inline float ordered_sum(float a, int lane) {
    float total = 0.0f;
#pragma unroll
    for (int s = 0; s < SEGS; s++) total += __shfl_sync(~0u, a, (lane & ~(SEGS - 1)) + s);
    return total;
}

// Grid (heads, DV / COLS); COLS * DK / 32 / NC threads, NC neighbouring columns each. q, k: [T][heads][DK]; v, o: [T][heads][DV]; gate: [T][heads]{decay, beta}.
template <int DK, int DV, int COLS, int NC>
__global__ void __launch_bounds__(COLS * DK / 32 / NC)
delta_kernel(float *S, const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ v,
             const float2 *__restrict__ gate, float *__restrict__ o, int heads, int T) {
    constexpr int SEGS = DK / 32, THREADS = COLS * SEGS / NC, PAD = 36; // 36: the segments' 16-byte reads meet other banks
    constexpr int LOADS = (2 * DK + COLS + THREADS - 1) / THREADS;
    __shared__ __align__(16) float kq[2][2][SEGS * PAD];
    __shared__ float vs[2][COLS];
    __shared__ float2 gs[2];
    const int head = blockIdx.x, tid = threadIdx.x, lane = tid & 31, seg = tid % SEGS, col = tid / SEGS;
    const int j = blockIdx.y * COLS + col * NC;
    float *mine = S + ((size_t)head * DK + seg * 32) * DV + j;
    float st[32][NC];
#pragma unroll
    for (int i = 0; i < 32; i++)
#pragma unroll
        for (int n = 0; n < NC; n++) st[i][n] = mine[(size_t)i * DV + n];

    float next[LOADS];
    float2 next_gate;
    auto fetch = [&](int t) {
        size_t row = (size_t)t * heads + head;
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int e = tid + l * THREADS;
            if (e < DK) next[l] = k[row * DK + e];
            else if (e < 2 * DK) next[l] = q[row * DK + e - DK];
            else if (e < 2 * DK + COLS) next[l] = v[row * DV + blockIdx.y * COLS + e - 2 * DK];
        }
        if (tid == 0) next_gate = gate[row];
    };
    fetch(0);
    for (int t = 0; t < T; t++) {
        const int buf = t & 1;
#pragma unroll
        for (int l = 0; l < LOADS; l++) {
            int e = tid + l * THREADS;
            if (e < 2 * DK) kq[buf][e / DK][e % DK / 32 * PAD + e % 32] = next[l];
            else if (e < 2 * DK + COLS) vs[buf][e - 2 * DK] = next[l];
        }
        if (tid == 0) gs[buf] = next_gate;
        __syncthreads();
        if (t + 1 < T) fetch(t + 1);
        const float4 *kk = (const float4 *)&kq[buf][0][seg * PAD], *qq = (const float4 *)&kq[buf][1][seg * PAD];
        const float2 g = gs[buf];
        float a[NC] = {}, d[NC];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 x = kk[i];
            const float ka[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int n = 0; n < NC; n++) a[n] = __fmaf_rn(ka[c], st[4 * i + c][n], a[n]);
        }
#pragma unroll
        for (int n = 0; n < NC; n++) {
            d[n] = g.y * (vs[buf][col * NC + n] - ordered_sum<SEGS>(a[n], lane) * g.x);
            a[n] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float4 x = kk[i], y = qq[i];
            const float ka[4] = {x.x, x.y, x.z, x.w}, qa[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int c = 0; c < 4; c++)
#pragma unroll
                for (int n = 0; n < NC; n++) {
                    float &cell = st[4 * i + c][n];
                    cell = __fmaf_rn(ka[c], d[n], cell * g.x);
                    a[n] = __fmaf_rn(qa[c], cell, a[n]);
                }
        }
#pragma unroll
        for (int n = 0; n < NC; n++) {
            float out = ordered_sum<SEGS>(a[n], lane);
            if (seg == 0) o[((size_t)t * heads + head) * DV + j + n] = out;
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++)
#pragma unroll
        for (int n = 0; n < NC; n++) mine[(size_t)i * DV + n] = st[i][n];
}

template <int D, int COLS, int NC> void check_delta(const Limits &lim, int heads, int T) {
    const size_t n = (size_t)T * heads * D, ns = (size_t)heads * D * D;
    std::vector<float> S(ns), q(n), k(n), v(n), o(n);
    std::vector<float2> gate((size_t)T * heads);
    for (size_t i = 0; i < ns; i++) S[i] = i % 11 ? uniform(41, i) : 0.0f;
    for (size_t r = 0; r < (size_t)T * heads; r++) {
        for (int i = 0; i < D; i++) {
            q[r * D + i] = normal(42, r * D + i);
            k[r * D + i] = normal(43, r * D + i);
            v[r * D + i] = normal(44, r * D + i);
        }
        float sq = st_l2_scale(&q[r * D], D), sk = st_l2_scale(&k[r * D], D);
        for (int i = 0; i < D; i++) q[r * D + i] *= sq * (1.0f / sqrtf((float)D)), k[r * D + i] *= sk;
        gate[r] = {st_exp(-4.0f * fabsf(uniform(45, r))), st_sigmoid(3.0f * uniform(46, r))};
        if (r % 37 == 5) gate[r] = {0.0f, 1.0f};
    }
    Device<float> dS(S), dq(q), dk(k), dv(v), dout(n);
    Device<float2> dg(gate);
    auto launch = [&](int, cudaStream_t s) {
        delta_kernel<D, D, COLS, NC><<<dim3(heads, D / COLS), COLS * D / 32 / NC, 0, s>>>(dS.p, dq.p, dk.p, dv.p, dg.p, dout.p, heads, T);
    };
    launch(0, 0);
    auto gS = dS.host(), go = dout.host();
    parallel_for(heads, 1, [&](size_t h) {
        for (int t = 0; t < T; t++) {
            size_t r = (size_t)t * heads + h;
            st_delta_step(&S[h * D * D], D, D, &q[r * D], &k[r * D], &v[r * D], gate[r].x, gate[r].y, &o[r * D]);
        }
    });
    double us = time_us(10, launch);
    // Memory: the state read and written once. Arithmetic: 4 operations a state value and token.
    double memory = 8.0 * ns / lim.copy_gbs / 1e3, arithmetic = 4.0 * ns * T / lim.fp32_tops / 1e6;
    report(text("delta net, %d heads of %dx%d, %d tokens, %d columns a CTA, %d a thread", heads, D, D, T, COLS, NC),
           differing(go, o) + differing(gS, S), n + ns, us, std::max(memory, arithmetic), memory > arithmetic ? "memory" : "fp32");
    if (T > 1) std::printf("    %.3f us a token\n", us / T);
}

inline void recurrent(const Limits &lim) {
    for (int T : {1, 16, 512}) {
        check_delta<128, 64, 1>(lim, 48, T);
        check_delta<128, 128, 2>(lim, 48, T);
        check_delta<128, 64, 2>(lim, 48, T);
        check_delta<128, 32, 2>(lim, 48, T);
        check_delta<64, 64, 1>(lim, 8, T);
        check_delta<64, 64, 2>(lim, 8, T);
    }
}
#endif

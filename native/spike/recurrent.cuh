// Rule 7: the gated delta net on a GPU. Four lanes share a column of the state, each holding the 32 keys of one segment
// in registers; a token costs two chains of 32 fma and two ordered sums of four by shuffle, no barrier.
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

// Grid (heads, DV / COLS); COLS * DK / 32 threads. q, k: [T][heads][DK]; v, o: [T][heads][DV]; gate: [T][heads]{decay, beta}.
// Inputs come CHUNK tokens at a time, a chunk ahead: a token is shorter than one access to memory.
static constexpr int CHUNK = 8, SEG_PAD = 36; // 36: the segments' 16-byte reads meet other banks
template <int DK, int COLS> struct Tokens {
    float k[CHUNK][DK / 32 * SEG_PAD], q[CHUNK][DK / 32 * SEG_PAD], v[CHUNK][COLS];
    float2 gate[CHUNK];
};

template <int DK, int DV, int COLS>
__global__ void __launch_bounds__(COLS *DK / 32)
    delta_kernel(float *S, const float *__restrict__ q, const float *__restrict__ k, const float *__restrict__ v,
                 const float2 *__restrict__ gate, float *__restrict__ o, int heads, int T) {
    constexpr int SEGS = DK / 32, THREADS = COLS * SEGS;
    __shared__ __align__(16) Tokens<DK, COLS> buffer[2];
    const int head = blockIdx.x, tid = threadIdx.x, lane = tid & 31, seg = tid % SEGS, col = tid / SEGS;
    const int j = blockIdx.y * COLS + col;
    auto fetch = [&](int chunk) {
        Tokens<DK, COLS> &to = buffer[chunk & 1];
        const int count = min(CHUNK, T - chunk * CHUNK);
        const size_t row0 = (size_t)chunk * CHUNK * heads + head;
        for (int e = tid; e < count * DK / 4; e += THREADS) {
            int t = e / (DK / 4), i = e % (DK / 4) * 4;
            size_t from = (row0 + (size_t)t * heads) * DK + i;
            cp_async16(&to.k[t][i / 32 * SEG_PAD + i % 32], k + from);
            cp_async16(&to.q[t][i / 32 * SEG_PAD + i % 32], q + from);
        }
        for (int e = tid; e < count * COLS / 4; e += THREADS) {
            int t = e / (COLS / 4), i = e % (COLS / 4) * 4;
            cp_async16(&to.v[t][i], v + (row0 + (size_t)t * heads) * DV + blockIdx.y * COLS + i);
        }
        for (int t = tid; t < count; t += THREADS) to.gate[t] = gate[row0 + (size_t)t * heads];
    };
    fetch(0);
    cp_async_commit();
    float *mine = S + ((size_t)head * DK + seg * 32) * DV + j;
    float st[32];
#pragma unroll
    for (int i = 0; i < 32; i++) st[i] = mine[(size_t)i * DV];
    for (int chunk = 0; chunk * CHUNK < T; chunk++) {
        cp_async_wait<0>();
        __syncthreads();
        if ((chunk + 1) * CHUNK < T) fetch(chunk + 1);
        cp_async_commit();
        const Tokens<DK, COLS> &in = buffer[chunk & 1];
        const int count = min(CHUNK, T - chunk * CHUNK);
        for (int t = 0; t < count; t++) {
            const float4 *kk = (const float4 *)&in.k[t][seg * SEG_PAD], *qq = (const float4 *)&in.q[t][seg * SEG_PAD];
            const float2 g = in.gate[t];
            float a = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 x = kk[i];
                a = __fmaf_rn(x.x, st[4 * i], a);
                a = __fmaf_rn(x.y, st[4 * i + 1], a);
                a = __fmaf_rn(x.z, st[4 * i + 2], a);
                a = __fmaf_rn(x.w, st[4 * i + 3], a);
            }
            const float d = g.y * (in.v[t][col] - ordered_sum<SEGS>(a, lane) * g.x);
            a = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float4 x = kk[i], y = qq[i];
                const float ka[4] = {x.x, x.y, x.z, x.w}, qa[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    st[4 * i + c] = __fmaf_rn(ka[c], d, st[4 * i + c] * g.x);
                    a = __fmaf_rn(qa[c], st[4 * i + c], a);
                }
            }
            float out = ordered_sum<SEGS>(a, lane);
            if (seg == 0) o[((size_t)(chunk * CHUNK + t) * heads + head) * DV + j] = out;
        }
    }
#pragma unroll
    for (int i = 0; i < 32; i++) mine[(size_t)i * DV] = st[i];
}

template <int D, int COLS> void check_delta(const Limits &lim, int heads, int T) {
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
        delta_kernel<D, D, COLS>
            <<<dim3(heads, D / COLS), COLS * D / 32, 0, s>>>(dS.p, dq.p, dk.p, dv.p, dg.p, dout.p, heads, T);
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
    report(text("delta net, %d heads of %dx%d, %d tokens, %d columns a CTA", heads, D, D, T, COLS),
           differing(go, o) + differing(gS, S), n + ns, us, std::max(memory, arithmetic),
           memory > arithmetic ? "memory" : "fp32");
    if (T > 1) std::printf("    %.3f us a token\n", us / T);
}

inline void recurrent(const Limits &lim) {
    for (int T : {1, 16, 512}) {
        check_delta<128, 128>(lim, 48, T);
        check_delta<128, 64>(lim, 48, T);
        check_delta<128, 32>(lim, 48, T);
        check_delta<64, 64>(lim, 8, T);
    }
}
#endif

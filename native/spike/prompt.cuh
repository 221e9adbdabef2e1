// Rule 3 for a prompt: M rows of activations times Q8_0 weights on int8 tensor cores.
//
// One mma.m16n8k32 makes the exact int32 of one 32-block for 16 weight rows and 8 tokens; then every output takes its
// block step on the ordinary float units. These, not the tensor cores, bound the product, so the number of float
// instructions of a block step is what counts; the variants below differ in nothing else.
#ifndef SPIKE_PROMPT_CUH
#define SPIKE_PROMPT_CUH
#include "common.cuh"
#include "matvec.cuh"

// MAGIC: the integer accumulator starts at the bits of M = 1.5 * 2^23. Read as a float it is M + isum (|isum| < 2^22),
// so isum comes without a conversion: by a subtraction, or, for a weight scale of 11 bits, whose product with M is
// exact, inside the multiplication itself: fmaf(ws, M + isum, -ws * M) = round(ws * isum).
static constexpr int MAGIC = 0x4b400000;
static constexpr float MAGIC_F = 12582912.0f;

enum Step {
    SCALES_FIRST_CVT,   // acc = fmaf(ws * xs, (float)isum, acc), converted
    SCALES_FIRST_MAGIC, // the same bits, by the subtraction
    WEIGHT_FIRST,       // acc = fmaf(xs, ws * isum, acc), two fma
    WEIGHT_FIRST_NOSEG, // the same without segments (other bits): what the segments cost
    STEP_COUNT
};
static const char *const STEP_NAME[] = {"(ws*xs)*isum by cvt", "(ws*xs)*isum by magic", "xs*(ws*isum) by two fma",
                                        "xs*(ws*isum), no segments"};

// The scalar row of the weight-first order.
inline float row_weight_first(const uint8_t *w, const int8_t *xq, const float *xd, int k, bool segments) {
    float total = 0.0f, acc = 0.0f;
    for (int b = 0; b < k / 32; b++, w += 34, xq += 32) {
        int32_t isum = 0;
        for (int i = 0; i < 32; i++) isum += (int32_t)(int8_t)w[2 + i] * xq[i];
        acc = ST_FMA(xd[b], st_h2f((uint16_t)(w[0] | w[1] << 8)) * (float)isum, acc);
        if (segments && b % 8 == 7) total += acc, acc = 0.0f;
    }
    return total + acc;
}

// A CTA of WR x WC warps makes BM weight rows x BN tokens; a warp makes 16 MI rows x 32 tokens.
static constexpr int BK = 128; // values of a stage
template <int MI_, int WR, int WC_, int STAGES_> struct Tile {
    static constexpr int MI = MI_, WC = WC_, STAGES = STAGES_, BM = WR * MI * 16, BN = WC * 32, THREADS = WR * WC * 32;
    struct Stage {
        uint8_t w[BM * BK];
        uint8_t x[BN * BK];
        __half ws[BK / 32][BM];
        float xs[BK / 32][BN];
    };
    static constexpr int SHARED = STAGES * (int)sizeof(Stage);
};
using Large = Tile<4, 2, 4, 4>; // 128 x 128
using Small = Tile<2, 2, 2, 3>; // 64 x 64: more CTAs for small matrices

// Row of the tile that holds fragment row r (0..15) of product i, and column of fragment column n of product j: chosen so
// that a lane's rows, and its columns, are neighbours and their scales come in one load.
template <int MI> __device__ static inline int tile_row(int i, int r) { return (r & 7) * 2 * MI + i * 2 + (r >> 3); }
__device__ static inline int tile_col(int j, int n) { return (n >> 1) * 8 + j * 2 + (n & 1); }

__device__ static inline void ldmatrix4(uint32_t (&r)[4], const void *shared) {
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(s));
}

template <typename T>
__device__ static inline void load_stage(typename T::Stage &st, const int8_t *w, const __half *ws, const int8_t *x,
                                         const float *xs, int n0, int m0, int N, int M, int K, int k0) {
    const int tid = threadIdx.x, blocks = min(BK, K - k0) / 32;
    constexpr int WS = T::BM / 8, XS = T::BN / 4; // 16-byte pieces of one block's scales
#pragma unroll
    for (int c = tid; c < T::BM * 8; c += T::THREADS) {
        int row = c >> 3, chunk = c & 7;
        if (chunk < 2 * blocks)
            cp_async16(&st.w[row * BK + ((chunk ^ ((row / (2 * T::MI)) & 7)) * 16)], w + (size_t)(n0 + row) * K + k0 + chunk * 16);
    }
#pragma unroll
    for (int c = tid; c < T::BN * 8; c += T::THREADS) {
        int row = c >> 3, chunk = c & 7;
        if (chunk < 2 * blocks)
            cp_async16(&st.x[row * BK + ((chunk ^ (((row >> 3) & 3) * 2 + (row & 1))) * 16)],
                       x + (size_t)(m0 + row) * K + k0 + chunk * 16);
    }
    for (int c = tid; c < blocks * (WS + XS); c += T::THREADS) {
        if (c < blocks * WS) cp_async16(&st.ws[c / WS][c % WS * 8], ws + (size_t)(k0 / 32 + c / WS) * N + n0 + c % WS * 8);
        else {
            int e = c - blocks * WS;
            cp_async16(&st.xs[e / XS][e % XS * 4], xs + (size_t)(k0 / 32 + e / XS) * M + m0 + e % XS * 4);
        }
    }
}

// w: [N][K] codes, ws: [K/32][N]; x: [M][K] codes, xs: [K/32][M]; y: [M][N]. N % BM == 0, M % BN == 0, K % 32 == 0.
template <Step STEP, typename T>
__global__ void __launch_bounds__(T::THREADS, T::THREADS == 256 ? 1 : 3)
prompt_kernel(const int8_t *__restrict__ w, const __half *__restrict__ ws, const int8_t *__restrict__ x,
              const float *__restrict__ xs, float *__restrict__ y, int N, int M, int K) {
    extern __shared__ __align__(128) uint8_t stages_raw[];
    using Stage = typename T::Stage;
    Stage *stage = (Stage *)stages_raw;
    constexpr int MI = T::MI, STAGES = T::STAGES;
    const int n0 = blockIdx.x * T::BM, m0 = blockIdx.y * T::BN, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int wr = (threadIdx.x / 32 / T::WC) * 16 * MI, wc = (threadIdx.x / 32 % T::WC) * 32; // this warp's outputs
    const int nstage = (K + BK - 1) / BK;
    constexpr bool SEGMENTS = STEP != WEIGHT_FIRST_NOSEG;
    constexpr int START = STEP == SCALES_FIRST_CVT ? 0 : MAGIC;
    float acc[MI][4][4] = {}, total[MI][4][4] = {};

    for (int s = 0; s < STAGES - 1; s++) {
        if (s < nstage) load_stage<T>(stage[s], w, ws, x, xs, n0, m0, N, M, K, s * BK);
        cp_async_commit();
    }
    for (int s = 0; s < nstage; s++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        int ahead = s + STAGES - 1;
        if (ahead < nstage) load_stage<T>(stage[ahead % STAGES], w, ws, x, xs, n0, m0, N, M, K, ahead * BK);
        cp_async_commit();
        const Stage &st = stage[s % STAGES];
        const int blocks = min(BK, K - s * BK) / 32;
#pragma unroll
        for (int b = 0; b < BK / 32; b++) {
            if (b >= blocks) break;
            uint32_t A[MI][4], B[2][4];
            const int mi = lane >> 3, r = lane & 7;
#pragma unroll
            for (int j = 0; j < 2; j++)
                ldmatrix4(B[j], &st.x[(wc + tile_col(2 * j + (mi >> 1), r)) * BK + ((2 * b + (mi & 1)) ^ r) * 16]);
#pragma unroll
            for (int i = 0; i < MI; i++)
                ldmatrix4(A[i], &st.w[(wr + tile_row<MI>(i, r + 8 * (mi & 1))) * BK + ((2 * b + (mi >> 1)) ^ r) * 16]);
            float rs[2 * MI], rm[2 * MI], cs[8];
            const __half2 *h = (const __half2 *)&st.ws[b][wr + g * 2 * MI];
#pragma unroll
            for (int i = 0; i < MI; i++) {
                float2 f = __half22float2(h[i]);
                rs[2 * i] = f.x, rs[2 * i + 1] = f.y;
                rm[2 * i] = -f.x * MAGIC_F, rm[2 * i + 1] = -f.y * MAGIC_F;
            }
            *(float4 *)cs = *(const float4 *)&st.xs[b][wc + t * 8];
            *(float4 *)(cs + 4) = *(const float4 *)&st.xs[b][wc + t * 8 + 4];
            const int start[4] = {START, START, START, START};
            int d[MI][4][4];
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    mma_s8(d[i][j], A[i][0], A[i][1], A[i][2], A[i][3], B[j >> 1][(j & 1) * 2], B[j >> 1][(j & 1) * 2 + 1], start);
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        float wsc = rs[i * 2 + (c >> 1)], xsc = cs[j * 2 + (c & 1)], &a = acc[i][j][c];
                        if (STEP == SCALES_FIRST_CVT) a = __fmaf_rn(wsc * xsc, (float)d[i][j][c], a);
                        else if (STEP == SCALES_FIRST_MAGIC) a = __fmaf_rn(wsc * xsc, __int_as_float(d[i][j][c]) - MAGIC_F, a);
                        else a = __fmaf_rn(xsc, __fmaf_rn(wsc, __int_as_float(d[i][j][c]), rm[i * 2 + (c >> 1)]), a);
                    }
        }
        if (SEGMENTS && (s & 1))
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) total[i][j][c] += acc[i][j][c], acc[i][j][c] = 0.0f;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
            float *out = &y[(size_t)(m0 + wc + t * 8 + j * 2 + e) * N + n0 + wr + g * 2 * MI];
#pragma unroll
            for (int i = 0; i < MI; i++) // adding an empty segment's +0 changes nothing, as no sum is -0
                *(float2 *)(out + 2 * i) = {total[i][j][e] + acc[i][j][e], total[i][j][2 + e] + acc[i][j][2 + e]};
        }
}

template <Step STEP, typename T>
void run_prompt(const Limits &lim, const Device<int8_t> &w, const Device<uint16_t> &ws, const Device<int8_t> &x,
                const Device<float> &xs, const std::vector<float> &ref, int N, int M, int K) {
    Device<float> y((size_t)M * N);
    auto kernel = prompt_kernel<STEP, T>;
    CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::SHARED));
    double us = time_us(20, [&](int, cudaStream_t s) {
        kernel<<<dim3(N / T::BM, M / T::BN), T::THREADS, T::SHARED, s>>>(w.p, (const __half *)ws.p, x.p, xs.p, y.p, N, M, K);
    });
    double ops = 2.0 * N * M * K;
    report(text("Q8_0 prompt %dx%dx%d, %s, tile %d", M, N, K, STEP_NAME[STEP], T::BM), differing(y.host(), ref), ref.size(), us,
           ops / lim.int8_tops / 1e6, "int8 mma peak");
    const int steps = STEP == WEIGHT_FIRST || STEP == WEIGHT_FIRST_NOSEG ? 2 : 3;
    double fp = (double)N * M * (K / 32.0 * steps + (STEP == WEIGHT_FIRST_NOSEG ? 0 : K / 256.0)) / lim.fp32_tops / 1e6;
    std::printf("    %.0f TOP/s; the float block steps alone need %.2f us (%.0f %% of the time)\n", ops / us / 1e6, fp, 100 * fp / us);
}

template <typename T> void check_prompt(const Limits &lim, int N, int M, int K) {
    std::vector<uint8_t> file = random_rows(Q8_0, N, K);
    std::vector<int8_t> w((size_t)N * K), xq((size_t)M * K);
    std::vector<uint16_t> ws((size_t)N * K / 32);
    std::vector<float> xs((size_t)M * K / 32), row_xs((size_t)M * K / 32);
    const int blocks = K / 32;
    parallel_for(N, 16, [&](size_t n) {
        for (int b = 0; b < blocks; b++) {
            const uint8_t *p = &file[(n * blocks + b) * 34];
            memcpy(&ws[(size_t)b * N + n], p, 2);
            memcpy(&w[n * K + b * 32], p + 2, 32);
        }
    });
    parallel_for(M, 4, [&](size_t m) {
        for (int b = 0; b < blocks; b++) {
            float v[32];
            int32_t sum;
            for (int i = 0; i < 32; i++) v[i] = hash32(52, m * blocks + b) % 50 ? normal(51, m * K + b * 32 + i) : 0.0f;
            row_xs[m * blocks + b] = xs[(size_t)b * M + m] = st_quantize_block(v, 32, &xq[m * K + b * 32], &sum);
        }
    });
    std::vector<float> now((size_t)M * N), first(now.size()), whole(now.size());
    parallel_for(N, 4, [&](size_t n) {
        for (int m = 0; m < M; m++) {
            const uint8_t *row = &file[n * blocks * 34];
            now[(size_t)m * N + n] = st_row_q8_0(row, &xq[(size_t)m * K], &row_xs[(size_t)m * blocks], K);
            first[(size_t)m * N + n] = row_weight_first(row, &xq[(size_t)m * K], &row_xs[(size_t)m * blocks], K, true);
            whole[(size_t)m * N + n] = row_weight_first(row, &xq[(size_t)m * K], &row_xs[(size_t)m * blocks], K, false);
        }
    });
    Device<int8_t> dw(w), dx(xq);
    Device<uint16_t> dws(ws);
    Device<float> dxs(xs);
    run_prompt<SCALES_FIRST_CVT, T>(lim, dw, dws, dx, dxs, now, N, M, K);
    run_prompt<SCALES_FIRST_MAGIC, T>(lim, dw, dws, dx, dxs, now, N, M, K);
    run_prompt<WEIGHT_FIRST, T>(lim, dw, dws, dx, dxs, first, N, M, K);
    run_prompt<WEIGHT_FIRST_NOSEG, T>(lim, dw, dws, dx, dxs, whole, N, M, K);
}

inline void prompt(const Limits &lim) {
    check_prompt<Large>(lim, 4096, 512, 2048);
    check_prompt<Small>(lim, 4096, 512, 2048);
    check_prompt<Small>(lim, 1024, 512, 384);
    check_prompt<Small>(lim, 1024, 512, 576);
    check_prompt<Large>(lim, 16384, 512, 2048);
}
#endif

// Rule 3 for a prompt: M rows of activations times Q8_0 weights on int8 tensor cores.
//
// One mma.m16n8k32 makes the exact int32 of one 32-block for 16 weight rows and 8 tokens; then every output takes its
// block step on the ordinary float units. Two other rules were tried, as they might have been cheaper: see Step.
#ifndef SPIKE_PROMPT_CUH
#define SPIKE_PROMPT_CUH
#include "common.cuh"
#include "matvec.cuh"

#include <cstddef>

enum Step {
    RULE,         // acc = fmaf(ws * xs, (float)isum, acc)
    WEIGHT_FIRST, // acc = fmaf(xs, ws * isum, acc) in two fma and no conversion, see MAGIC
    NO_SEGMENTS,  // WEIGHT_FIRST in one sum over the row: what the segments cost
};
static const char *const STEP_NAME[] = {"the rule", "weight first", "weight first, no segments"};

// The conversion that WEIGHT_FIRST spares: the integer sum starts at the bits of M = 1.5 * 2^23. Read as a float it is
// M + isum (|isum| < 2^22), and as ws has 11 bits, ws * M is exact: fmaf(ws, M + isum, -ws * M) = round(ws * isum).
// Measured: an mma whose C operand is not zero costs more than the conversion, so the rule stays as it is.
static constexpr int MAGIC = 0x4b400000;
static constexpr float MAGIC_F = 12582912.0f;

template <Step STEP> __device__ static inline void block_step(float &acc, float ws, float minus_ws_m, float xs, int d) {
    if (STEP == RULE) acc = __fmaf_rn(ws * xs, (float)d, acc);
    else acc = __fmaf_rn(xs, __fmaf_rn(ws, __int_as_float(d), minus_ws_m), acc);
}

// What products and block steps cost together when nothing has to be loaded: the ceiling of the kernels below.
template <Step STEP> __global__ void __launch_bounds__(256, 2) ceiling_kernel(int iters, float *out) {
    constexpr int START = STEP == RULE ? 0 : MAGIC;
    const int start[4] = {START, START, START, START};
    float acc[2][4][4] = {}, rs[4], rm[4], cs[8];
    for (int i = 0; i < 4; i++) rs[i] = threadIdx.x * 0.5f + i, rm[i] = -rs[i] * MAGIC_F;
    for (int i = 0; i < 8; i++) cs[i] = threadIdx.x * 0.25f - i;
    uint32_t a = threadIdx.x * 0x01030507u, b = threadIdx.x * 0x0b0d1113u;
    for (int it = 0; it < iters; it++) {
        int d[2][4][4];
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) mma_s8(d[i][j], a + i, a + 2 * i, a, a ^ i, b + j, b, start);
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    block_step<STEP>(acc[i][j][c], rs[2 * i + (c >> 1)], rm[2 * i + (c >> 1)], cs[2 * j + (c & 1)],
                                     d[i][j][c]);
    }
    float s = 0;
    for (int i = 0; i < 2; i++)
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < 4; c++) s += acc[i][j][c];
    if (s == 1.2345f) *out = s;
}

template <Step STEP> void report_ceiling(const Limits &lim) {
    Device<float> out(1);
    const int it = 4096;
    double us = time_us(3, [&](int, cudaStream_t s) { ceiling_kernel<STEP><<<lim.sms * 2, 256, 0, s>>>(it, out.p); });
    std::printf("ceiling of %-28s %.0f TOP/s\n", STEP_NAME[STEP], 2.0 * lim.sms * 16 * it * 8 * 16 * 8 * 32 / us / 1e6);
}

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
template <int MI_, int WR, int WC_, int STAGES_, int CTAS_> struct Tile {
    static constexpr int MI = MI_, WC = WC_, STAGES = STAGES_, CTAS = CTAS_, BM = WR * MI * 16, BN = WC * 32,
                         THREADS = WR * WC * 32;
    struct Stage {
        uint8_t w[BM * BK];
        uint8_t x[BN * BK];
        __half ws[BK / 32][BM];
        float xs[BK / 32][BN];
    };
    static constexpr int SHARED = STAGES * (int)sizeof(Stage);
};
using Large = Tile<2, 4, 2, 3, 2>; // 128 x 64, twice 8 warps
using Small = Tile<2, 2, 2, 3, 3>; // 64 x 64, three times 4 warps: more CTAs for small matrices

// Row of the tile that holds fragment row r (0..15) of product i, and column of fragment column n of product j: chosen so
// that a lane's rows, and its columns, are neighbours and their scales come in one load.
template <int MI> __device__ static inline int tile_row(int i, int r) { return (r & 7) * 2 * MI + i * 2 + (r >> 3); }
__device__ static inline int tile_col(int j, int n) { return (n >> 1) * 8 + j * 2 + (n & 1); }

__device__ static inline void ldmatrix4(uint32_t (&r)[4], uint32_t shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared));
}

// Copies stage after stage to shared memory. Every address is made once: in the loop only a stage's stride is added.
// Pieces past K are filled with zeros; a block of zeros adds +0 to a sum, which changes nothing.
template <typename T> struct Loader {
    static constexpr int STEP = T::THREADS / 8, WS = T::BM / 8,
                         XS = T::BN / 4; // rows a pass; pieces of a block's scales
    const int8_t *w, *x;
    const char *scales;
    size_t w_pass, x_pass, scales_step;
    int k, K, block, blocks;
    uint32_t w_at, x_at, scales_at;

    __device__ Loader(const int8_t *w_, const __half *ws, const int8_t *x_, const float *xs, int n0, int m0, int N,
                      int M, int K_) {
        const int row = threadIdx.x >> 3, chunk = threadIdx.x & 7, c = threadIdx.x;
        K = K_, k = chunk * 16, blocks = K / 32;
        w = w_ + (size_t)(n0 + row) * K + k;
        x = x_ + (size_t)(m0 + row) * K + k;
        w_pass = x_pass = (size_t)STEP * K;
        w_at = row * BK + ((chunk ^ ((row / (2 * T::MI)) & 7)) * 16);
        x_at = row * BK + ((chunk ^ (((row >> 3) & 3) * 2 + (row & 1))) * 16);
        if (c < 4 * WS) {
            block = c / WS;
            scales = (const char *)(ws + (size_t)block * N + n0 + c % WS * 8);
            scales_step = (size_t)N * 2 * 4;
            scales_at = offsetof(typename T::Stage, ws) + block * T::BM * 2 + c % WS * 16;
        } else {
            int e = c - 4 * WS;
            block = e / XS;
            scales = (const char *)(xs + (size_t)block * M + m0 + e % XS * 4);
            scales_step = (size_t)M * 4 * 4;
            scales_at = offsetof(typename T::Stage, xs) + block * T::BN * 4 + e % XS * 16;
        }
    }
    __device__ void next(uint32_t stage) {
        const int bytes = k < K ? 16 : 0;
#pragma unroll
        for (int i = 0; i < T::BM / STEP; i++) // the swizzle of row + i STEP is that of row with bits flipped
            copy(stage + ((w_at + i * STEP * BK) ^ ((i * STEP / (2 * T::MI)) & 7) * 16), w + i * w_pass, bytes);
#pragma unroll
        for (int i = 0; i < T::BN / STEP; i++)
            copy(stage + T::BM * BK + ((x_at + i * STEP * BK) ^ ((i * STEP >> 3) & 3) * 32), x + i * x_pass, bytes);
        if (block < 4) copy(stage + scales_at, scales, block < blocks ? 16 : 0);
        w += BK, x += BK, k += BK, scales += scales_step, blocks -= 4;
    }
    // cp.async of 16 bytes, or of zeros when bytes = 0 (the address is then not read).
    static __device__ void copy(uint32_t to, const void *from, int bytes) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
    }
};

// w: [N][K] codes, ws: [K/32][N]; x: [M][K] codes, xs: [K/32][M]; y: [M][N]. N % BM == 0, M % BN == 0, K % 32 == 0.
template <Step STEP, typename T>
__global__ void __launch_bounds__(T::THREADS, T::CTAS)
    prompt_kernel(const int8_t *__restrict__ w, const __half *__restrict__ ws, const int8_t *__restrict__ x,
                  const float *__restrict__ xs, float *__restrict__ y, int N, int M, int K) {
    extern __shared__ __align__(128) uint8_t stages_raw[];
    using Stage = typename T::Stage;
    constexpr int MI = T::MI, STAGES = T::STAGES;
    const int n0 = blockIdx.x * T::BM, m0 = blockIdx.y * T::BN, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const int wr = (threadIdx.x / 32 / T::WC) * 16 * MI, wc = (threadIdx.x / 32 % T::WC) * 32; // this warp's outputs
    const int nstage = (K + BK - 1) / BK;
    const uint32_t shared = (uint32_t)__cvta_generic_to_shared(stages_raw);
    Loader<T> loader(w, ws, x, xs, n0, m0, N, M, K);
    // This lane's row address of its ldmatrix: matrix mi = lane / 8, row r; the 16-byte piece is XORed with r.
    const int mi = lane >> 3, r = lane & 7;
    const uint32_t a_at = (wr + tile_row<MI>(0, r + 8 * (mi & 1))) * BK + ((mi >> 1) ^ r) * 16;
    const uint32_t b_at = T::BM * BK + (wc + tile_col(mi >> 1, r)) * BK + ((mi & 1) ^ r) * 16;
    constexpr bool SEGMENTS = STEP != NO_SEGMENTS;
    constexpr int START = STEP == RULE ? 0 : MAGIC;
    float acc[MI][4][4] = {}, total[MI][4][4] = {};

    for (int s = 0; s < STAGES - 1; s++) {
        if (s < nstage) loader.next(shared + s * (int)sizeof(Stage));
        cp_async_commit();
    }
    for (int s = 0; s < nstage; s++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        int ahead = s + STAGES - 1;
        if (ahead < nstage) loader.next(shared + ahead % STAGES * (int)sizeof(Stage));
        cp_async_commit();
        const Stage &st = ((const Stage *)stages_raw)[s % STAGES];
        const uint32_t base = shared + s % STAGES * (int)sizeof(Stage);
#pragma unroll
        for (int b = 0; b < BK / 32; b++) {
            uint32_t A[MI][4], B[2][4];
#pragma unroll
            for (int j = 0; j < 2; j++) ldmatrix4(B[j], base + (b_at ^ (b * 32)) + 4 * j * BK);
#pragma unroll
            for (int i = 0; i < MI; i++) ldmatrix4(A[i], base + (a_at ^ (b * 32)) + 2 * i * BK);
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
                    mma_s8(d[i][j], A[i][0], A[i][1], A[i][2], A[i][3], B[j >> 1][(j & 1) * 2],
                           B[j >> 1][(j & 1) * 2 + 1], start);
#pragma unroll
            for (int i = 0; i < MI; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        block_step<STEP>(acc[i][j][c], rs[i * 2 + (c >> 1)], rm[i * 2 + (c >> 1)], cs[j * 2 + (c & 1)],
                                         d[i][j][c]);
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
        kernel<<<dim3(N / T::BM, M / T::BN), T::THREADS, T::SHARED, s>>>(w.p, (const __half *)ws.p, x.p, xs.p, y.p, N,
                                                                         M, K);
    });
    double ops = 2.0 * N * M * K;
    report(
        text("Q8_0 prompt %dx%dx%d, %s, tile %dx%d, %d warps", M, N, K, STEP_NAME[STEP], T::BM, T::BN, T::THREADS / 32),
        differing(y.host(), ref), ref.size(), us, ops / lim.int8_tops / 1e6, "int8 mma peak");
    const int steps = STEP == RULE ? 3 : 2;
    double fp = (double)N * M * (K / 32.0 * steps + (STEP == NO_SEGMENTS ? 0 : K / 256.0)) / lim.fp32_tops / 1e6;
    std::printf("    %.0f TOP/s; the float block steps alone need %.2f us (%.0f %% of the time)\n", ops / us / 1e6, fp,
                100 * fp / us);
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
    run_prompt<RULE, T>(lim, dw, dws, dx, dxs, now, N, M, K);
    run_prompt<WEIGHT_FIRST, T>(lim, dw, dws, dx, dxs, first, N, M, K);
    run_prompt<NO_SEGMENTS, T>(lim, dw, dws, dx, dxs, whole, N, M, K);
}

inline void prompt(const Limits &lim) {
    report_ceiling<RULE>(lim);
    report_ceiling<WEIGHT_FIRST>(lim);
    check_prompt<Large>(lim, 4096, 512, 2048);
    check_prompt<Small>(lim, 4096, 512, 2048);
    check_prompt<Small>(lim, 1024, 512, 384);
    check_prompt<Small>(lim, 1024, 512, 576);
    check_prompt<Large>(lim, 16384, 512, 2048);
}
#endif

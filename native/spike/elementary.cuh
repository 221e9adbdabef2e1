// Rules 1, 2, 5: elementary functions over every float, half conversions, RMS norm, quantisation of activations.
#ifndef SPIKE_ELEMENTARY_CUH
#define SPIKE_ELEMENTARY_CUH
#include "common.cuh"
#include <cmath>

enum Unary { EXP, SIGMOID, SILU, SOFTPLUS, TO_HALF, UNARY_COUNT };
// EXP on the device is exp_select, so that both forms are held against each other.
static const char *const UNARY_NAME[] = {"st_exp", "st_sigmoid", "st_silu", "st_softplus", "st_f2h"};

ST_HD float unary(int f, float x) {
    switch (f) {
    case EXP: return st_exp(x);
    case SIGMOID: return st_sigmoid(x);
    case SILU: return st_silu(x);
    case SOFTPLUS: return st_softplus(x);
    default: return st_h2f(st_f2h(x));
    }
}
inline double unary_exact(int f, double x) {
    switch (f) {
    case EXP: return std::exp(x);
    case SIGMOID: return 1.0 / (1.0 + std::exp(-x));
    case SILU: return x / (1.0 + std::exp(-x));
    default: return x > 30 ? x + std::exp(-x) : std::log1p(std::exp(x));
    }
}

// y[i] = f(the float whose bits are base + i). The half conversion is the hardware's, so st_f2h is held against it.
__global__ void unary_kernel(int f, uint32_t base, float *y) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    float x = st_bits2f(base + i);
    y[i] = f == TO_HALF ? __half2float(__float2half_rn(x)) : f == EXP ? exp_select(x) : unary(f, x);
}
__global__ void half_kernel(float *own, float *hardware) {
    uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    own[i] = st_h2f((uint16_t)i);
    hardware[i] = __half2float(__ushort_as_half((unsigned short)i));
}

struct Worst {
    double err = 0;
    float at = 0;
};

// All 2^32 inputs of one function; the relative error is taken where -86 <= x <= 88 and the result is a normal float.
inline void check_unary(int f) {
    const size_t chunk = (size_t)1 << 26;
    Device<float> d(chunk);
    float *h;
    CHECK(cudaMallocHost(&h, chunk * 4));
    size_t bad = 0;
    Worst worst;
    for (size_t base = 0; base < (size_t)1 << 32; base += chunk) {
        unary_kernel<<<chunk / 256, 256>>>(f, (uint32_t)base, d.p);
        CHECK(cudaMemcpy(h, d.p, chunk * 4, cudaMemcpyDeviceToHost));
        const size_t part = 65536;
        std::vector<Worst> w(chunk / part);
        std::atomic<size_t> diff{0};
        parallel_for(chunk / part, 4, [&](size_t c) {
            size_t k = 0;
            for (size_t i = c * part; i < (c + 1) * part; i++) {
                float x = st_bits2f((uint32_t)(base + i)), y = unary(f, x);
                k += st_f2bits(y) != st_f2bits(h[i]) && !(y != y && h[i] != h[i]);
                if (f == TO_HALF || !(x >= -86.0f && x <= 88.0f)) continue;
                double e = unary_exact(f, x), r = std::fabs((y - e) / e);
                if (std::fabs(e) >= 1.1754944e-38 && r > w[c].err) w[c] = {r, x};
            }
            diff += k;
        });
        bad += diff;
        for (auto &v : w)
            if (v.err > worst.err) worst = v;
    }
    cudaFreeHost(h);
    report(text("%s, every float", UNARY_NAME[f]), bad, (size_t)1 << 32, 0, 0, "");
    if (f != TO_HALF) std::printf("    largest relative error for -86 <= x <= 88: %.4g at %.9g\n", worst.err, worst.at);
}

inline void check_half() {
    Device<float> own(65536), hw(65536);
    half_kernel<<<256, 256>>>(own.p, hw.p);
    std::vector<float> ref(65536);
    for (int i = 0; i < 65536; i++) ref[i] = st_h2f((uint16_t)i);
    report("st_h2f, every half", differing(own.host(), ref) + differing(hw.host(), ref), 2 * 65536, 0, 0, "");
}

// ---- RMS norm: the 32 partial sums are 32 lanes of one warp; the other warps only load and scale --------------------
__global__ void __launch_bounds__(512)
    rms_kernel(const float4 *__restrict__ x, const float4 *__restrict__ w, float4 *y, int n, float eps) {
    extern __shared__ __align__(16) float row[];
    __shared__ float scale;
    const int quads = n / 4;
    x += (size_t)blockIdx.x * quads;
    y += (size_t)blockIdx.x * quads;
#pragma unroll 4
    for (int i = threadIdx.x; i < quads; i += 512) ((float4 *)row)[i] = x[i];
    __syncthreads();
    if (threadIdx.x < 32) {
        float total = 0.0f;
        for (int c = 0; c < n; c += ST_SUMCHUNK) {
            int end = min(n, c + ST_SUMCHUNK);
            float p = 0.0f;
#pragma unroll 32
            for (int i = c + threadIdx.x; i < end; i += 32) p = __fmaf_rn(row[i], row[i], p);
            for (int o = 16; o; o >>= 1)
                p += __shfl_xor_sync(~0u, p, o); // a + b = b + a: every lane has the tree's root
            total += p;
        }
        if (threadIdx.x == 0) scale = 1.0f / sqrtf(total / (float)n + eps);
    }
    float4 v[4]; // the first 8,192 weights are under way while the sum is made
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (threadIdx.x + k * 512 < quads) v[k] = w[threadIdx.x + k * 512];
    __syncthreads();
    const float r = scale;
    auto put = [&](int i, float4 a) {
        float4 b = ((float4 *)row)[i];
        y[i] = {(b.x * r) * a.x, (b.y * r) * a.y, (b.z * r) * a.z, (b.w * r) * a.w};
    };
#pragma unroll
    for (int k = 0; k < 4; k++)
        if (threadIdx.x + k * 512 < quads) put(threadIdx.x + k * 512, v[k]);
    for (int i = threadIdx.x + 2048; i < quads; i += 512) put(i, w[i]);
}

inline void check_rms(const Limits &lim, int rows, int n) {
    std::vector<float> x((size_t)rows * n), w(n), ref(x.size());
    for (size_t i = 0; i < x.size(); i++) x[i] = normal(1, i) * 3;
    for (int i = 0; i < n; i++) w[i] = uniform(2, i), x[i] = i % 3 ? 0.0f : x[i] * 1e-20f; // row 0: squares underflow
    parallel_for(rows, 1, [&](size_t r) {
        float s = st_rms_scale(&x[r * n], n, 1e-6f);
        for (int i = 0; i < n; i++) ref[r * n + i] = (x[r * n + i] * s) * w[i];
    });
    Device<float> dx(x), dw(w), dy(x.size());
    auto launch = [&](int, cudaStream_t s) {
        rms_kernel<<<rows, 512, n * 4, s>>>((float4 *)dx.p, (float4 *)dw.p, (float4 *)dy.p, n, 1e-6f);
    };
    double us = time_us(50, launch);
    double limit = rows > 64 ? 8.0 * rows * n / lim.copy_gbs / 1e3 : lim.launch_us;
    report(text("RMS norm, %d rows of %d", rows, n), differing(dy.host(), ref), ref.size(), us, limit,
           rows > 64 ? "copy bandwidth" : "an empty launch");
}

// ---- activations to int8, 8 lanes a block ----------------------------------------------------------------------------
__global__ void quantize_kernel(const float4 *__restrict__ x, uint32_t *q, float *scale, int32_t *sum, size_t quads) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= quads) return; // quads is a multiple of 32: whole warps leave
    float4 v = x[i];
    uint32_t m = max(max(st_f2bits(v.x) & 0x7fffffffu, st_f2bits(v.y) & 0x7fffffffu),
                     max(st_f2bits(v.z) & 0x7fffffffu, st_f2bits(v.w) & 0x7fffffffu));
    for (int o = 4; o; o >>= 1) m = max(m, __shfl_xor_sync(~0u, m, o));
    float amax = st_bits2f(m);
    float d = st_scale_of(amax), inv = 127.0f / amax;
    bool ok = d > 0.0f;
    int a = ok ? __float2int_rn(v.x * inv) : 0, b = ok ? __float2int_rn(v.y * inv) : 0;
    int c = ok ? __float2int_rn(v.z * inv) : 0, e = ok ? __float2int_rn(v.w * inv) : 0;
    int s = a + b + c + e;
    for (int o = 4; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    q[i] = (a & 255) | (b & 255) << 8 | (c & 255) << 16 | (uint32_t)e << 24;
    if (i % 8 == 0) scale[i / 8] = d, sum[i / 8] = s;
}

inline void check_quantize(const Limits &lim) {
    const size_t blocks = 512 * 4096 / 32 * 16, n = blocks * 32;
    std::vector<float> x(n);
    const float odd[] = {0.0f, -0.0f, 1e-45f, 7.8e-31f, 7.9e-31f, 3.4028235e38f, -3.4028235e38f, INFINITY, NAN, 1e-38f};
    parallel_for(blocks, 64, [&](size_t b) {
        for (size_t i = b * 32; i < b * 32 + 32; i++) {
            x[i] = normal(3, i);
            if (b % 64 == 1) x[i] = (float)(int)(hash32(4, i) % 255) - 127.0f, x[b * 32] = 254.0f; // ties
            if (b % 64 == 2) x[i] = st_bits2f(hash32(5, i));                                       // any float
            if (b % 64 == 3) x[i] = odd[hash32(6, b) % 10] * ((i & 1) ? 1.0f : uniform(7, i));
        }
    });
    std::vector<int8_t> q(n);
    std::vector<float> sc(blocks);
    std::vector<int32_t> su(blocks);
    parallel_for(blocks, 64, [&](size_t b) { sc[b] = st_quantize_block(&x[b * 32], 32, &q[b * 32], &su[b]); });
    Device<float> dx(x), ds(blocks);
    Device<uint32_t> dq(n / 4);
    Device<int32_t> dm(blocks);
    double us = time_us(10, [&](int, cudaStream_t s) {
        quantize_kernel<<<(unsigned)(n / 4 / 256), 256, 0, s>>>((float4 *)dx.p, dq.p, ds.p, dm.p, n / 4);
    });
    auto gq = dq.host();
    auto gs = ds.host();
    auto gm = dm.host();
    size_t bad = differing(gs, sc);
    for (size_t i = 0; i < n / 4; i++) bad += memcmp(&gq[i], &q[i * 4], 4) != 0;
    for (size_t b = 0; b < blocks; b++) bad += gm[b] != su[b];
    report("quantise activations (codes, scales, sums)", bad, n + 2 * blocks, us,
           (5.0 * n + 8.0 * blocks) / lim.copy_gbs / 1e3, "copy bandwidth");
}

inline void elementary(const Limits &) {
    for (int f = 0; f < UNARY_COUNT; f++) check_unary(f);
    check_half();
}

inline void rows(const Limits &lim) {
    check_rms(lim, 1, 2048);
    check_rms(lim, 1, 4096);
    check_rms(lim, 4, 10240);
    check_rms(lim, 16384, 4096);
    check_quantize(lim);
}
#endif

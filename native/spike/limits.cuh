// The card's limits, measured in the same run as the kernels that are held against them.
#ifndef SPIKE_LIMITS_CUH
#define SPIKE_LIMITS_CUH
#include "common.cuh"

__global__ void empty_kernel() {}

__global__ void read_kernel(const uint4 *__restrict__ p, size_t n, uint32_t *out) {
    uint32_t x = 0;
    size_t step = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 7 * step < n; i += 8 * step) {
        uint4 v[8];
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = __ldcs(p + i + k * step);
#pragma unroll
        for (int k = 0; k < 8; k++) x ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    if (x == 0x12345678u) *out = x;
}

__global__ void copy_kernel(const uint4 *__restrict__ from, uint4 *__restrict__ to, size_t n) {
    size_t step = (size_t)gridDim.x * blockDim.x, i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < n; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = __ldcs(from + i + k * step);
#pragma unroll
        for (int k = 0; k < 4; k++) __stcs(to + i + k * step, v[k]);
    }
}

// 8 independent accumulators a warp: products per warp and iteration 8 * 16 * 8 * 32.
__global__ void mma_kernel(int iters, int *out) {
    int d[8][4] = {};
    uint32_t a = threadIdx.x * 0x01030507u, b = threadIdx.x * 0x0b0d1113u;
    for (int i = 0; i < iters; i++)
#pragma unroll
        for (int k = 0; k < 8; k++) mma_s8(d[k], a, a ^ 1, a ^ 2, a ^ 3, b, b ^ k, d[k]);
    int s = 0;
    for (int k = 0; k < 8; k++) s ^= d[k][0] ^ d[k][1] ^ d[k][2] ^ d[k][3];
    if (s == 0x12345678) *out = s;
}

__global__ void fma_kernel(int iters, float *out) {
    float x[16];
    for (int k = 0; k < 16; k++) x[k] = threadIdx.x + k;
    float c = 1.0f + threadIdx.x * 1e-9f;
    for (int i = 0; i < iters; i++)
#pragma unroll
        for (int k = 0; k < 16; k++) x[k] = __fmaf_rn(x[k], c, 1e-3f);
    float s = 0;
    for (int k = 0; k < 16; k++) s += x[k];
    if (s == 1.2345f) *out = s;
}

inline Limits measure_limits() {
    Limits l{};
    cudaDeviceProp prop;
    CHECK(cudaGetDeviceProperties(&prop, 0));
    l.sms = prop.multiProcessorCount;
    const size_t bytes = (size_t)2 << 30;
    Device<uint32_t> a(bytes / 4), b(bytes / 4);
    auto us =
        time_us(3, [&](int, cudaStream_t s) { read_kernel<<<l.sms * 8, 256, 0, s>>>((uint4 *)a.p, bytes / 16, b.p); });
    l.read_gbs = bytes / us / 1e3;
    us = time_us(
        3, [&](int, cudaStream_t s) { copy_kernel<<<l.sms * 8, 256, 0, s>>>((uint4 *)a.p, (uint4 *)b.p, bytes / 16); });
    l.copy_gbs = 2.0 * bytes / us / 1e3;
    const int it = 4096;
    us = time_us(3, [&](int, cudaStream_t s) { mma_kernel<<<l.sms * 2, 256, 0, s>>>(it, (int *)b.p); });
    l.int8_tops = 2.0 * l.sms * 16 * it * 8 * 16 * 8 * 32 / us / 1e6;
    us = time_us(3, [&](int, cudaStream_t s) { fma_kernel<<<l.sms * 4, 512, 0, s>>>(it, (float *)b.p); });
    l.fp32_tops = (double)l.sms * 4 * 512 * it * 16 / us / 1e6;
    l.launch_us = time_us(50, [&](int, cudaStream_t s) { empty_kernel<<<1, 32, 0, s>>>(); });
    std::printf("%s, %d multiprocessors: read %.0f GB/s, copy %.0f GB/s, mma.sync int8 %.0f TOP/s, fp32 %.1f T/s "
                "(fma = 1), empty launch in a graph %.2f us\n",
                prop.name, l.sms, l.read_gbs, l.copy_gbs, l.int8_tops, l.fp32_tops, l.launch_us);
    return l;
}
#endif

// What every part of the spike uses: checked CUDA calls, device arrays, random data, bitwise comparison, timing and the
// measured limits of the card.
#ifndef SPIKE_COMMON_CUH
#define SPIKE_COMMON_CUH

#include "../src/arith.h"

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#define CHECK(call)                                                                                                    \
    do {                                                                                                               \
        cudaError_t err_ = (call);                                                                                     \
        if (err_ != cudaSuccess) {                                                                                     \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(err_));                         \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)

// Device array filled from the host; poisoned when it starts empty, so that an unwritten output cannot pass.
template <typename T> struct Device {
    T *p = nullptr;
    size_t n = 0;
    explicit Device(size_t count) : n(count) {
        CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
        CHECK(cudaMemset(p, 0xff, n * sizeof(T)));
    }
    explicit Device(const std::vector<T> &h) : n(h.size()) {
        CHECK(cudaMalloc(&p, std::max<size_t>(n, 1) * sizeof(T)));
        CHECK(cudaMemcpy(p, h.data(), n * sizeof(T), cudaMemcpyHostToDevice));
    }
    Device(const Device &) = delete;
    ~Device() { cudaFree(p); }
    std::vector<T> host() const {
        std::vector<T> h(n);
        CHECK(cudaDeviceSynchronize());
        CHECK(cudaMemcpy(h.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return h;
    }
};

// Runs body(i) for i in [0, n) on all cores, in runs of `grain`.
template <typename F> void parallel_for(size_t n, size_t grain, F body) {
    std::atomic<size_t> next{0};
    auto work = [&] {
        for (size_t a; (a = next.fetch_add(grain)) < n;)
            for (size_t i = a; i < std::min(n, a + grain); i++) body(i);
    };
    std::vector<std::thread> pool;
    for (unsigned t = 1; t < std::thread::hardware_concurrency(); t++) pool.emplace_back(work);
    work();
    for (auto &t : pool) t.join();
}

// A hash of (stream, index): random data that does not depend on the number of threads.
inline uint32_t hash32(uint64_t stream, uint64_t i) {
    uint64_t z = stream * 0x9e3779b97f4a7c15ull + i * 0xd1342543de82ef95ull + 0x2545f4914f6cdd1dull;
    z = (z ^ (z >> 32)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 29)) * 0x94d049bb133111ebull;
    return (uint32_t)(z >> 32);
}
inline float uniform(uint64_t stream, uint64_t i) { return (float)(int32_t)hash32(stream, i) * 0x1p-31f; } // [-1, 1)
// Roughly normal with a heavy tail, as activations are.
inline float normal(uint64_t stream, uint64_t i) {
    float s = 0;
    for (int k = 0; k < 4; k++) s += uniform(stream + 1000 * k, i);
    return hash32(stream + 77, i) % 512 ? s : s * 20.0f;
}

// Number of elements whose bits differ; NaNs compare as a class.
inline size_t differing(const float *a, const float *b, size_t n) {
    std::atomic<size_t> bad{0};
    parallel_for((n + 65535) / 65536, 1, [&](size_t c) {
        size_t k = 0;
        for (size_t i = c * 65536; i < std::min(n, (c + 1) * 65536); i++)
            k += st_f2bits(a[i]) != st_f2bits(b[i]) && !(a[i] != a[i] && b[i] != b[i]);
        bad += k;
    });
    return bad;
}
inline size_t differing(const std::vector<float> &a, const std::vector<float> &b) {
    return a.size() == b.size() ? differing(a.data(), b.data(), a.size()) : ~(size_t)0;
}

// Microseconds of one launch: `reps` launches in a graph, the median of 7 replays. launch(i, stream) may rotate buffers.
inline double time_us(int reps, const std::function<void(int, cudaStream_t)> &launch) {
    cudaStream_t s;
    CHECK(cudaStreamCreate(&s));
    launch(0, s); // load the module, set attributes
    CHECK(cudaStreamSynchronize(s));
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < reps; i++) launch(i, s);
    CHECK(cudaStreamEndCapture(s, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    cudaEvent_t a, b;
    CHECK(cudaEventCreate(&a));
    CHECK(cudaEventCreate(&b));
    std::vector<float> ms;
    for (int k = 0; k < 9; k++) {
        CHECK(cudaEventRecord(a, s));
        CHECK(cudaGraphLaunch(exec, s));
        CHECK(cudaEventRecord(b, s));
        CHECK(cudaEventSynchronize(b));
        float t;
        CHECK(cudaEventElapsedTime(&t, a, b));
        if (k >= 2) ms.push_back(t);
    }
    std::sort(ms.begin(), ms.end());
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
    cudaEventDestroy(a);
    cudaEventDestroy(b);
    cudaStreamDestroy(s);
    return ms[ms.size() / 2] * 1e3 / reps;
}

// Limits of the card, measured once (limits.cuh).
struct Limits {
    double read_gbs, copy_gbs; // device memory
    double int8_tops;          // mma.sync m16n8k32, 2 operations per product
    double fp32_tops;          // single-precision operations, fma counted as one
    double launch_us;          // an empty kernel in a graph
    int sms;
};

// One line of the report. limit_us <= 0: no limit stated.
inline size_t total_differing = 0;
inline void report(const std::string &what, size_t bad, size_t n, double us, double limit_us, const char *limit) {
    total_differing += bad;
    std::printf("%-58s differing %zu of %zu", what.c_str(), bad, n);
    if (us > 0) std::printf("  %10.2f us", us);
    if (limit_us > 0) std::printf("  %5.1f %% of %s (%.2f us)", 100.0 * limit_us / us, limit, limit_us);
    std::printf("\n");
    std::fflush(stdout);
}

inline std::string text(const char *fmt, ...) {
    char buf[200];
    va_list ap;
    va_start(ap, fmt);
    std::vsnprintf(buf, sizeof buf, fmt, ap);
    va_end(ap);
    return buf;
}

// st_exp without a branch (a warp's lanes would part at it): the same bits.
ST_HD float exp_select(float x) {
    bool in = x >= -87.0f;
    float y = st_exp(in ? x : -87.0f);
    return in ? y : x != x ? x : 0.0f;
}

// ---- int8 tensor core product: D[16][8] = A[16][32] B[32][8] + C, exact int32 -------------------------------------
// Lane = 4 g + t holds A words {row g, bytes 4t..}, {g+8, 4t}, {g, 4t+16}, {g+8, 4t+16}; B words {bytes 4t, col g},
// {4t+16, g}; C and D {g, 2t}, {g, 2t+1}, {g+8, 2t}, {g+8, 2t+1}.
__device__ static inline void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                     uint32_t b1, const int (&c)[4]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%10,%11,%12,%13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}
__device__ static inline void mma_u8s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                       uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ static inline void cp_async16(void *shared, const void *global) {
    uint32_t s = (uint32_t)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(s), "l"(global));
}
__device__ static inline void cp_async_commit() { asm volatile("cp.async.commit_group;"); }
template <int N> __device__ static inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

#endif

/* What this processor and its memory can do at most: the yardstick for the engine's kernels.
 *
 * Prints one line a limit: `name threads=N value unit`. Integer and float operations count a multiply-add as two.
 *
 *   read_memory   GB/s, reading 256 MiB a thread once through, one stream a thread: more than any cache holds
 *   read_cache    GB/s, reading the 3 MiB a thread that the engine's kernel bench works on again and again
 *   int8          GOP/s, unsigned by signed bytes into 32-bit sums, operands in registers
 *   fma           GFLOP/s, single precision, operands in registers
 *
 * Threads start a measurement together and the slowest counts; each measurement is the best of a few, for a limit is
 * what is possible when nobody interferes. Build: gcc -O2 -march=native -pthread probe.c
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { MEMORY_BYTES = 256 << 20, CACHE_BYTES = 3 << 20, MAX_THREADS = 2, CHAINS = 12, PARTS = 8, WIDEN = 64 };
#define BEST_OF 5
#define ROUND_S 0.04

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static volatile uint64_t sink; /* results go here, so that the work cannot be left out */

/* ---- reading ---- */

static uint64_t read_all(const uint8_t *p, size_t bytes) {
#if defined(__AVX512F__)
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 256) {
        a = _mm512_or_si512(a, _mm512_load_si512(p + i)), b = _mm512_or_si512(b, _mm512_load_si512(p + i + 64));
        c = _mm512_or_si512(c, _mm512_load_si512(p + i + 128)), d = _mm512_or_si512(d, _mm512_load_si512(p + i + 192));
    }
    return (uint64_t)_mm512_reduce_or_epi64(_mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d)));
#elif defined(__AVX2__)
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < bytes; i += 128) {
        const __m256i *q = (const __m256i *)(p + i);
        a = _mm256_or_si256(a, _mm256_load_si256(q)), b = _mm256_or_si256(b, _mm256_load_si256(q + 1));
        c = _mm256_or_si256(c, _mm256_load_si256(q + 2)), d = _mm256_or_si256(d, _mm256_load_si256(q + 3));
    }
    a = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
    return (uint64_t)_mm256_extract_epi64(a, 0) | (uint64_t)_mm256_extract_epi64(a, 2);
#else
    const uint64_t *q = (const uint64_t *)p;
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (size_t i = 0; i < bytes / 8; i += 4) a |= q[i], b |= q[i + 1], c |= q[i + 2], d |= q[i + 3];
    return a | b | c | d;
#endif
}

/* ---- arithmetic ---- */

/* `rounds` times CHAINS independent sums, so that the latency of one never waits; returns operations done. */
static double run_int8(long rounds) {
#if defined(__AVX512VNNI__)
    __m512i sum[CHAINS], x = _mm512_set1_epi8(3), y = _mm512_set1_epi8(-5);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_epi32(i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_dpbusd_epi32(sum[i], x, y);
        __asm__ volatile("" : "+v"(x), "+v"(y)); /* operands that may have changed: nothing can be taken out of the loop */
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm512_add_epi32(sum[0], sum[i]);
    sink += (uint64_t)_mm512_reduce_add_epi32(sum[0]);
    return 2.0 * 64 * CHAINS * (double)rounds;
#elif defined(__AVXVNNI__)
    __m256i sum[CHAINS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(-5);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_set1_epi32(i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_dpbusd_avx_epi32(sum[i], x, y);
        __asm__ volatile("" : "+x"(x), "+x"(y));
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm256_add_epi32(sum[0], sum[i]);
    sink += (uint64_t)_mm256_extract_epi32(sum[0], 0);
    return 2.0 * 32 * CHAINS * (double)rounds;
#elif defined(__AVX2__)
    /* Products are summed in 16 bits and widened every so often, as small operands allow: the multipliers are the limit. */
    __m256i part[PARTS], x = _mm256_set1_epi8(3), y = _mm256_set1_epi8(-5), one = _mm256_set1_epi16(1), sum = one;
    for (long r = 0; r < rounds / WIDEN; r++) {
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) part[i] = _mm256_setzero_si256();
        for (int w = 0; w < WIDEN; w++) {
#pragma GCC unroll 8
            for (int i = 0; i < PARTS; i++) {
                __m256i pairs; /* written so, because the compiler would make one of all these equal products */
                __asm__ volatile("vpmaddubsw %3, %2, %1\n\tvpaddw %1, %0, %0"
                                 : "+x"(part[i]), "=&x"(pairs)
                                 : "x"(x), "x"(y));
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < PARTS; i++) sum = _mm256_add_epi32(sum, _mm256_madd_epi16(part[i], one));
    }
    sink += (uint64_t)_mm256_extract_epi32(sum, 0);
    return 2.0 * 32 * PARTS * (double)(rounds / WIDEN * WIDEN);
#else
    int32_t sum[CHAINS] = {0};
    volatile int8_t vx = 3, vy = -5;
    int8_t x = vx, y = vy;
    for (long r = 0; r < rounds; r++)
        for (int i = 0; i < CHAINS; i++) {
            sum[i] += x * y;
            __asm__ volatile("" : "+r"(x), "+r"(y));
        }
    for (int i = 0; i < CHAINS; i++) sink += (uint64_t)sum[i];
    return 2.0 * CHAINS * (double)rounds;
#endif
}

static double run_fma(long rounds) {
#if defined(__AVX512F__)
    __m512 sum[CHAINS], x = _mm512_set1_ps(1.0f), y = _mm512_set1_ps(1e-9f);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_set1_ps((float)i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm512_fmadd_ps(x, y, sum[i]);
        __asm__ volatile("" : "+v"(x), "+v"(y));
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm512_add_ps(sum[0], sum[i]);
    sink += (uint64_t)_mm512_reduce_add_ps(sum[0]);
    return 2.0 * 16 * CHAINS * (double)rounds;
#elif defined(__FMA__)
    __m256 sum[CHAINS], x = _mm256_set1_ps(1.0f), y = _mm256_set1_ps(1e-9f);
    for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_set1_ps((float)i);
    for (long r = 0; r < rounds; r++) {
#pragma GCC unroll 12
        for (int i = 0; i < CHAINS; i++) sum[i] = _mm256_fmadd_ps(x, y, sum[i]);
        __asm__ volatile("" : "+x"(x), "+x"(y));
    }
    for (int i = 1; i < CHAINS; i++) sum[0] = _mm256_add_ps(sum[0], sum[i]);
    sink += (uint64_t)_mm256_cvtss_f32(sum[0]);
    return 2.0 * 8 * CHAINS * (double)rounds;
#else
    float sum[CHAINS] = {0};
    volatile float vx = 1.0f, vy = 1e-9f;
    for (long r = 0; r < rounds; r++) {
        float x = vx, y = vy;
        for (int i = 0; i < CHAINS; i++) sum[i] += x * y;
    }
    for (int i = 0; i < CHAINS; i++) sink += (uint64_t)sum[i];
    return 2.0 * CHAINS * (double)rounds;
#endif
}

/* ---- measuring ---- */

typedef struct work {
    const char *name;
    double (*arithmetic)(long rounds); /* or NULL: read */
    size_t bytes;                      /* a thread, for reading */
} work;

typedef struct member {
    pthread_t thread;
    const work *work;
    pthread_barrier_t *start;
    uint8_t *data;
    double rate; /* operations or bytes a second */
} member;

static double measure(const work *w, const uint8_t *data) {
    double began = seconds(), done = 0, now;
    do {
        if (w->arithmetic) done += w->arithmetic(200000);
        else {
            sink += read_all(data, w->bytes);
            done += (double)w->bytes;
        }
        now = seconds();
    } while (now - began < ROUND_S);
    return done / (now - began);
}

static void *member_main(void *arg) {
    member *m = arg;
    if (m->data) memset(m->data, 1, m->work->bytes); /* by the thread that reads it, so that its pages are near */
    if (m->data) sink += read_all(m->data, m->work->bytes);
    pthread_barrier_wait(m->start);
    m->rate = measure(m->work, m->data);
    return NULL;
}

static uint8_t *take_memory(size_t bytes) {
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    madvise(p, bytes, MADV_HUGEPAGE);
    return p;
}

/* The rate of all threads together, as many times the slowest's; 0 when memory or threads are lacking. */
static double together(const work *w, int threads) {
    member members[MAX_THREADS] = {0};
    pthread_barrier_t start;
    int running = 0, good = 1;
    double slowest = 1e30;
    for (int i = 0; i < threads; i++) {
        members[i] = (member){.work = w, .start = &start};
        if (w->bytes && !(members[i].data = take_memory(w->bytes))) good = 0;
    }
    if (good && pthread_barrier_init(&start, NULL, (unsigned)threads) == 0) {
        while (running < threads && !pthread_create(&members[running].thread, NULL, member_main, &members[running]))
            running++;
        if (running < threads) exit(1); /* those that run wait for ever */
        for (int i = 0; i < threads; i++) {
            pthread_join(members[i].thread, NULL);
            if (members[i].rate < slowest) slowest = members[i].rate;
        }
        pthread_barrier_destroy(&start);
    }
    for (int i = 0; i < threads; i++)
        if (members[i].data) munmap(members[i].data, w->bytes);
    return running == threads ? slowest * threads : 0;
}

int main(void) {
    static const work table[] = {{"read_memory", NULL, MEMORY_BYTES},
                                 {"read_cache", NULL, CACHE_BYTES},
                                 {"int8", run_int8, 0},
                                 {"fma", run_fma, 0}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        for (int threads = 1; threads <= MAX_THREADS; threads++) {
            double best = 0;
            for (int n = 0; n < BEST_OF; n++) {
                double rate = together(&table[i], threads);
                best = rate > best ? rate : best;
            }
            printf("%s threads=%d %.1f %s\n", table[i].name, threads, best * 1e-9,
                   table[i].arithmetic ? "GOP/s" : "GB/s");
            fflush(stdout);
        }
    return 0;
}

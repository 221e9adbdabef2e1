/* A small coverage-guided driver for a libFuzzer-style target, for machines without clang.
 *
 *   gguf_fuzz SECONDS SEED FOLDER [KEEP]
 *
 * Reads every file of FOLDER, then mutates inputs until the time is over. Inputs that reach new code join the pool and,
 * with KEEP, are written to that folder. An input that ends the program is left in ./crash.bin. The target is compiled
 * with -fsanitize-coverage=trace-pc; this file is not. */
#include <dirent.h>
#include <sanitizer/common_interface_defs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
void __sanitizer_cov_trace_pc(void);

enum { MAP = 1 << 13, LARGEST = 8192, POOL = 8192 };

typedef struct input {
    uint8_t *data;
    size_t size;
} input;

static uint8_t hit[MAP], seen[MAP];
static uintptr_t previous;
static input pool[POOL];
static int n_pool;
static uint64_t random_state;
static const uint8_t *running;
static size_t running_size;

/* Called at every basic block: count the edge from the last one. */
void __sanitizer_cov_trace_pc(void) {
    uintptr_t pc = (uintptr_t)__builtin_return_address(0);
    uint8_t *edge = &hit[(pc ^ (previous >> 1)) % MAP];
    if (*edge < 255) ++*edge;
    previous = pc;
}

static uint32_t below(uint32_t n) { /* xorshift64* */
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)((random_state * 2685821657736338717u) >> 33) % n;
}

static void save(const char *path, const uint8_t *data, size_t size) {
    FILE *f = fopen(path, "wb");
    if (!f) return;
    fwrite(data, 1, size, f);
    fclose(f);
}

static void on_death(void) { save("crash.bin", running, running_size); }

/* Run one input in an exact-size copy, so that a read past the end is caught. 1 when it reached something new. */
static int run(const uint8_t *data, size_t size) {
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) return 0;
    memcpy(copy, data, size);
    running = copy;
    running_size = size;
    memset(hit, 0, sizeof hit);
    previous = 0;
    LLVMFuzzerTestOneInput(copy, size);
    free(copy);
    int new = 0;
    for (int i = 0; i < MAP; i++) {
        uint8_t n = hit[i], class = n == 0 ? 0 : n == 1 ? 1 : n < 4 ? 2 : n < 16 ? 4 : n < 64 ? 8 : 16;
        if (class & ~seen[i]) {
            seen[i] |= class;
            new = 1;
        }
    }
    return new;
}

static void join(const uint8_t *data, size_t size) {
    if (n_pool == POOL) return;
    uint8_t *copy = malloc(size ? size : 1);
    if (!copy) return;
    memcpy(copy, data, size);
    pool[n_pool++] = (input){copy, size};
}

static void load(const char *folder) {
    DIR *dir = opendir(folder);
    uint8_t data[LARGEST];
    for (struct dirent *e; dir && (e = readdir(dir));) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
        FILE *f = e->d_name[0] == '.' ? NULL : fopen(path, "rb");
        if (!f) continue;
        size_t n = fread(data, 1, sizeof data, f);
        fclose(f);
        run(data, n);
        join(data, n);
    }
    if (dir) closedir(dir);
}

/* One change: a bit, an edge value of 1, 4 or 8 bytes, a small step, a cut, a repeat, or a piece of another input. */
static size_t mutate(uint8_t *data, size_t n) {
    static const uint64_t edges[] = {0,       1,          2,          7,          8,          9,         13,   31,
                                     32,      33,         64,         127,        255,        256,       4096, 65535,
                                     65536,   0x7fffffff, 0x80000000, 0xffffffff, 1ull << 32, 1ull << 61, 1ull << 62,
                                     1ull << 63, ~0ull,   ~31ull,     (1ull << 61) + 1};
    if (n == 0) return data[0] = (uint8_t)below(256), 1;
    uint32_t at = below((uint32_t)n), len = 1 + below(n - at < 64 ? (uint32_t)(n - at) : 64);
    uint64_t edge = edges[below(sizeof edges / sizeof edges[0])];
    static const uint8_t widths[] = {1, 4, 8};
    uint32_t width = widths[below(3)];
    switch (below(7)) {
    case 0: data[at] ^= (uint8_t)(1u << below(8)); return n;
    case 1: if (at + width <= n) memcpy(data + at, &edge, width); return n;
    case 2: data[at] = (uint8_t)(data[at] + below(9) - 4); return n;
    case 3: return below(4) ? n : at;
    case 4: memmove(data + at, data + at + len, n - at - len); return n - len;
    case 5:
        if (n + len > LARGEST) return n;
        memmove(data + at + len, data + at, n - at);
        return n + len;
    default: {
        const input *other = &pool[below((uint32_t)n_pool)];
        if (!other->size) return n;
        uint32_t from = below((uint32_t)other->size);
        if (len > other->size - from) len = (uint32_t)(other->size - from);
        memcpy(data + at, other->data + from, len);
        return n;
    }
    }
}

int main(int argc, char **argv) {
    if (argc < 4) return fprintf(stderr, "usage: gguf_fuzz SECONDS SEED FOLDER [KEEP]\n"), 2;
    time_t end = time(NULL) + atol(argv[1]);
    random_state = strtoull(argv[2], NULL, 0) * 2 + 1;
    __sanitizer_set_death_callback(on_death);
    load(argv[3]);
    if (!n_pool) return fprintf(stderr, "gguf_fuzz: no files in %s\n", argv[3]), 2;
    uint64_t runs = 0;
    for (; runs % 1024 || time(NULL) < end; runs++) {
        uint8_t data[LARGEST];
        const input *from = &pool[below((uint32_t)n_pool)];
        size_t n = from->size;
        memcpy(data, from->data, n);
        for (uint32_t i = 1 + below(4); i; i--) n = mutate(data, n);
        if (!run(data, n)) continue;
        join(data, n);
        if (argc < 5) continue;
        char path[4096];
        snprintf(path, sizeof path, "%s/new-%05d.gguf", argv[4], n_pool);
        save(path, data, n);
    }
    printf("gguf_fuzz: %llu inputs, %d kept, no failure\n", (unsigned long long)runs, n_pool);
    return 0;
}

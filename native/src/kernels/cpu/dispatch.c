/* Which kernel table runs: the best the processor has, or the one that is asked for. */
#include "kernels/kernels.h"

#include "arith.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#include <stdlib.h>
#include <string.h>

static int has_avx2(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") &&
           __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

static int has_avx512(void) {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
#else
    return 0;
#endif
}

/* The processor's features by cpuid where the compiler's own test has no name for them: leaf 7.1, EAX bit 4. */
static int has_avxvnni(void) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
#else
    return 0;
#endif
}

static int always(void) { return 1; }

/* Fastest first; of two entries with one name the first that is supported. */
static const struct {
    const st_kernels *table;
    int (*supported)(void);
} TABLES[] = {
#if defined(__x86_64__)
    {&st_kernels_avx512, has_avx512},
    {&st_kernels_avxvnni, has_avxvnni},
    {&st_kernels_avxvnni_evex, has_avx512},
    {&st_kernels_avx2, has_avx2},
#endif
    {&st_kernels_scalar, always},
};

const st_kernels *st_kernels_find(const char *isa, const char **why) {
    if (!isa || !*isa) isa = getenv("STRATA_ISA");
    if (!isa || !*isa) isa = "auto";
    int known = 0;
    for (size_t i = 0; i < sizeof TABLES / sizeof *TABLES; i++) {
        if (strcmp(isa, "auto") && strcmp(isa, TABLES[i].table->isa)) continue;
        if (TABLES[i].supported()) return TABLES[i].table;
        known = 1;
    }
    if (why)
        *why = known ? "this processor does not have it; auto picks one that it has"
                     : "no such instruction set; choose auto, avx512, avxvnni, avx2 or scalar";
    return NULL;
}

int st_arith_version(void) { return ST_ARITH_VERSION; }

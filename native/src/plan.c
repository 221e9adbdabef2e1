#include "plan.h"

#include <stdio.h>
#include <string.h>

void st_plan_shape(const st_shape *shape, st_plan_in *in) {
    in->slot_fixed = st_session_fixed_bytes(shape);
    in->block = st_block_bytes(shape);
    in->draft_block = st_draft_block_bytes(shape);
    in->max_context = shape->max_context;
}

int st_plan_memory(const st_plan_in *in, st_plan_out *out) {
    uint64_t base = in->weights + in->buffers + in->prompt_cache, block = in->block + in->draft_block + 128;
    uint64_t whole = ((uint64_t)in->max_context + 63) / 64; /* blocks of one context */
    *out = (st_plan_out){0};
    for (int n = in->slots; n >= 1; n--) {
        uint64_t fixed = in->slot_fixed * (uint64_t)(n + 1); /* and the hidden slot of GEN */
        uint64_t least = whole + (uint64_t)n, most = whole * (uint64_t)(n + 1), blocks = most;
        if (in->budget) {
            if (base + fixed + least * block > in->budget) continue;
            uint64_t fit = (in->budget - base - fixed) / block;
            blocks = fit < most ? fit : most;
        }
        if (blocks > 1u << 30) blocks = 1u << 30;
        *out = (st_plan_out){.slots = n, .blocks = (int)blocks, .fixed = fixed, .pool = blocks * block, .total = base + fixed + blocks * block};
        return n;
    }
    return 0;
}

static uint64_t number_in(const char *path, const char *label) {
    char line[256];
    unsigned long long v = 0;
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    while (fgets(line, sizeof line, f)) {
        if (label && strncmp(line, label, strlen(label))) continue;
        if (sscanf(line + (label ? strlen(label) : 0), "%llu", &v) == 1) break;
        v = 0;
    }
    fclose(f);
    return v;
}

uint64_t st_plan_available(void) {
    uint64_t free_kib = number_in("/proc/meminfo", "MemAvailable:");
    uint64_t limit = number_in("/sys/fs/cgroup/memory.max", NULL), used = number_in("/sys/fs/cgroup/memory.current", NULL);
    uint64_t bytes = free_kib << 10;
    if (limit && limit > used && (!bytes || limit - used < bytes)) bytes = limit - used;
    return bytes;
}

#include "options.h"

#include "errors.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef enum kind { TEXT, INT, REAL, FLAG } kind;

static const struct {
    const char *name, *arg;
    kind kind;
    size_t at;
    int lo, hi;
    const char *choices; /* blank-separated, NULL: any text */
    const char *help;
} OPTIONS[] = {
    {"--model", "FILE", TEXT, offsetof(st_options, model), 0, 0, NULL, "GGUF model; the first file of a split one"},
    {"--max-context", "N", INT, offsetof(st_options, max_context), 1, 1 << 30, NULL, "positions of a session [the trained context]"},
    {"--allow-untrained-context", NULL, FLAG, offsetof(st_options, allow_untrained_context), 0, 0, NULL,
     "accept a --max-context beyond the trained one"},
    {"--threads", "N", INT, offsetof(st_options, threads), 1, 512, NULL, "threads that compute [one per processor]"},
    {"--isa", "NAME", TEXT, offsetof(st_options, isa), 0, 0, "auto avx512 avxvnni avx2 scalar",
     "instruction set; STRATA_ISA does the same [auto]"},
    {"--kv", "TYPE", TEXT, offsetof(st_options, kv), 0, 0, "int8 f16 f32", "type of keys and values; f16 and f32 are slow references [int8]"},
    {"--weights", "HOW", TEXT, offsetof(st_options, weights), 0, 0, "repack mapped",
     "repack for speed, or multiply out of the mapped file [repack]"},
    {"--dense", "HOW", TEXT, offsetof(st_options, dense), 0, 0, "q8_0 as-is",
     "F16 and BF16 matrices: as Q8_0, or as float32 for reference [q8_0]"},
    {"--chunk", "N", INT, offsetof(st_options, chunk), 1, 4000, NULL, "prompt tokens read at once [512]"},
    {"--parallel", "N", INT, offsetof(st_options, parallel), 1, 64, NULL, "slots: conversations that decode together; as many as fit [1]"},
    {"--batch", "N", INT, offsetof(st_options, parallel), 1, 64, NULL, "the same as --parallel"},
    {"--slots", "N", INT, offsetof(st_options, parallel), 1, 64, NULL, "the same as --parallel"},
    {"--stall-target-ms", "MS", REAL, offsetof(st_options, stall_target_ms), 1, 100000, NULL,
     "longest gap a decoding slot may see while prompts are read [250]"},
    {"--decode-share", "F", REAL, offsetof(st_options, decode_share), 0, 100, NULL,
     "decode time after a window with prompt rows, as a share of it [0.5]"},
    {"--spec", "N", INT, offsetof(st_options, spec), 0, 8, NULL, "most drafts of the model's MTP block in a window; 0: none [3]"},
    {"--spec-fixed", NULL, FLAG, offsetof(st_options, spec_fixed), 0, 0, NULL,
     "always draft --spec deep; otherwise as deep as measured costs say that it pays"},
    {"--spec-min-p", "P", REAL, offsetof(st_options, spec_min_p), 0, 1, NULL,
     "a draft less probable ends the drafts; STRATA_SPEC_PCUM=base[,deep[,d0,d1]] ends them by their product [0.5]"},
    {"--batch-mtp", NULL, FLAG, offsetof(st_options, batch_mtp), 0, 0, NULL, "accepted: drafts ride in every window anyway"},
    {"--prompt-cache-mib", "N", INT, offsetof(st_options, prompt_cache_mib), 0, 1 << 24, NULL,
     "memory for checkpoints of prompts; 0: none [256]"},
    {"--prompt-cache-every", "N", INT, offsetof(st_options, prompt_cache_every), 0, 1 << 24, NULL,
     "a checkpoint every N prompt tokens, besides turn boundaries; 0: none [4096]"},
    {"--prompt-cache-root", "N", INT, offsetof(st_options, prompt_cache_root), 1, 1 << 24, NULL,
     "a checkpoint behind the system prompt when that has N tokens or more [64]"},
    {"--memory-mib", "N", INT, offsetof(st_options, memory_mib), 0, 1 << 26, NULL,
     "memory for weights, slots and pool together; 0: nine tenths of what is free [0]"},
    {"--pool-blocks", "N", INT, offsetof(st_options, pool_blocks), 0, 1 << 30, NULL,
     "limit of the page pool, in blocks of 64 positions; 0: as planned [0]"},
    {"--bulk-fd", "N", INT, offsetof(st_options, bulk_fd), 3, 1 << 20, NULL,
     "open SOCK_SEQPACKET socket over which images of conversations travel [none]"},
    {"--self-test", "ROUNDS", INT, offsetof(st_options, self_test), 1, 1000000, NULL,
     "compare the kernels with the specification on this processor and exit"},
    {"--bench-kernels", NULL, FLAG, offsetof(st_options, bench_kernels), 0, 0, NULL, "print each kernel's speed and exit"},
    {"--version", NULL, FLAG, offsetof(st_options, version), 0, 0, NULL, "print the version and exit"},
    {"--help", NULL, FLAG, offsetof(st_options, help), 0, 0, NULL, "print this text and exit"},
};
enum { N_OPTIONS = sizeof OPTIONS / sizeof *OPTIONS };

void st_options_help(void) {
    puts("usage: strata-engine --model FILE [option ...]\n\n"
         "Runs one model and speaks the line protocol of strata-engine(8) on standard input and output;\n"
         "logs go to standard error. stratad(8) starts it; by hand, type for example\n\n"
         "  GEN 16 temperature=0 8186,284,198     then STAT, STOP or QUIT\n\n"
         "options:");
    for (int i = 0; i < N_OPTIONS; i++) {
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", OPTIONS[i].name, OPTIONS[i].arg ? " " : "", OPTIONS[i].arg ? OPTIONS[i].arg : "");
        printf("  %-27s %s%s%s\n", left, OPTIONS[i].help, OPTIONS[i].choices ? "\n                              one of: " : "",
               OPTIONS[i].choices ? OPTIONS[i].choices : "");
    }
    puts("\nexit status: 0 done, 1 failed, 2 wrong usage, 78 the model cannot be used");
}

/* How many letters must change, appear or vanish to make b of the first n letters of a (Levenshtein). */
static size_t distance(const char *a, size_t n, const char *b) {
    size_t row[32], m = strlen(b);
    for (size_t j = 0; j <= m; j++) row[j] = j;
    for (size_t i = 0; i < n; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 1; j <= m; j++) {
            size_t other = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1, same = diagonal + (a[i] != b[j - 1]);
            diagonal = row[j];
            row[j] = same < other ? same : other;
        }
    }
    return row[m];
}

static int unknown(const char *text, size_t len, st_error *err) {
    const char *best = NULL;
    size_t least = len < 8 ? 3 : 4; /* from here on it is no slip of the finger */
    for (int i = 0; i < N_OPTIONS; i++) {
        size_t d = distance(text, len, OPTIONS[i].name);
        if (d < least) least = d, best = OPTIONS[i].name;
    }
    if (best) return st_fail(err, "usage", "unknown option %.80s; did you mean %s?", text, best);
    return st_fail(err, "usage", "unknown option %.80s; strata-engine --help lists them", text);
}

static int chosen(const char *choices, const char *value) {
    size_t n = strlen(value);
    for (const char *p = choices; *p; p += strspn(p, " ")) {
        size_t len = strcspn(p, " ");
        if (len == n && !memcmp(p, value, n)) return 1;
        p += len;
    }
    return 0;
}

static int set(st_options *o, int i, const char *value, st_error *err) {
    char *at = (char *)o + OPTIONS[i].at, *end;
    if (OPTIONS[i].kind == TEXT) {
        if (!*value) return st_fail(err, "usage", "%s is empty", OPTIONS[i].name);
        if (OPTIONS[i].choices && !chosen(OPTIONS[i].choices, value))
            return st_fail(err, "usage", "%s %s: choose one of: %s", OPTIONS[i].name, value, OPTIONS[i].choices);
        *(const char **)(void *)at = value;
        return 0;
    }
    if (OPTIONS[i].kind == REAL) {
        double f = strtod(value, &end);
        if (end == value || *end || !(f >= OPTIONS[i].lo && f <= OPTIONS[i].hi))
            return st_fail(err, "usage", "%s %s: a number from %d to %d is wanted", OPTIONS[i].name, value, OPTIONS[i].lo, OPTIONS[i].hi);
        *(double *)(void *)at = f;
        return 0;
    }
    long v = strtol(value, &end, 10);
    if (end == value || *end || v < OPTIONS[i].lo || v > OPTIONS[i].hi)
        return st_fail(err, "usage", "%s %s: an integer from %d to %d is wanted", OPTIONS[i].name, value, OPTIONS[i].lo, OPTIONS[i].hi);
    *(int *)(void *)at = (int)v;
    return 0;
}

int st_options_parse(int argc, char **argv, st_options *o, st_error *err) {
    *o = (st_options){.chunk = 512, .parallel = 1, .stall_target_ms = 250, .decode_share = 0.5, .spec = 3, .spec_min_p = 0.5,
                      .prompt_cache_mib = 256, .prompt_cache_every = 4096, .prompt_cache_root = 64, .bulk_fd = -1};
    for (int a = 1; a < argc; a++) {
        const char *eq = strchr(argv[a], '=');
        size_t len = eq ? (size_t)(eq - argv[a]) : strlen(argv[a]);
        int i = 0;
        while (i < N_OPTIONS && (strlen(OPTIONS[i].name) != len || memcmp(OPTIONS[i].name, argv[a], len))) i++;
        if (i == N_OPTIONS) return unknown(argv[a], len, err);
        if (OPTIONS[i].kind == FLAG) {
            if (eq) return st_fail(err, "usage", "%s takes no value", OPTIONS[i].name);
            *(int *)(void *)((char *)o + OPTIONS[i].at) = 1;
            continue;
        }
        const char *value = eq ? eq + 1 : a + 1 < argc ? argv[++a] : NULL;
        if (!value) return st_fail(err, "usage", "%s needs a value (%s)", OPTIONS[i].name, OPTIONS[i].arg);
        if (set(o, i, value, err)) return -1;
    }
    if (!o->model && !o->help && !o->version && !o->self_test && !o->bench_kernels)
        return st_fail(err, "usage", "--model FILE is missing; strata-engine --help lists the options");
    return 0;
}

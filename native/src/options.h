/* The engine's command line: one table, from which parsing and --help are made. */
#ifndef ST_OPTIONS_H
#define ST_OPTIONS_H

#include "strata.h"

typedef struct st_options {
    const char *model, *isa, *kv, *weights, *dense;
    int max_context, threads, chunk, allow_untrained_context;
    int parallel, memory_mib, pool_blocks, prompt_cache_mib, prompt_cache_every, prompt_cache_root;
    int spec, spec_fixed, batch_mtp;
    double stall_target_ms, decode_share, spec_min_p;
    int bulk_fd;
    int self_test, bench_kernels, help, version;
} st_options;

/* Fill o from argv. -1 and err (usage) names the option and what would be right. */
int st_options_parse(int argc, char **argv, st_options *o, st_error *err);
/* Print the help text to stdout. */
void st_options_help(void);

#endif

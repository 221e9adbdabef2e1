/* strata-engine: options, loading, then the loop. */
#include "arith.h"
#include "engine.h"
#include "errors.h"
#include "options.h"
#include "output.h"
#include "protocol.h"
#include "selftest.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_CONFIG = 78 };

static int exit_status(const st_error *err) {
    if (!strcmp(err->name, "usage")) return EXIT_USAGE;
    return !strncmp(err->name, "model_", 6) ? EXIT_CONFIG : EXIT_FAILED;
}

static int give_up(const st_error *err) {
    fprintf(stderr, "strata-engine: %s\n", err->text);
    st_out_line("ERR %s %s", err->name, err->text);
    st_out_drain();
    return exit_status(err);
}

static void say_progress(void *arg, int percent) {
    int *said = arg;
    if (percent < *said + 5 && (percent != 100 || *said == 100)) return;
    *said = percent;
    st_out_line("INFO load_percent=%d", percent);
    st_out_flush();
}

static int self_test(const st_options *o) {
    st_error err = {0};
    int bad = st_selftest(o->isa, o->self_test, 1, &err);
    if (bad < 0) return give_up(&err);
    const st_kernels *k = st_kernels_find(o->isa, NULL);
    printf("self-test of %s: %s\n", k->isa, bad ? "DIFFERS from the specification" : "equals the specification bit for bit");
    return bad ? EXIT_FAILED : 0;
}

int main(int argc, char **argv) {
    st_options o;
    st_error err = {0};
    st_model *m;
    int said = -5;
    if (st_options_parse(argc, argv, &o, &err)) return give_up(&err);
    if (o.help) return st_options_help(), 0;
    if (o.version) return printf("strata-engine %s (protocol %d, arithmetic %d)\n", ST_ENGINE_VERSION, ST_PROTOCOL_VERSION, ST_ARITH_VERSION) < 0;
    if (o.self_test) return self_test(&o);
    if (o.bench_kernels) return st_selftest_bench(o.isa, &err) ? give_up(&err) : 0;
    signal(SIGPIPE, SIG_IGN);
    st_out_line("INFO engine=%s protocol=%d arithmetic=%d", ST_ENGINE_VERSION, ST_PROTOCOL_VERSION, ST_ARITH_VERSION);
    st_out_flush();
    st_model_options mo = {.path = o.model, .isa = o.isa, .threads = o.threads, .max_context = o.max_context, /* Prompt rows, and of each slot its certain row, its drafts, and the drafter's row ahead of them. */
                           .max_rows = o.chunk + (o.parallel + 1) * (2 + ST_MAX_DRAFTS),
                           .kv = st_kv_find(o.kv), .allow_untrained_context = o.allow_untrained_context,
                           .weights = {.mapped = o.weights && !strcmp(o.weights, "mapped"), .dense_as_is = o.dense && !strcmp(o.dense, "as-is")},
                           .progress = say_progress, .arg = &said};
    if (st_model_open(&mo, &m, &err)) return give_up(&err);
    say_progress(&said, 100);
    st_out_line("INFO arch=%s", m->arch->name);
    int status = st_engine_serve(m, &o);
    st_model_close(m);
    return status;
}

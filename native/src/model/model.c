#include "model/model.h"

#include "errors.h"
#include "model/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const st_arch *const ARCHS[] = {&st_arch_llama, &st_arch_qwen35moe};

static const st_arch *find_arch(const st_gguf *g, st_error *err) {
    st_gguf_str name;
    int found = st_gguf_get_str(g, "general.architecture", &name, err);
    if (found < 0) return NULL;
    if (!found) {
        st_fail(err, "model_format", "key general.architecture is missing");
        return NULL;
    }
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS; i++)
        if (strlen(ARCHS[i]->name) == name.len && !memcmp(ARCHS[i]->name, name.ptr, name.len)) return ARCHS[i];
    char known[256] = "";
    for (size_t i = 0; i < sizeof ARCHS / sizeof *ARCHS; i++) {
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", ARCHS[i]->name);
    }
    st_fail(err, "model_unsupported", "architecture %.*s is not one of: %s", (int)(name.len > 64 ? 64 : name.len), name.ptr, known);
    return NULL;
}

static void full_key(const st_model *m, const char *suffix, char *key, size_t n) {
    snprintf(key, n, "%s.%s", m->arch->name, suffix);
}

int st_model_int(const st_model *m, const char *suffix, int64_t lo, int64_t hi, int64_t fallback, int *out, st_error *err) {
    char key[128];
    full_key(m, suffix, key, sizeof key);
    int64_t v = fallback;
    int found = st_gguf_get_i64(m->gguf, key, &v, err);
    if (found < 0) return -1;
    if (!found && fallback < 0) return st_fail(err, "model_format", "key %s is missing", key);
    if (v < lo || v > hi)
        return st_fail(err, "model_format", "key %s is %lld; %lld to %lld can be", key, (long long)v, (long long)lo, (long long)hi);
    *out = (int)v;
    return 0;
}

int st_model_float(const st_model *m, const char *suffix, double fallback, double *out, st_error *err) {
    char key[128];
    full_key(m, suffix, key, sizeof key);
    double v = fallback;
    int found = st_gguf_get_f64(m->gguf, key, &v, err);
    if (found < 0) return -1;
    if (!found && fallback < 0) return st_fail(err, "model_format", "key %s is missing", key);
    if (!(v > 0.0 && v < 1e30)) return st_fail(err, "model_format", "key %s is %g; a positive number can be", key, v);
    *out = v;
    return 0;
}

static int choose_context(st_model *m, const st_model_options *o, st_error *err) {
    if (st_model_int(m, "context_length", 1, 1 << 30, -1, &m->trained_context, err)) return -1;
    int context = o->max_context ? o->max_context : m->trained_context;
    if (context > m->trained_context && !o->allow_untrained_context)
        return st_fail(err, "usage",
                       "--max-context %d is beyond the trained context of %d; give --allow-untrained-context to try it", context,
                       m->trained_context);
    m->shape.max_context = context;
    return 0;
}

static int open_parts(st_model *m, const st_model_options *o, st_error *err) {
    st_gguf *g;
    const char *why = "";
    if (!(m->kernels = st_kernels_find(o->isa, &why)))
        return st_fail(err, "usage", "--isa %s: %s", o->isa && *o->isa ? o->isa : "(from STRATA_ISA)", why);
    if (st_gguf_open(o->path, &g, err)) return -1;
    m->gguf = g;
    if (!(m->arch = find_arch(g, err))) return -1;
    if (choose_context(m, o, err)) return -1;
    m->max_rows = o->max_rows ? o->max_rows : 512;
    m->shape.kv = o->kv;
    if (!(m->team = st_team_new(o->threads ? o->threads : st_team_processors(), err))) return -1;
    m->dense = o->weights.dense_as_is ? "as-is" : "q8_0";
    if (!(m->weights = st_weights_new(g, m->kernels, o->weights, o->progress, o->arg, err))) return -1;
    st_gguf_fingerprint(g, m->fingerprint);
    if (m->arch->load(m, err)) return -1;
    st_weights_settle(m->weights);
    return 0;
}

int st_model_open(const st_model_options *o, st_model **out, st_error *err) {
    st_model *m = calloc(1, sizeof *m);
    if (!m) return st_fail(err, "no_memory", "no memory for a model");
    if (open_parts(m, o, err)) {
        st_model_close(m);
        return -1;
    }
    *out = m;
    return 0;
}

void st_model_close(st_model *m) {
    if (!m) return;
    if (m->arch && m->self) m->arch->release(m);
    st_team_free(m->team);
    st_weights_free(m->weights);
    st_gguf_close((st_gguf *)m->gguf);
    free(m);
}

typedef struct job {
    st_model *m;
    const void *what;
} job;

static void forward_member(void *arg, int member, int size) {
    job *j = arg;
    j->m->arch->forward(j->m, j->what, member, size);
}

static void draft_member(void *arg, int member, int size) {
    job *j = arg;
    j->m->arch->draft(j->m, j->what, member, size);
}

void st_model_forward(st_model *m, const st_window *w) { st_team_run(m->team, forward_member, &(job){m, w}); }
void st_model_draft(st_model *m, const st_draft *d) { st_team_run(m->team, draft_member, &(job){m, d}); }

void st_model_keep(const st_run *run, int kept) {
    st_session *s = run->session;
    memcpy(s->ids + s->n, run->ids, (size_t)kept * sizeof *s->ids);
    s->n += kept;
    s->pending = s->shape.recurrent_layers ? kept - run->certain : 0;
}

void st_model_settle(st_model *m, st_session *s) {
    if (s->pending) m->arch->settle(m, s);
    s->pending = 0;
}

#include "model/weights.h"

#include "arith.h"
#include "errors.h"
#include "kernels/kernels.h"
#include "model/gguf.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

struct block {
    struct block *next;
    void *data;
    size_t bytes;
};

/* Which forms the matrices of one input width want. */
typedef struct width {
    int k, forms;
} width;

enum { MAX_WIDTHS = 32 };

struct st_weights {
    const st_gguf *g;
    const st_kernels *table;
    st_weights_how how;
    width widths[MAX_WIDTHS];
    int n_widths;
    struct block *blocks;
    size_t held;
    uint64_t done, total;
    int percent;
    void (*progress)(void *, int);
    void *arg;
};

enum { HUGE_PAGE = 2 << 20 };

static void *room(st_weights *w, size_t bytes, st_error *err) {
    struct block *b = malloc(sizeof *b);
    if (b) {
        b->bytes = bytes;
        b->data = NULL;
        if (posix_memalign(&b->data, bytes >= HUGE_PAGE ? HUGE_PAGE : 64, bytes ? bytes : 1)) b->data = NULL;
    }
    if (!b || !b->data) {
        free(b);
        st_fail(err, "no_memory", "no memory for %zu MiB of weights (%zu MiB are loaded)", bytes >> 20, w->held >> 20);
        return NULL;
    }
    if (bytes >= HUGE_PAGE) (void)madvise(b->data, bytes, MADV_HUGEPAGE);
    b->next = w->blocks;
    w->blocks = b;
    w->held += bytes;
    return b->data;
}

st_weights *st_weights_new(const st_gguf *g, const st_kernels *table, st_weights_how how, void (*progress)(void *, int),
                           void *arg, st_error *err) {
    st_weights *w = calloc(1, sizeof *w);
    if (!w) {
        st_fail(err, "no_memory", "no memory for the weights");
        return NULL;
    }
    w->g = g;
    w->table = table;
    w->how = how;
    w->progress = progress;
    w->arg = arg;
    w->percent = -1;
    for (uint64_t i = 0; i < st_gguf_n_tensors(g); i++) w->total += st_gguf_tensor_at(g, i)->nbytes;
    return w;
}

void st_weights_free(st_weights *w) {
    if (!w) return;
    while (w->blocks) {
        struct block *b = w->blocks;
        w->blocks = b->next;
        free(b->data);
        free(b);
    }
    free(w);
}

size_t st_weights_bytes(const st_weights *w) { return w->held; }

int st_weights_has(const st_weights *w, const char *name) { return st_gguf_tensor_find(w->g, name) != NULL; }

float *st_weights_room(st_weights *w, size_t n, st_error *err) {
    float *p = room(w, n * sizeof *p, err);
    if (p) memset(p, 0, n * sizeof *p);
    return p;
}

static void advance(st_weights *w, uint64_t bytes) {
    w->done += bytes;
    int percent = w->total ? (int)(w->done * 100 / w->total) : 100;
    if (percent > 100) percent = 100;
    if (percent == w->percent || !w->progress) return;
    w->percent = percent;
    w->progress(w->arg, percent);
}

static const st_gguf_tensor *find(const st_weights *w, const char *name, int64_t k, int64_t n, int64_t experts, st_error *err) {
    const st_gguf_tensor *t = st_gguf_tensor_find(w->g, name);
    if (!t) {
        st_fail(err, "model_format", "tensor %s is missing", name);
        return NULL;
    }
    int64_t want[3] = {k, n, experts ? experts : 1};
    for (int i = 0; i < ST_GGUF_MAX_DIMS; i++)
        if (t->ne[i] != (i < 3 ? want[i] : 1)) {
            st_fail(err, "model_format", "tensor %s has shape [%lld, %lld, %lld], the metadata asks for [%lld, %lld, %lld]",
                    name, (long long)t->ne[0], (long long)t->ne[1], (long long)t->ne[2], (long long)want[0],
                    (long long)want[1], (long long)want[2]);
            return NULL;
        }
    return t;
}

int st_gguf_refuse_type(const st_gguf_tensor *t, st_error *err) {
    const st_ggml_type *type = st_ggml_type_find(t->type);
    char list[256] = "F32, F16, BF16";
    for (int i = 0; i < ST_WEIGHT_TYPES; i++) {
        size_t used = strlen(list);
        snprintf(list + used, sizeof list - used, ", %s", st_weight_type_at(i)->name);
    }
    return st_fail(err, "model_unsupported", "tensor %s has type %s (id %d); this version reads %s", t->name,
                   type ? type->name : "?", t->type, list);
}

static int is_float(int ggml_id) { return ggml_id == ST_GGML_F32 || ggml_id == ST_GGML_F16 || ggml_id == ST_GGML_BF16; }

static int not_finite(const st_gguf_tensor *t, int64_t at, st_error *err) {
    return st_fail(err, "model_format", "tensor %s holds a value that is not finite (at %lld)", t->name, (long long)at);
}

/* Rows [r, r + n) of a tensor of floats, all experts counted as one matrix; they must be finite. */
static int float_rows(const st_gguf_tensor *t, int64_t r, int n, float *out, st_error *err) {
    int64_t k = t->ne[0];
    for (int i = 0; i < n; i++) st_gguf_row_f32(t, r + i, out + i * k);
    for (int64_t i = 0; i < k * n; i++)
        if (!(out[i] >= -3.4028235e38f && out[i] <= 3.4028235e38f)) return not_finite(t, r * k + i, err);
    return 0;
}

static int note_width(st_weights *w, const st_mat *m, st_error *err) {
    int i = 0;
    while (i < w->n_widths && w->widths[i].k != m->k) i++;
    if (i == MAX_WIDTHS) return st_fail(err, "model_unsupported", "matrices have more than %d different widths", MAX_WIDTHS);
    if (i == w->n_widths) w->widths[w->n_widths++] = (width){m->k, 0};
    w->widths[i].forms |= m->form;
    return 0;
}

int st_weights_forms(const st_weights *w, int k) {
    for (int i = 0; i < w->n_widths; i++)
        if (w->widths[i].k == k) return w->widths[i].forms;
    return 0;
}

/* Pages of a tensor that have been read and will not be read again. A mere hint: the rest works without. */
static void give_back(const st_weights *w, const st_gguf_tensor *t, uint64_t from, uint64_t to) {
    st_error ignored;
    (void)st_gguf_advise_range(w->g, t, from, to - from, MADV_DONTNEED, &ignored);
}

void st_weights_settle(const st_weights *w) {
    for (uint64_t i = 0; i < st_gguf_n_tensors(w->g) && !w->how.mapped; i++) {
        const st_gguf_tensor *t = st_gguf_tensor_at(w->g, i);
        give_back(w, t, 0, t->nbytes);
    }
}

/* 16 rows as the kernels' type has them in a file: out of the file, or made of floats (scratch: 16 rows of floats,
 * then of blocks). */
static const uint8_t *group_rows(const st_gguf_tensor *t, int64_t group, float *scratch, st_error *err) {
    if (!is_float(t->type)) return t->data + (uint64_t)group * ST_LANES * t->row_bytes;
    int64_t k = t->ne[0];
    uint8_t *out = (uint8_t *)(scratch + k * ST_LANES), *p = out;
    if (float_rows(t, group * ST_LANES, ST_LANES, scratch, err)) return NULL;
    for (int64_t i = 0; i < k * ST_LANES; i += ST_QBLOCK, p += 34) {
        uint16_t d = st_quantize_weights(scratch + i, (int8_t *)p + 2);
        p[0] = (uint8_t)d;
        p[1] = (uint8_t)(d >> 8);
    }
    return out;
}

/* Groups are packed in order; pages and progress follow every megabyte or so. */
static int pack(st_weights *w, const st_gguf_tensor *t, st_mat *m, st_error *err) {
    enum { STEP = 1 << 20 };
    int64_t groups = (int64_t)(m->n / ST_LANES) * m->experts;
    uint64_t source = t->row_bytes * ST_LANES, done = 0;
    size_t row_bytes = is_float(t->type) ? (size_t)m->k / 32 * 34 : (size_t)t->row_bytes;
    uint8_t *packed = room(w, m->group_bytes * (size_t)groups, err);
    float *scratch = NULL;
    if (!packed) return -1;
    if (is_float(t->type) && !(scratch = malloc((size_t)m->k * ST_LANES * (sizeof(float) + 2))))
        return st_fail(err, "no_memory", "no memory to convert tensor %s", t->name);
    m->data = packed;
    for (int64_t i = 0; i < groups; i++) {
        const uint8_t *rows = group_rows(t, i, scratch, err);
        if (!rows) break;
        st_pack_group(w->table, m->type, rows, row_bytes, ST_LANES, m->k, packed + m->group_bytes * (size_t)i);
        uint64_t at = source * (uint64_t)(i + 1);
        if (at - done < STEP && i < groups - 1) continue;
        give_back(w, t, done, at);
        advance(w, at - done);
        done = at;
    }
    free(scratch);
    return done == source * (uint64_t)groups ? 0 : -1;
}

/* Rows of float32: the file's own, or widened. */
static int keep_floats(st_weights *w, const st_gguf_tensor *t, st_mat *m, st_error *err) {
    int64_t rows = (int64_t)m->n * m->experts;
    m->storage = ST_FLOATS;
    m->form = 0;
    m->group_bytes = (size_t)m->k * ST_LANES * sizeof(float);
    m->data = t->data;
    if (!w->how.mapped || t->type != ST_GGML_F32) {
        float *copy = room(w, (size_t)m->k * (size_t)rows * sizeof *copy, err);
        if (!copy) return -1;
        for (int64_t r = 0; r < rows; r += ST_LANES)
            if (float_rows(t, r, ST_LANES, copy + r * m->k, err)) return -1;
        m->data = (const uint8_t *)copy;
        give_back(w, t, 0, t->nbytes);
    }
    advance(w, t->nbytes);
    return note_width(w, m, err);
}

int st_weights_mat(st_weights *w, const char *name, int k, int n, int experts, st_mat *out, st_error *err) {
    const st_gguf_tensor *t = find(w, name, k, n, experts, err);
    if (!t) return -1;
    if (n % ST_LANES)
        return st_fail(err, "model_unsupported", "tensor %s has %d rows; they must be a multiple of %d", name, n, ST_LANES);
    int kept = t->type == ST_GGML_F32 || (is_float(t->type) && w->how.dense_as_is);
    *out = (st_mat){.type = is_float(t->type) ? ST_W_Q8_0 : st_weight_find(t->type), .storage = ST_PACKED, .n = n, .k = k,
                    .experts = experts ? experts : 1};
    if (out->type < 0) return st_gguf_refuse_type(t, err);
    if (kept) return keep_floats(w, t, out, err);
    out->form = st_weight_type_at(out->type)->form;
    if (k % st_weight_type_at(out->type)->block)
        return st_fail(err, "model_unsupported", "tensor %s has rows of %d values; to be held as %s they must be a multiple of %d",
                       name, k, st_weight_type_at(out->type)->name, st_weight_type_at(out->type)->block);
    if (note_width(w, out, err)) return -1;
    if (w->how.mapped && !is_float(t->type)) {
        out->storage = ST_MAPPED;
        out->group_bytes = (size_t)t->row_bytes * ST_LANES;
        out->data = t->data;
        advance(w, t->nbytes);
        return 0;
    }
    out->group_bytes = st_pack_group_bytes(out->type, k);
    return pack(w, t, out, err);
}

int st_gguf_row_readable(const st_gguf_tensor *t) { return is_float(t->type) || st_weight_find(t->type) >= 0; }

void st_gguf_row_f32(const st_gguf_tensor *t, int64_t row, float *out) {
    const uint8_t *p = t->data + (uint64_t)row * t->row_bytes;
    int k = (int)t->ne[0];
    const st_weight_type *type = st_weight_type_at(st_weight_find(t->type));
    if (type)
        for (int i = 0; i < k; i += type->block, p += type->block_bytes) type->floats(p, out + i);
    else if (t->type == ST_GGML_F32) memcpy(out, p, (size_t)k * 4);
    else if (t->type == ST_GGML_F16)
        for (int i = 0; i < k; i++) out[i] = st_half_at(p + 2 * i);
    else if (t->type == ST_GGML_BF16)
        for (int i = 0; i < k; i++) out[i] = st_bits2f((uint32_t)(p[2 * i] | p[2 * i + 1] << 8) << 16);
    else memset(out, 0, (size_t)k * 4);
}

int st_weights_f32(st_weights *w, const char *name, int k, int rows, float **out, st_error *err) {
    const st_gguf_tensor *t = find(w, name, k, rows, 0, err);
    if (!t) return -1;
    if (!st_gguf_row_readable(t)) return st_gguf_refuse_type(t, err);
    float *p = room(w, (size_t)k * (size_t)rows * sizeof *p, err);
    if (!p || float_rows(t, 0, rows, p, err)) return -1;
    *out = p;
    advance(w, t->nbytes);
    return 0;
}

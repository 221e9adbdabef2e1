#include "model/weights.h"

#include "arith.h"
#include "errors.h"
#include "kernels/kernels.h"
#include "model/gguf.h"

#include <stdlib.h>
#include <sys/mman.h>

struct block {
    struct block *next;
    void *data;
    size_t bytes;
};

struct st_weights {
    const st_gguf *g;
    const st_kernels *table;
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

st_weights *st_weights_new(const st_gguf *g, const st_kernels *table, void (*progress)(void *, int), void *arg, st_error *err) {
    st_weights *w = calloc(1, sizeof *w);
    if (!w) {
        st_fail(err, "no_memory", "no memory for the weights");
        return NULL;
    }
    w->g = g;
    w->table = table;
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

static int unsupported(const st_gguf_tensor *t, const char *types, st_error *err) {
    const st_ggml_type *type = st_ggml_type_find(t->type);
    return st_fail(err, "model_unsupported", "tensor %s has type %s (id %d); this version reads %s here", t->name,
                   type ? type->name : "?", t->type, types);
}

int st_weights_mat(st_weights *w, const char *name, int k, int n, int experts, st_mat *out, st_error *err) {
    const st_gguf_tensor *t = find(w, name, k, n, experts, err);
    if (!t) return -1;
    if (n % ST_LANES)
        return st_fail(err, "model_unsupported", "tensor %s has %d rows; they must be a multiple of %d", name, n, ST_LANES);
    int count = experts ? experts : 1, groups = n / ST_LANES;
    *out = (st_mat){.type = t->type, .n = n, .k = k, .experts = count};
    if (t->type == ST_GGML_F32) {
        out->group_bytes = (size_t)t->row_bytes * ST_LANES;
        uint8_t *copy = room(w, (size_t)t->nbytes, err);
        if (!copy) return -1;
        memcpy(copy, t->data, (size_t)t->nbytes);
        out->data = copy;
        advance(w, t->nbytes);
        return 0;
    }
    out->group_bytes = st_pack_group_bytes(t->type, k);
    if (!out->group_bytes) return unsupported(t, "F32, Q8_0 and Q4_0", err);
    uint8_t *packed = room(w, out->group_bytes * (size_t)groups * (size_t)count, err);
    if (!packed) return -1;
    out->data = packed;
    size_t source = (size_t)t->row_bytes * ST_LANES;
    for (int i = 0; i < groups * count; i++) {
        st_pack_group(w->table, t->type, t->data + source * (size_t)i, (size_t)t->row_bytes, ST_LANES, k, packed + out->group_bytes * (size_t)i);
        if (i % 64 == 63 || i == groups * count - 1) advance(w, source * (size_t)(i % 64 + 1));
    }
    return 0;
}

void st_gguf_row_f32(const st_gguf_tensor *t, int64_t row, float *out) {
    const uint8_t *p = t->data + (uint64_t)row * t->row_bytes;
    int k = (int)t->ne[0];
    switch (t->type) {
    case ST_GGML_F32: memcpy(out, p, (size_t)k * 4); break;
    case ST_GGML_F16:
        for (int i = 0; i < k; i++) out[i] = st_h2f((uint16_t)(p[2 * i] | p[2 * i + 1] << 8));
        break;
    case ST_GGML_BF16:
        for (int i = 0; i < k; i++) out[i] = st_bits2f((uint32_t)(p[2 * i] | p[2 * i + 1] << 8) << 16);
        break;
    case ST_GGML_Q8_0:
        for (int b = 0; b < k / 32; b++, p += 34) {
            float d = st_h2f((uint16_t)(p[0] | p[1] << 8));
            for (int i = 0; i < 32; i++) *out++ = d * (float)(int8_t)p[2 + i];
        }
        break;
    case ST_GGML_Q4_0:
        for (int b = 0; b < k / 32; b++, p += 18, out += 32) {
            float d = st_h2f((uint16_t)(p[0] | p[1] << 8));
            for (int i = 0; i < 16; i++) {
                out[i] = d * (float)((p[2 + i] & 15) - 8);
                out[i + 16] = d * (float)((p[2 + i] >> 4) - 8);
            }
        }
        break;
    default: memset(out, 0, (size_t)k * 4);
    }
}

static int readable_rows(int type) {
    return type == ST_GGML_F32 || type == ST_GGML_F16 || type == ST_GGML_BF16 || type == ST_GGML_Q8_0 || type == ST_GGML_Q4_0;
}

int st_weights_f32(st_weights *w, const char *name, int k, int rows, float **out, st_error *err) {
    const st_gguf_tensor *t = find(w, name, k, rows, 0, err);
    if (!t) return -1;
    if (!readable_rows(t->type)) return unsupported(t, "F32, F16, BF16, Q8_0 and Q4_0", err);
    float *p = room(w, (size_t)k * (size_t)rows * sizeof *p, err);
    if (!p) return -1;
    for (int r = 0; r < rows; r++) st_gguf_row_f32(t, r, p + (size_t)r * (size_t)k);
    for (int64_t i = 0; i < (int64_t)k * rows; i++)
        if (!(p[i] >= -3.4028235e38f && p[i] <= 3.4028235e38f))
            return st_fail(err, "model_format", "tensor %s holds a value that is not finite (at %lld)", name, (long long)i);
    *out = p;
    advance(w, t->nbytes);
    return 0;
}

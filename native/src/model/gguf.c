/* GGUF v2 and v3, single and split files, over mmap.
 *
 * The file is untrusted. Everything is reached through a cursor that knows where the file ends; counts are compared
 * with what the rest of the file can hold before anything is allocated, and allocations grow with what was really
 * read. The layout:
 *
 *   "GGUF"  u32 version  u64 n_tensors  u64 n_kv
 *   n_kv x      string key, u32 type, value                 (string = u64 length + bytes; array = u32 type, u64 n, ...)
 *   n_tensors x string name, u32 n_dims, u64 ne[n_dims], u32 type, u64 offset
 *   padding to general.alignment, then the data that the offsets count from
 */
#include "gguf.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "values are read as stored: little-endian hosts only");

enum {
    FIXED_HEADER = 24,
    MIN_KV_BYTES = 8 + 1 + 4 + 1,
    MIN_TENSOR_BYTES = 8 + 1 + 4 + 8 + 4 + 8,
    LABEL_BYTES = 160,
    CHUNK_BYTES = 1 << 16
};

/* Where the parser stands, and the words for it in messages. */
typedef struct cursor {
    st_gguf *g;
    st_gguf_shard *s;
    st_error *err;
    uint64_t pos;
    const char *section; /* "key" or "tensor"; NULL outside both lists */
    uint64_t index, total;
    const char *name; /* of the entry, once it is known */
} cursor;

/* ---- messages ---- */

static int no_memory(st_error *err, const char *label) {
    return st_fail(err, "no_memory", "%s: not enough memory to read the file's tables", label);
}

/* Fail at the cursor: "FILE: key 'x': ..." or "FILE: tensor 3 of 40: ...". */
__attribute__((format(printf, 3, 4))) static int bad(const cursor *c, const char *error, const char *fmt, ...) {
    char text[512];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    if (!c->section) return st_fail(c->err, error, "%s: %s", c->s->label, text);
    if (c->name) return st_fail(c->err, error, "%s: %s '%.100s': %s", c->s->label, c->section, c->name, text);
    return st_fail(c->err, error, "%s: %s %" PRIu64 " of %" PRIu64 ": %s", c->s->label, c->section, c->index + 1,
                   c->total, text);
}

/* ---- memory ---- */

struct st_gguf_chunk {
    st_gguf_chunk *next;
    size_t used, room;
    _Alignas(8) uint8_t bytes[];
};

/* n bytes, aligned to 8, freed with the model; NULL without memory. */
static void *keep(st_gguf *g, size_t n) {
    n = (n + 7) & ~(size_t)7;
    if (!g->chunks || g->chunks->room - g->chunks->used < n) {
        size_t room = n > CHUNK_BYTES ? n : CHUNK_BYTES;
        st_gguf_chunk *chunk = malloc(sizeof *chunk + room);
        if (!chunk) return NULL;
        *chunk = (st_gguf_chunk){.next = g->chunks, .room = room};
        g->chunks = chunk;
    }
    void *out = g->chunks->bytes + g->chunks->used;
    g->chunks->used += n;
    return out;
}

static const char *keep_text(st_gguf *g, const char *text, size_t len) {
    char *copy = keep(g, len + 1);
    if (!copy) return NULL;
    memcpy(copy, text, len);
    copy[len] = 0;
    return copy;
}

/* The array with room for one more of `size` bytes behind its n (doubling); NULL without memory, array untouched. */
static void *grown(void *array, uint64_t n, uint64_t *room, size_t size) {
    if (n < *room) return array;
    uint64_t more = *room ? *room * 2 : 16;
    void *bigger = more > SIZE_MAX / size ? NULL : realloc(array, (size_t)more * size);
    if (bigger) *room = more;
    return bigger;
}

/* ---- reading ---- */

static uint64_t left(const cursor *c) { return c->s->size - c->pos; }

/* The next n bytes, or NULL when the file ends before; `field` names them. */
static const uint8_t *take(cursor *c, uint64_t n, const char *field) {
    if (n > left(c)) {
        bad(c, "model_format",
            "%s needs %" PRIu64 " bytes at byte %" PRIu64 ", but the file ends at byte %" PRIu64
            " (damaged, or not downloaded completely)",
            field, n, c->pos, c->s->size);
        return NULL;
    }
    const uint8_t *p = c->s->base + c->pos;
    c->pos += n;
    return p;
}

static int take_u32(cursor *c, uint32_t *out, const char *field) {
    const uint8_t *p = take(c, 4, field);
    if (!p) return -1;
    memcpy(out, p, 4);
    return 0;
}

static int take_u64(cursor *c, uint64_t *out, const char *field) {
    const uint8_t *p = take(c, 8, field);
    if (!p) return -1;
    memcpy(out, p, 8);
    return 0;
}

/* A key or a tensor name: 1..max bytes of UTF-8 without control characters; copied and terminated. */
static const char *take_name(cursor *c, uint64_t max, const char *field) {
    uint64_t len;
    if (take_u64(c, &len, field) < 0) return NULL;
    if (len < 1 || len > max) {
        bad(c, "model_format", "%s has a length of %" PRIu64 "; 1 to %" PRIu64 " bytes are allowed", field, len, max);
        return NULL;
    }
    const unsigned char *p = take(c, len, field);
    if (!p) return NULL;
    uint32_t point;
    for (uint64_t i = 0; i < len;) {
        int step = st_utf8_char(p + i, (size_t)(len - i), &point);
        if (!step || point < 0x20 || point == 0x7f) {
            bad(c, "model_format", "%s '%.*s' is not plain UTF-8 text", field, len > 100 ? 100 : (int)len,
                (const char *)p);
            return NULL;
        }
        i += (uint64_t)step;
    }
    const char *name = keep_text(c->g, (const char *)p, (size_t)len);
    if (!name) no_memory(c->err, c->s->label);
    return name;
}

/* ---- metadata ---- */

/* Bytes of one value of a fixed size, 0 for strings and arrays; indexed by enum st_gguf_type. */
static const uint8_t VALUE_BYTES[13] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

/* Walk kv->count strings, so that every one is known to lie inside the file, and leave marks for lookups. */
static int parse_strings(cursor *c, st_gguf_kv *kv) {
    uint64_t n_marks = kv->count / ST_GGUF_MARK_EVERY + 1, start = c->pos, len;
    uint64_t *marks = keep(c->g, (size_t)n_marks * sizeof *marks); /* count is bounded: 8 bytes of file each */
    if (!marks) return no_memory(c->err, c->s->label);
    for (uint64_t i = 0; i < kv->count; i++) {
        if (i % ST_GGUF_MARK_EVERY == 0) marks[i / ST_GGUF_MARK_EVERY] = c->pos - start;
        if (take_u64(c, &len, "the length of a string") < 0 || !take(c, len, "a string")) return -1;
    }
    kv->marks = marks;
    return 0;
}

/* Type and count of an array. */
static int parse_array_head(cursor *c, st_gguf_kv *kv) {
    uint32_t type;
    if (take_u32(c, &type, "the array's type") < 0 || take_u64(c, &kv->count, "the array's length") < 0) return -1;
    if (type == ST_GGUF_ARRAY) return bad(c, "model_unsupported", "arrays of arrays are not supported");
    if (!st_gguf_type_name(type)) return bad(c, "model_format", "the array's type %" PRIu32 " does not exist", type);
    kv->elem_type = (int)type;
    uint64_t smallest = type == ST_GGUF_STRING ? 8 : VALUE_BYTES[type];
    if (kv->count > left(c) / smallest)
        return bad(c, "model_format",
                   "the array's length %" PRIu64 " is more than the rest of the file can hold (%" PRIu64 ")", kv->count,
                   left(c) / smallest);
    return 0;
}

static int parse_value(cursor *c, st_gguf_kv *kv) {
    uint32_t type;
    if (take_u32(c, &type, "the type") < 0) return -1;
    if (!st_gguf_type_name(type)) return bad(c, "model_format", "the type %" PRIu32 " does not exist", type);
    kv->type = kv->elem_type = (int)type;
    kv->count = 1;
    if (type == ST_GGUF_ARRAY && parse_array_head(c, kv) < 0) return -1;
    uint64_t start = c->pos;
    kv->data = c->s->base + start;
    if (kv->elem_type == ST_GGUF_STRING) {
        if (parse_strings(c, kv) < 0) return -1;
    } else if (!take(c, kv->count * VALUE_BYTES[kv->elem_type], "the value")) { /* no overflow: count was bounded */
        return -1;
    }
    kv->nbytes = c->pos - start;
    return 0;
}

static int by_key(const void *a, const void *b) {
    const st_gguf_kv *const *x = a, *const *y = b;
    return strcmp((*x)->key, (*y)->key);
}

/* The sorted view of a shard's keys; a key that appears twice is an error. */
static int index_keys(cursor *c) {
    st_gguf_shard *s = c->s;
    c->section = NULL;
    s->kv_by_key = malloc((size_t)(s->n_kv + 1) * sizeof *s->kv_by_key);
    if (!s->kv_by_key) return no_memory(c->err, s->label);
    for (uint64_t i = 0; i < s->n_kv; i++) s->kv_by_key[i] = &s->kv[i];
    qsort(s->kv_by_key, (size_t)s->n_kv, sizeof *s->kv_by_key, by_key);
    for (uint64_t i = 1; i < s->n_kv; i++) {
        if (strcmp(s->kv_by_key[i - 1]->key, s->kv_by_key[i]->key) == 0)
            return bad(c, "model_format", "the key '%.100s' appears twice", s->kv_by_key[i]->key);
    }
    return 0;
}

static int parse_metadata(cursor *c, uint64_t n_kv) {
    uint64_t room = 0;
    c->section = "key";
    c->total = n_kv;
    for (c->index = 0; c->index < n_kv; c->index++) {
        c->name = NULL;
        st_gguf_kv *bigger = grown(c->s->kv, c->s->n_kv, &room, sizeof *bigger);
        if (!bigger) return no_memory(c->err, c->s->label);
        c->s->kv = bigger;
        st_gguf_kv *kv = &bigger[c->s->n_kv];
        *kv = (st_gguf_kv){0};
        c->name = kv->key = take_name(c, ST_GGUF_MAX_KEY, "the key");
        if (!kv->key || parse_value(c, kv) < 0) return -1;
        c->s->n_kv++;
    }
    return index_keys(c);
}

/* ---- tensors ---- */

/* Sizes that follow from the type and the dimensions. */
static int size_tensor(cursor *c, st_gguf_tensor *t) {
    const st_ggml_type *type = st_ggml_type_find(t->type);
    if (!type) return bad(c, "model_unsupported", "the tensor type with id %d is not known to this version", t->type);
    int64_t values = 1;
    for (int d = 0; d < t->n_dims; d++) {
        if (t->ne[d] < 1)
            return bad(c, "model_format", "dimension %d is %" PRIu64 "; it must be 1 to 2^63-1", d, (uint64_t)t->ne[d]);
        if (__builtin_mul_overflow(values, t->ne[d], &values))
            return bad(c, "model_format", "the dimensions multiply to more than 2^63 values");
    }
    if (t->ne[0] % type->block_size)
        return bad(c, "model_format", "dimension 0 is %" PRId64 "; type %s needs a multiple of %" PRIu32, t->ne[0],
                   type->name, type->block_size);
    uint64_t rows = (uint64_t)(values / t->ne[0]);
    if (__builtin_mul_overflow((uint64_t)t->ne[0] / type->block_size, (uint64_t)type->block_bytes, &t->row_bytes) ||
        __builtin_mul_overflow(t->row_bytes, rows, &t->nbytes))
        return bad(c, "model_format", "the dimensions give more than 2^64 bytes");
    return 0;
}

/* One entry of the tensor table; t->offset still counts from the start of the data. */
static int parse_tensor(cursor *c, st_gguf_tensor *t) {
    uint32_t n_dims, type;
    *t = (st_gguf_tensor){.ne = {1, 1, 1, 1}, .shard = c->g->n_shards};
    c->name = t->name = take_name(c, ST_GGUF_MAX_NAME, "the name");
    if (!t->name || take_u32(c, &n_dims, "the number of dimensions") < 0) return -1;
    if (n_dims < 1 || n_dims > ST_GGUF_MAX_DIMS)
        return bad(c, "model_format", "it has %" PRIu32 " dimensions; 1 to %d are allowed", n_dims, ST_GGUF_MAX_DIMS);
    t->n_dims = (int)n_dims;
    for (int d = 0; d < t->n_dims; d++) {
        uint64_t ne;
        if (take_u64(c, &ne, "a dimension") < 0) return -1;
        t->ne[d] = (int64_t)ne;
    }
    if (take_u32(c, &type, "the type") < 0 || take_u64(c, &t->offset, "the offset") < 0) return -1;
    if (type > INT32_MAX) return bad(c, "model_format", "the tensor type has the id %" PRIu32, type);
    t->type = (int)type;
    return size_tensor(c, t);
}

static int parse_tensors(cursor *c, uint64_t n_tensors) {
    st_gguf *g = c->g;
    c->section = "tensor";
    c->total = n_tensors;
    for (c->index = 0; c->index < n_tensors; c->index++) {
        c->name = NULL;
        st_gguf_tensor *bigger = grown(g->tensors, g->n_tensors, &g->room_tensors, sizeof *bigger);
        if (!bigger) return no_memory(c->err, c->s->label);
        g->tensors = bigger;
        if (parse_tensor(c, &g->tensors[g->n_tensors]) < 0) return -1;
        g->n_tensors++;
    }
    return 0;
}

/* Turn the offsets of this shard's tensors, from number `first` on, into places in the file. */
static int place_tensors(cursor *c, uint64_t first) {
    st_gguf_shard *s = c->s;
    s->blob_start = (s->header_bytes + s->alignment - 1) / s->alignment * s->alignment;
    uint64_t blob = s->size > s->blob_start ? s->size - s->blob_start : 0;
    c->section = "tensor";
    for (uint64_t i = first; i < c->g->n_tensors; i++) {
        st_gguf_tensor *t = &c->g->tensors[i];
        c->name = t->name;
        if (t->offset % s->alignment)
            return bad(c, "model_format", "the offset %" PRIu64 " is not a multiple of the alignment %" PRIu64,
                       t->offset, s->alignment);
        if (t->offset > blob || t->nbytes > blob - t->offset)
            return bad(c, "model_format",
                       "%" PRIu64 " bytes at offset %" PRIu64 " run past the end of the file's data (%" PRIu64
                       " bytes; damaged, or not downloaded completely)",
                       t->nbytes, t->offset, blob);
        t->offset += s->blob_start;
        t->data = s->base + t->offset;
    }
    return 0;
}

/* ---- one file ---- */

/* What a file that is no GGUF may be instead: its first bytes and the advice. */
static const struct {
    const char *bytes, *what;
} STRANGERS[] = {
    {"tjgg", "an old ggjt file; convert the model again"},
    {"lmgg", "an old ggml file; convert the model again"},
    {"fmgg", "an old ggmf file; convert the model again"},
    {"version https://git-lfs", "a Git LFS pointer; fetch the real file with `git lfs pull`"},
    {"<!DOCTYPE", "a web page; the download failed"},
    {"<html", "a web page; the download failed"},
    {"PK\x03\x04", "a zip archive (perhaps a PyTorch checkpoint); convert the model to GGUF"},
    {"FUGG", "a byte-swapped GGUF file; only little-endian files are supported"},
};

static int check_magic(cursor *c) {
    const st_gguf_shard *s = c->s;
    if (s->size == 0) return bad(c, "model_format", "the file is empty");
    if (s->size >= 4 && memcmp(s->base, "GGUF", 4) == 0) return 0;
    for (size_t i = 0; i < sizeof STRANGERS / sizeof STRANGERS[0]; i++) {
        size_t n = strlen(STRANGERS[i].bytes);
        if (s->size >= n && memcmp(s->base, STRANGERS[i].bytes, n) == 0)
            return bad(c, "model_format", "not a GGUF file but %s", STRANGERS[i].what);
    }
    return bad(c, "model_format", "not a GGUF file (it does not begin with \"GGUF\")");
}

static int check_version(cursor *c) {
    uint32_t v = c->s->version;
    if (v == 2 || v == 3) return 0;
    if (v == 1)
        return bad(c, "model_unsupported",
                   "GGUF version 1 is too old (2 and 3 are supported); convert the model again");
    if (v != 0 && (v & 0xffff) == 0)
        return bad(c, "model_unsupported", "a big-endian GGUF file; only little-endian files are supported");
    if (v == 0) return bad(c, "model_format", "GGUF version 0 does not exist");
    return bad(c, "model_unsupported",
               "GGUF version %" PRIu32 " is newer than this program (2 and 3 are supported)", v);
}

/* A count of the header against the least its entries take. */
static int check_count(cursor *c, const char *what, uint64_t n, uint64_t least) {
    if (n <= left(c) / least) return 0;
    return bad(c, "model_format", "the header says %" PRIu64 " %s, but the file can hold %" PRIu64 " at most", n, what,
               left(c) / least);
}

static int read_alignment(cursor *c) {
    uint64_t a = ST_GGUF_DEFAULT_ALIGNMENT;
    if (st_gguf_shard_u64(c->s, "general.alignment", &a, c->err) < 0) return -1;
    if (a < 8 || a > ST_GGUF_MAX_ALIGNMENT || (a & (a - 1)))
        return bad(c, "model_format", "general.alignment is %" PRIu64 "; a power of two from 8 to %d is allowed", a,
                   ST_GGUF_MAX_ALIGNMENT);
    c->s->alignment = a;
    return 0;
}

/* Parse the shard at g->shards[g->n_shards], whose base, size and label are set. */
static int parse_shard(st_gguf *g, st_error *err) {
    cursor c = {.g = g, .s = &g->shards[g->n_shards], .err = err};
    uint64_t n_tensors, n_kv, first = g->n_tensors;
    if (check_magic(&c) < 0) return -1;
    c.pos = 4;
    if (take_u32(&c, &c.s->version, "the version") < 0 || check_version(&c) < 0) return -1;
    if (take_u64(&c, &n_tensors, "the number of tensors") < 0 || take_u64(&c, &n_kv, "the number of keys") < 0)
        return -1;
    if (check_count(&c, "keys", n_kv, MIN_KV_BYTES) < 0 || check_count(&c, "tensors", n_tensors, MIN_TENSOR_BYTES) < 0)
        return -1;
    if (parse_metadata(&c, n_kv) < 0 || read_alignment(&c) < 0 || parse_tensors(&c, n_tensors) < 0) return -1;
    c.s->header_bytes = c.pos;
    return place_tensors(&c, first);
}

/* Room for one more shard at g->shards[g->n_shards], zeroed. */
static st_gguf_shard *new_shard(st_gguf *g, const char *path, st_error *err) {
    size_t len = strlen(path);
    const char *shown = len > LABEL_BYTES ? path + len - LABEL_BYTES : path; /* the end tells more than the start */
    st_gguf_shard *bigger = realloc(g->shards, ((size_t)g->n_shards + 1) * sizeof *bigger);
    if (bigger) {
        g->shards = bigger;
        bigger[g->n_shards] = (st_gguf_shard){.label = keep_text(g, shown, strlen(shown))};
        if (bigger[g->n_shards].label) return &bigger[g->n_shards];
    }
    no_memory(err, shown);
    return NULL;
}

static void release_shard(st_gguf_shard *s) {
    if (s->mapped) munmap((void *)(uintptr_t)s->base, (size_t)s->size);
    free(s->kv);
    free(s->kv_by_key);
}

/* Map an open file into s. */
static int map_descriptor(st_gguf_shard *s, int fd, st_error *err) {
    struct stat st;
    if (fstat(fd, &st) < 0) return st_fail(err, "model_open", "%s: %s", s->label, strerror(errno));
    if (S_ISDIR(st.st_mode))
        return st_fail(err, "model_open", "%s: is a directory; name the .gguf file in it", s->label);
    if (!S_ISREG(st.st_mode)) return st_fail(err, "model_open", "%s: is not a regular file", s->label);
    if (st.st_size == 0) return 0; /* nothing to map; check_magic says so */
    void *base = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return st_fail(err, errno == ENOMEM ? "no_memory" : "model_open", "%s: cannot be mapped: %s", s->label,
                       strerror(errno));
    s->base = base;
    s->size = (uint64_t)st.st_size;
    s->mapped = true;
    return 0;
}

/* Map and parse one file as the next shard. */
static int add_file(st_gguf *g, const char *path, st_error *err) {
    st_gguf_shard *s = new_shard(g, path, err);
    if (!s) return -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    int rc = fd < 0 ? st_fail(err, "model_open", "%s: %s", s->label, strerror(errno)) : map_descriptor(s, fd, err);
    if (fd >= 0) close(fd); /* the mapping stays */
    if (rc == 0) rc = parse_shard(g, err);
    if (rc < 0) {
        release_shard(&g->shards[g->n_shards]);
        return -1;
    }
    g->n_shards++;
    return 0;
}

/* ---- split models ---- */

typedef struct split {
    uint64_t no, count, tensors; /* part from 0, parts, tensors in all (UINT64_MAX: not said) */
} split;

static int read_split(const st_gguf_shard *s, split *out, st_error *err) {
    *out = (split){.no = 0, .count = 1, .tensors = UINT64_MAX};
    if (st_gguf_shard_u64(s, "split.no", &out->no, err) < 0 ||
        st_gguf_shard_u64(s, "split.count", &out->count, err) < 0 ||
        st_gguf_shard_u64(s, "split.tensors.count", &out->tensors, err) < 0)
        return -1;
    return 0;
}

/* Length of "NAME" in "NAME-00001-of-000NN.gguf", or -1 when `path` is not called so with these numbers. */
static ptrdiff_t split_stem(const char *path, uint64_t part, uint64_t count) {
    char tail[64];
    int n = snprintf(tail, sizeof tail, "-%05" PRIu64 "-of-%05" PRIu64 ".gguf", part, count);
    size_t len = strlen(path);
    return len > (size_t)n && strcmp(path + len - (size_t)n, tail) == 0 ? (ptrdiff_t)(len - (size_t)n) : -1;
}

/* Open part i (from 0) of `first` and see that it is that part. */
static int add_part(st_gguf *g, const char *stem, int stem_len, uint64_t i, const split *first, st_error *err) {
    char path[4352];
    int n = snprintf(path, sizeof path, "%.*s-%05" PRIu64 "-of-%05" PRIu64 ".gguf", stem_len, stem, i + 1,
                     first->count);
    if (n < 0 || (size_t)n >= sizeof path)
        return st_fail(err, "model_open", "%s: the path is too long", g->shards[0].label);
    if (access(path, F_OK) < 0 && errno == ENOENT) {
        const char *slash = strrchr(path, '/');
        return st_fail(err, "model_open", "%s: part %" PRIu64 " of %" PRIu64 " is missing: %s should lie beside it",
                       g->shards[0].label, i + 1, first->count, slash ? slash + 1 : path);
    }
    split here;
    if (add_file(g, path, err) < 0 || read_split(&g->shards[i], &here, err) < 0) return -1;
    if (here.no != i || here.count != first->count)
        return st_fail(err, "model_format",
                       "%s: should be part %" PRIu64 " of %" PRIu64 ", but split.no %" PRIu64
                       " and split.count %" PRIu64 " say part %" PRIu64 " of %" PRIu64,
                       g->shards[i].label, i + 1, first->count, here.no, here.count, here.no + 1, here.count);
    return 0;
}

/* Open what belongs to the first file, when it is the first part of a split model. */
static int add_other_parts(st_gguf *g, const char *path, st_error *err) {
    split first;
    const char *label = g->shards[0].label;
    if (read_split(&g->shards[0], &first, err) < 0) return -1;
    if (first.count <= 1) return 0;
    if (first.count > UINT16_MAX)
        return st_fail(err, "model_format", "%s: split.count is %" PRIu64 "; 65535 at most is allowed", label,
                       first.count);
    if (first.no != 0)
        return st_fail(err, "model_format",
                       "%s: this is part %" PRIu64 " of %" PRIu64 " (split.no %" PRIu64
                       "); open the first part (...-00001-of-%05" PRIu64 ".gguf), the others are found beside it",
                       label, first.no + 1, first.count, first.no, first.count);
    if (!path)
        return st_fail(err, "model_unsupported", "%s: a split model (split.count) cannot be read from memory", label);
    ptrdiff_t stem = split_stem(path, 1, first.count);
    if (stem < 0)
        return st_fail(err, "model_open",
                       "%s: split.count is %" PRIu64 ", but the file is not called NAME-00001-of-%05" PRIu64
                       ".gguf, so its other parts cannot be found",
                       label, first.count, first.count);
    for (uint64_t i = 1; i < first.count; i++) {
        if (add_part(g, path, (int)stem, i, &first, err) < 0) return -1;
    }
    if (first.tensors != UINT64_MAX && first.tensors != g->n_tensors)
        return st_fail(err, "model_format",
                       "%s: split.tensors.count is %" PRIu64 ", but all parts together hold %" PRIu64, label,
                       first.tensors, g->n_tensors);
    return 0;
}

/* ---- the whole model ---- */

static int by_name(const void *a, const void *b) {
    const st_gguf_tensor *const *x = a, *const *y = b;
    return strcmp((*x)->name, (*y)->name);
}

static int by_place(const void *a, const void *b) {
    const st_gguf_tensor *x = *(const st_gguf_tensor *const *)a, *y = *(const st_gguf_tensor *const *)b;
    if (x->shard != y->shard) return x->shard < y->shard ? -1 : 1;
    return x->offset < y->offset ? -1 : x->offset > y->offset;
}

/* Tensors must not share bytes: a wrong type or size shows itself so, and all together are no larger than the file. */
static int check_overlap(const st_gguf *g, const st_gguf_tensor **order, st_error *err) {
    qsort(order, (size_t)g->n_tensors, sizeof *order, by_place);
    for (uint64_t i = 1; i < g->n_tensors; i++) {
        const st_gguf_tensor *a = order[i - 1], *b = order[i];
        if (a->shard == b->shard && b->offset - a->offset < a->nbytes)
            return st_fail(err, "model_format",
                           "%s: tensor '%.80s' (%s, %" PRIu64 " bytes at byte %" PRIu64
                           ") runs into tensor '%.80s' at byte %" PRIu64,
                           g->shards[a->shard].label, a->name, st_ggml_type_find(a->type)->name, a->nbytes, a->offset,
                           b->name, b->offset);
    }
    return 0;
}

/* The sorted view of the tensors, and the checks that need all of them. */
static int index_tensors(st_gguf *g, st_error *err) {
    const st_gguf_tensor **order = malloc((size_t)(g->n_tensors + 1) * sizeof *order);
    if (!order) return no_memory(err, g->shards[0].label);
    g->tensors_by_name = order;
    for (uint64_t i = 0; i < g->n_tensors; i++) order[i] = &g->tensors[i];
    if (check_overlap(g, order, err) < 0) return -1;
    qsort(order, (size_t)g->n_tensors, sizeof *order, by_name);
    for (uint64_t i = 1; i < g->n_tensors; i++) {
        if (strcmp(order[i - 1]->name, order[i]->name) == 0)
            return st_fail(err, "model_format", "%s: the tensor '%.100s' appears twice",
                           g->shards[order[i]->shard].label, order[i]->name);
    }
    return 0;
}

/* Finish opening: the other parts and the indices; g is closed on failure. */
static int finish(st_gguf *g, const char *path, int rc, st_gguf **out, st_error *err) {
    if (rc == 0) rc = add_other_parts(g, path, err);
    if (rc == 0) rc = index_tensors(g, err);
    if (rc < 0) {
        st_gguf_close(g);
        return -1;
    }
    *out = g;
    return 0;
}

int st_gguf_open(const char *path, st_gguf **out, st_error *err) {
    *out = NULL;
    st_gguf *g = calloc(1, sizeof *g);
    if (!g) return no_memory(err, path);
    return finish(g, path, add_file(g, path, err), out, err);
}

int st_gguf_open_memory(const void *data, size_t size, const char *label, st_gguf **out, st_error *err) {
    *out = NULL;
    st_gguf *g = calloc(1, sizeof *g);
    if (!g) return no_memory(err, label);
    st_gguf_shard *s = new_shard(g, label, err);
    int rc = s ? 0 : -1;
    if (s) {
        s->base = data;
        s->size = size;
        rc = parse_shard(g, err);
        if (rc < 0) release_shard(&g->shards[0]);
        else g->n_shards = 1;
    }
    return finish(g, NULL, rc, out, err);
}

void st_gguf_close(st_gguf *g) {
    if (!g) return;
    for (uint32_t i = 0; i < g->n_shards; i++) release_shard(&g->shards[i]);
    for (st_gguf_chunk *c = g->chunks, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    free(g->shards);
    free(g->tensors);
    free(g->tensors_by_name);
    free(g);
}

/* ---- hints to the kernel ---- */

int st_gguf_advise_range(const st_gguf *g, const st_gguf_tensor *t, uint64_t start, uint64_t len, int advice,
                         st_error *err) {
    const st_gguf_shard *s = &g->shards[t->shard];
    if (start > t->nbytes || len > t->nbytes - start)
        return st_fail(err, "internal",
                       "%s: tensor '%.100s': bytes %" PRIu64 "+%" PRIu64 " are not all inside its %" PRIu64, s->label,
                       t->name, start, len, t->nbytes);
    if (!s->mapped || len == 0) return 0; /* MADV_DONTNEED would clear memory that is no file */
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = (t->offset + start) / page * page;
    if (madvise((void *)(uintptr_t)(s->base + from), (size_t)(t->offset + start + len - from), advice) == 0) return 0;
    return st_fail(err, "model_open", "%s: tensor '%.100s': madvise(%d): %s", s->label, t->name, advice,
                   strerror(errno));
}

int st_gguf_advise(const st_gguf *g, const st_gguf_tensor *t, int advice, st_error *err) {
    return st_gguf_advise_range(g, t, 0, t->nbytes, advice, err);
}

/* Looking things up in an open model: entries by place and by name, and values in the type the caller wants. */
#include "gguf.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t st_gguf_n_shards(const st_gguf *g) { return g->n_shards; }
int st_gguf_version(const st_gguf *g) { return (int)g->shards[0].version; }

uint64_t st_gguf_size(const st_gguf *g) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < g->n_shards; i++) sum += g->shards[i].size;
    return sum;
}

/* ---- tensors ---- */

uint64_t st_gguf_n_tensors(const st_gguf *g) { return g->n_tensors; }

const st_gguf_tensor *st_gguf_tensor_at(const st_gguf *g, uint64_t i) {
    return i < g->n_tensors ? &g->tensors[i] : NULL;
}

static int name_order(const void *name, const void *entry) {
    return strcmp(name, (*(const st_gguf_tensor *const *)entry)->name);
}

const st_gguf_tensor *st_gguf_tensor_find(const st_gguf *g, const char *name) {
    const st_gguf_tensor **hit =
        bsearch(name, g->tensors_by_name, (size_t)g->n_tensors, sizeof *g->tensors_by_name, name_order);
    return hit ? *hit : NULL;
}

/* ---- metadata ---- */

uint64_t st_gguf_n_kv(const st_gguf *g) { return g->shards[0].n_kv; }

const st_gguf_kv *st_gguf_kv_at(const st_gguf *g, uint64_t i) {
    return i < g->shards[0].n_kv ? &g->shards[0].kv[i] : NULL;
}

static int key_order(const void *key, const void *entry) {
    return strcmp(key, (*(const st_gguf_kv *const *)entry)->key);
}

const st_gguf_kv *st_gguf_shard_find(const st_gguf_shard *s, const char *key) {
    const st_gguf_kv **hit = bsearch(key, s->kv_by_key, (size_t)s->n_kv, sizeof *s->kv_by_key, key_order);
    return hit ? *hit : NULL;
}

const st_gguf_kv *st_gguf_kv_find(const st_gguf *g, const char *key) { return st_gguf_shard_find(&g->shards[0], key); }

const char *st_gguf_type_name(uint32_t type) {
    static const char *const names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                        "bool", "string", "array", "u64", "i64", "f64"};
    return type < sizeof names / sizeof names[0] ? names[type] : NULL;
}

int st_gguf_kv_str(const st_gguf_kv *kv, uint64_t i, st_gguf_str *out) {
    if (kv->elem_type != ST_GGUF_STRING || i >= kv->count) return -1;
    uint64_t at = kv->marks[i / ST_GGUF_MARK_EVERY], len;
    for (uint64_t skip = i % ST_GGUF_MARK_EVERY;; skip--) {
        /* Checked when the file was opened, and again here: someone may write to a mapped file. */
        if (at > kv->nbytes || kv->nbytes - at < 8) return -1;
        memcpy(&len, kv->data + at, 8);
        at += 8;
        if (len > kv->nbytes - at) return -1;
        if (skip == 0) break;
        at += len;
    }
    *out = (st_gguf_str){.ptr = (const char *)kv->data + at, .len = len};
    return 0;
}

/* ---- values ---- */

/* Wide enough for every integer of the format, so that range checks are comparisons. */
__extension__ typedef __int128 wide;

/* Element i as an integer; false when the elements are no integers. */
static bool integer_at(const st_gguf_kv *kv, uint64_t i, wide *out) {
#define CASE(ID, TYPE)                               \
    case ID: {                                       \
        TYPE v;                                      \
        memcpy(&v, kv->data + i * sizeof v, sizeof v); \
        *out = v;                                    \
        return true;                                 \
    }
    switch (kv->elem_type) {
        CASE(ST_GGUF_U8, uint8_t)
        CASE(ST_GGUF_I8, int8_t)
        CASE(ST_GGUF_U16, uint16_t)
        CASE(ST_GGUF_I16, int16_t)
        CASE(ST_GGUF_U32, uint32_t)
        CASE(ST_GGUF_I32, int32_t)
        CASE(ST_GGUF_U64, uint64_t)
        CASE(ST_GGUF_I64, int64_t)
    case ST_GGUF_BOOL: *out = kv->data[i] != 0; return true;
    default: return false;
    }
#undef CASE
}

/* Element i as a float; false when the elements are no numbers. */
static bool number_at(const st_gguf_kv *kv, uint64_t i, double *out) {
    float f;
    wide w;
    if (kv->elem_type == ST_GGUF_F32) {
        memcpy(&f, kv->data + i * 4, 4);
        *out = (double)f;
    } else if (kv->elem_type == ST_GGUF_F64) {
        memcpy(out, kv->data + i * 8, 8);
    } else if (integer_at(kv, i, &w)) {
        *out = (double)w;
    } else {
        return false;
    }
    return true;
}

/* "FILE: key 'k' is a string; X is needed". */
static int wrong_type(const st_gguf_shard *s, const st_gguf_kv *kv, const char *needed, st_error *err) {
    bool array = kv->type == ST_GGUF_ARRAY;
    return st_fail(err, "model_format", "%s: key '%.100s' has the type %s%s; %s is needed", s->label, kv->key,
                   array ? "array of " : "", st_gguf_type_name((uint32_t)kv->elem_type), needed);
}

static int out_of_range(const st_gguf_shard *s, const st_gguf_kv *kv, uint64_t i, wide v, const char *range,
                        st_error *err) {
    char place[40] = "", value[24];
    if (kv->type == ST_GGUF_ARRAY) snprintf(place, sizeof place, " (element %" PRIu64 ")", i);
    if (v < 0) snprintf(value, sizeof value, "%" PRId64, (int64_t)v);
    else snprintf(value, sizeof value, "%" PRIu64, (uint64_t)v);
    return st_fail(err, "model_format", "%s: key '%.100s'%s is %s; %s is needed", s->label, kv->key, place, value,
                   range);
}

/* A scalar integer in lo..hi. 1 found, 0 absent, -1 error. */
static int scalar_integer(const st_gguf_shard *s, const char *key, wide lo, wide hi, const char *range, wide *out,
                          st_error *err) {
    const st_gguf_kv *kv = st_gguf_shard_find(s, key);
    if (!kv) return 0;
    if (kv->type == ST_GGUF_ARRAY || !integer_at(kv, 0, out)) return wrong_type(s, kv, "an integer", err);
    return *out < lo || *out > hi ? out_of_range(s, kv, 0, *out, range, err) : 1;
}

int st_gguf_shard_u64(const st_gguf_shard *s, const char *key, uint64_t *out, st_error *err) {
    wide v;
    int rc = scalar_integer(s, key, 0, UINT64_MAX, "an integer from 0 to 2^64-1", &v, err);
    if (rc > 0) *out = (uint64_t)v;
    return rc;
}

int st_gguf_get_u64(const st_gguf *g, const char *key, uint64_t *out, st_error *err) {
    return st_gguf_shard_u64(&g->shards[0], key, out, err);
}

int st_gguf_get_i64(const st_gguf *g, const char *key, int64_t *out, st_error *err) {
    wide v;
    int rc = scalar_integer(&g->shards[0], key, INT64_MIN, INT64_MAX, "an integer from -2^63 to 2^63-1", &v, err);
    if (rc > 0) *out = (int64_t)v;
    return rc;
}

int st_gguf_get_bool(const st_gguf *g, const char *key, int *out, st_error *err) {
    wide v;
    int rc = scalar_integer(&g->shards[0], key, 0, 1, "true or false", &v, err);
    if (rc > 0) *out = (int)v;
    return rc;
}

int st_gguf_get_f64(const st_gguf *g, const char *key, double *out, st_error *err) {
    const st_gguf_kv *kv = st_gguf_kv_find(g, key);
    if (!kv) return 0;
    if (kv->type == ST_GGUF_ARRAY || !number_at(kv, 0, out)) return wrong_type(&g->shards[0], kv, "a number", err);
    return 1;
}

int st_gguf_get_str(const st_gguf *g, const char *key, st_gguf_str *out, st_error *err) {
    const st_gguf_kv *kv = st_gguf_kv_find(g, key);
    if (!kv) return 0;
    if (kv->type != ST_GGUF_STRING) return wrong_type(&g->shards[0], kv, "a string", err);
    if (st_gguf_kv_str(kv, 0, out) < 0) return wrong_type(&g->shards[0], kv, "a file that nobody changes", err);
    return 1;
}

/* The entry when it can fill n elements: an array of at least n, or a scalar. 1 found, 0 absent, -1 too short. */
static int find_at_least(const st_gguf *g, const char *key, uint64_t n, const st_gguf_kv **out, st_error *err) {
    const st_gguf_kv *kv = *out = st_gguf_kv_find(g, key);
    if (!kv) return 0;
    if (kv->type == ST_GGUF_ARRAY && kv->count < n)
        return st_fail(err, "model_format",
                       "%s: key '%.100s' is an array of %" PRIu64 "; at least %" PRIu64
                       " elements or a single value are needed",
                       g->shards[0].label, kv->key, kv->count, n);
    return 1;
}

int st_gguf_get_array_i64(const st_gguf *g, const char *key, int64_t *out, uint64_t n, st_error *err) {
    const st_gguf_kv *kv;
    int rc = find_at_least(g, key, n, &kv, err);
    for (uint64_t i = 0; rc > 0 && i < n; i++) {
        wide v;
        uint64_t from = kv->type == ST_GGUF_ARRAY ? i : 0;
        if (!integer_at(kv, from, &v)) return wrong_type(&g->shards[0], kv, "an integer or an array of integers", err);
        if (v < INT64_MIN || v > INT64_MAX)
            return out_of_range(&g->shards[0], kv, from, v, "an integer from -2^63 to 2^63-1", err);
        out[i] = (int64_t)v;
    }
    return rc;
}

int st_gguf_get_array_f64(const st_gguf *g, const char *key, double *out, uint64_t n, st_error *err) {
    const st_gguf_kv *kv;
    int rc = find_at_least(g, key, n, &kv, err);
    for (uint64_t i = 0; rc > 0 && i < n; i++) {
        if (!number_at(kv, kv->type == ST_GGUF_ARRAY ? i : 0, &out[i]))
            return wrong_type(&g->shards[0], kv, "a number or an array of numbers", err);
    }
    return rc;
}

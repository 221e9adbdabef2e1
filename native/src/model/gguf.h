/* GGUF files from the inside: what the reader (gguf.c), the getters (gguf_values.c) and the fingerprint share.
 *
 * Other parts of the engine use the public functions of strata.h only and need nothing from here. */
#ifndef ST_GGUF_H
#define ST_GGUF_H

#include <stdbool.h>

#include "errors.h"
#include "strata.h"

enum {
    ST_GGUF_MARK_EVERY = 32,       /* strings between two marks: a lookup walks at most 31 */
    ST_GGUF_DEFAULT_ALIGNMENT = 32,
    ST_GGUF_MAX_ALIGNMENT = 65536,
    ST_GGUF_MAX_KEY = 65535,       /* the format's own limit */
    ST_GGUF_MAX_NAME = 255         /* of tensors; the format says 64, some writers exceed it */
};

/* A block of small allocations that live as long as the model. */
typedef struct st_gguf_chunk st_gguf_chunk;

/* One file of a model. */
typedef struct st_gguf_shard {
    const uint8_t *base;
    uint64_t size;
    bool mapped; /* base comes from mmap; otherwise the caller's memory */
    const char *label; /* path (or its end) for messages */
    uint32_t version;
    uint64_t alignment;
    uint64_t header_bytes; /* from the magic to the end of the tensor table */
    uint64_t blob_start;   /* tensor offsets count from here */
    st_gguf_kv *kv;        /* in file order */
    uint64_t n_kv;
    const st_gguf_kv **kv_by_key; /* sorted */
} st_gguf_shard;

struct st_gguf {
    st_gguf_shard *shards;
    uint32_t n_shards;
    st_gguf_tensor *tensors; /* of all shards, in file order */
    uint64_t n_tensors, room_tensors;
    const st_gguf_tensor **tensors_by_name; /* sorted */
    st_gguf_chunk *chunks;
};

/* The entry with this key in one shard, or NULL. */
const st_gguf_kv *st_gguf_shard_find(const st_gguf_shard *s, const char *key);
/* As st_gguf_get_u64, in one shard. */
int st_gguf_shard_u64(const st_gguf_shard *s, const char *key, uint64_t *out, st_error *err);
/* Name of a metadata value type for messages; NULL when the format has none with this id. */
const char *st_gguf_type_name(uint32_t type);

#endif

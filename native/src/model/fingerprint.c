/* The model fingerprint: a name for a model's content that is quick to make and does not depend on where it lies.
 *
 * BLAKE2b with a digest of 16 bytes, shown as 32 hex digits, over these bytes in this order (integers little-endian):
 *
 *   27 bytes  "strata model fingerprint 1\n"
 *   u64       bytes of all parts together
 *   u64       number of parts
 *   per part, in order:
 *     u64     bytes of the part
 *     u64     n, the bytes from its magic to the end of its tensor table
 *     n bytes those bytes: version, counts, all metadata as stored, the tensor table
 *   per tensor, in file order over all parts:
 *     per piece: samples (below). A tensor of exactly three dimensions has ne[2] pieces of equal size, one per expert;
 *                any other tensor is one piece.
 *
 * Samples of a piece of s bytes: all of it when s <= 12288; otherwise 4096 bytes at 0, at (s - 4096) / 2 rounded down,
 * and at s - 4096.
 *
 * Padding and what no tensor covers are not read. The fingerprint is sampled: it tells models and versions apart, it
 * does not prove that every weight is intact. */
#include "gguf.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

enum {
    SAMPLE = 4096,
    DIGEST = 16,
    FAR_APART = 1 << 18 /* pieces of this size have samples out of reach of read-ahead: says how to read, not what */
};

static void add_u64(st_blake2b *hash, uint64_t v) { st_blake2b_update(hash, &v, sizeof v); }

/* Where the samples of a piece of `size` bytes start; returns how many, and the length of each. */
static int samples(uint64_t size, uint64_t start[3], uint64_t *len) {
    start[0] = 0;
    *len = size;
    if (size <= 3 * SAMPLE) return 1;
    start[1] = (size - SAMPLE) / 2;
    start[2] = size - SAMPLE;
    *len = SAMPLE;
    return 3;
}

static void add_tensor(const st_gguf *g, const st_gguf_tensor *t, st_blake2b *hash) {
    uint64_t pieces = t->n_dims == 3 ? (uint64_t)t->ne[2] : 1, size = t->nbytes / pieces, start[3], len;
    int n = samples(size, start, &len);
    /* Far samples are asked for first, all at once: a cold disk serves them side by side instead of one by one. */
    for (uint64_t p = 0; size >= FAR_APART && p < pieces; p++) {
        for (int i = 0; i < n; i++) st_gguf_advise_range(g, t, p * size + start[i], len, MADV_WILLNEED, NULL);
    }
    for (uint64_t p = 0; p < pieces; p++) {
        for (int i = 0; i < n; i++) st_blake2b_update(hash, t->data + p * size + start[i], (size_t)len);
    }
}

void st_gguf_fingerprint(const st_gguf *g, char *hex) {
    static const char title[] = "strata model fingerprint 1\n";
    uint8_t digest[DIGEST];
    st_blake2b hash;
    st_blake2b_init(&hash, DIGEST, NULL, 0);
    st_blake2b_update(&hash, title, sizeof title - 1);
    add_u64(&hash, st_gguf_size(g));
    add_u64(&hash, g->n_shards);
    for (uint32_t i = 0; i < g->n_shards; i++) {
        add_u64(&hash, g->shards[i].size);
        add_u64(&hash, g->shards[i].header_bytes);
        st_blake2b_update(&hash, g->shards[i].base, (size_t)g->shards[i].header_bytes);
    }
    for (uint64_t i = 0; i < g->n_tensors; i++) add_tensor(g, &g->tensors[i], &hash);
    st_blake2b_final(&hash, digest);
    for (int i = 0; i < DIGEST; i++) snprintf(hex + 2 * i, 3, "%02x", digest[i]);
}

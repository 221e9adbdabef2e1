/* BLAKE2b (RFC 7693, section 3) and the keys that name pages by content. */
#include "hash.h"

#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are loaded as stored: little-endian hosts only");

enum { BLOCK = 128, ROUNDS = 12 };

/* RFC 7693, 2.6. */
static const uint64_t IV[8] = {
    0x6a09e667f3bcc908u, 0xbb67ae8584caa73bu, 0x3c6ef372fe94f82bu, 0xa54ff53a5f1d36f1u,
    0x510e527fade682d1u, 0x9b05688c2b3e6c1fu, 0x1f83d9abfb41bd6bu, 0x5be0cd19137e2179u,
};

static inline uint64_t rotr(uint64_t x, int n) { return (x >> n) | (x << (64 - n)); }

/* RFC 7693, 3.1: mix two words into one column or diagonal. */
#define MIX(a, b, c, d, x, y)       \
    do {                            \
        a += b + (x);               \
        d = rotr(d ^ a, 32);        \
        c += d;                     \
        b = rotr(b ^ c, 24);        \
        a += b + (y);               \
        d = rotr(d ^ a, 16);        \
        c += d;                     \
        b = rotr(b ^ c, 63);        \
    } while (0)

/* One round; the arguments are the round's row of the message schedule (RFC 7693, 2.7). Written as a macro so that
 * every index is a constant and the sixteen words stay in registers: three times as fast as a table at run time. */
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    do {                                                                            \
        MIX(v0, v4, v8, v12, m[s0], m[s1]);                                         \
        MIX(v1, v5, v9, v13, m[s2], m[s3]);                                         \
        MIX(v2, v6, v10, v14, m[s4], m[s5]);                                        \
        MIX(v3, v7, v11, v15, m[s6], m[s7]);                                        \
        MIX(v0, v5, v10, v15, m[s8], m[s9]);                                        \
        MIX(v1, v6, v11, v12, m[s10], m[s11]);                                      \
        MIX(v2, v7, v8, v13, m[s12], m[s13]);                                       \
        MIX(v3, v4, v9, v14, m[s14], m[s15]);                                       \
    } while (0)

/* RFC 7693, 3.2: compress one block; s->count already includes it. */
static void compress(st_blake2b *s, const uint8_t *block, uint64_t last) {
    uint64_t m[16], *h = s->chain;
    memcpy(m, block, sizeof m);
    uint64_t v0 = h[0], v1 = h[1], v2 = h[2], v3 = h[3], v4 = h[4], v5 = h[5], v6 = h[6], v7 = h[7];
    uint64_t v8 = IV[0], v9 = IV[1], v10 = IV[2], v11 = IV[3], v12 = IV[4] ^ s->count[0], v13 = IV[5] ^ s->count[1],
             v14 = IV[6] ^ last, v15 = IV[7];
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4);
    ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8);
    ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13);
    ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9);
    ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11);
    ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10);
    ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5);
    ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0);
    ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); /* rounds 10 and 11 use rows 0 and 1 again */
    ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3);
    h[0] ^= v0 ^ v8;
    h[1] ^= v1 ^ v9;
    h[2] ^= v2 ^ v10;
    h[3] ^= v3 ^ v11;
    h[4] ^= v4 ^ v12;
    h[5] ^= v5 ^ v13;
    h[6] ^= v6 ^ v14;
    h[7] ^= v7 ^ v15;
}

static void add_count(st_blake2b *s, uint64_t n) {
    s->count[0] += n;
    s->count[1] += s->count[0] < n;
}

int st_blake2b_init(st_blake2b *s, size_t digest_len, const void *key, size_t key_len) {
    if (digest_len < 1 || digest_len > ST_BLAKE2B_MAX_BYTES || key_len > ST_BLAKE2B_MAX_BYTES) return -1;
    memset(s, 0, sizeof *s);
    memcpy(s->chain, IV, sizeof IV);
    s->chain[0] ^= 0x01010000u ^ (key_len << 8) ^ digest_len; /* parameter block: fanout 1, depth 1, lengths */
    s->digest_len = (uint32_t)digest_len;
    if (key_len) { /* the key, padded with zeros, is the first block */
        memcpy(s->block, key, key_len);
        s->filled = BLOCK;
    }
    return 0;
}

void st_blake2b_update(st_blake2b *s, const void *data, size_t len) {
    const uint8_t *in = data;
    while (len) {
        if (s->filled == BLOCK) { /* only when more follows: the last block is compressed in final */
            add_count(s, BLOCK);
            compress(s, s->block, 0);
            s->filled = 0;
        }
        for (; s->filled == 0 && len > BLOCK; in += BLOCK, len -= BLOCK) { /* whole blocks need no copy */
            add_count(s, BLOCK);
            compress(s, in, 0);
        }
        size_t take = BLOCK - s->filled < len ? BLOCK - s->filled : len;
        memcpy(s->block + s->filled, in, take);
        s->filled += (uint32_t)take;
        in += take;
        len -= take;
    }
}

void st_blake2b_final(st_blake2b *s, uint8_t *digest) {
    memset(s->block + s->filled, 0, BLOCK - s->filled);
    add_count(s, s->filled);
    compress(s, s->block, UINT64_MAX);
    memcpy(digest, s->chain, s->digest_len);
}

int st_blake2b_hash(uint8_t *digest, size_t digest_len, const void *data, size_t len, const void *key, size_t key_len) {
    st_blake2b s;
    if (st_blake2b_init(&s, digest_len, key, key_len) < 0) return -1;
    st_blake2b_update(&s, data, len);
    st_blake2b_final(&s, digest);
    return 0;
}

void st_page_key(uint8_t *out, const uint8_t *parent, const int32_t *tokens, int n) {
    st_blake2b s;
    st_blake2b_init(&s, ST_HASH_BYTES, NULL, 0);
    st_blake2b_update(&s, parent, ST_HASH_BYTES);
    if (n > 0) st_blake2b_update(&s, tokens, (size_t)n * sizeof *tokens);
    st_blake2b_final(&s, out);
}

void st_root_key(uint8_t *out, const void *identity, size_t len) {
    static const char prefix[] = "strata page root"; /* hashed with its NUL, so no identity can run into it */
    st_blake2b s;
    st_blake2b_init(&s, ST_HASH_BYTES, NULL, 0);
    st_blake2b_update(&s, prefix, sizeof prefix);
    st_blake2b_update(&s, identity, len);
    st_blake2b_final(&s, out);
}

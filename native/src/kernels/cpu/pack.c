/* Repacking of GGUF rows into the row-in-lane layouts of kernels.h. Four rows at a time: four words of each are
 * transposed, and from there on one operation serves the same word of four rows. */
#include "arith.h"
#include "kernels/kernels.h"

#include <string.h>

size_t st_pack_group_bytes(int type, int k) {
    const st_weight_type *t = st_weight_type_at(type);
    int blocks = t ? k / t->block : 0;
    return t ? st_pack_blocks_at(type, blocks) + (size_t)blocks * (size_t)t->vectors * 64 : 0;
}

/* The same word (four codes of one step) of four rows. */
typedef uint32_t words __attribute__((vector_size(16)));

/* Words 0..3 of 16 bytes at `at` in the blocks of four rows. */
static inline void read_words(const uint8_t *const *block, int at, words *w) {
    words a, b, c, d;
    memcpy(&a, block[0] + at, 16);
    memcpy(&b, block[1] + at, 16);
    memcpy(&c, block[2] + at, 16);
    memcpy(&d, block[3] + at, 16);
    words ab0 = __builtin_shuffle(a, b, (words){0, 4, 1, 5}), ab1 = __builtin_shuffle(a, b, (words){2, 6, 3, 7});
    words cd0 = __builtin_shuffle(c, d, (words){0, 4, 1, 5}), cd1 = __builtin_shuffle(c, d, (words){2, 6, 3, 7});
    w[0] = __builtin_shuffle(ab0, cd0, (words){0, 1, 4, 5});
    w[1] = __builtin_shuffle(ab0, cd0, (words){2, 3, 6, 7});
    w[2] = __builtin_shuffle(ab1, cd1, (words){0, 1, 4, 5});
    w[3] = __builtin_shuffle(ab1, cd1, (words){2, 3, 6, 7});
}

/* Where a block of four rows goes. */
typedef struct place {
    uint8_t *vectors; /* of the block, at the four rows' lanes */
    uint8_t *scale, *min;
} place;

static inline place place_of(int type, int lane, int b, int blocks, uint8_t *out) {
    uint8_t *scale = out + ((size_t)b * ST_LANES + (size_t)lane) * 2;
    uint8_t *vectors = out + st_pack_blocks_at(type, blocks) + (size_t)b * (size_t)st_weight_vectors(type) * 64;
    return (place){vectors + lane * 4, scale, scale + st_pack_scale_bytes(blocks)};
}

static inline void put(const place *p, int vector, words w) { memcpy(p->vectors + vector * 64, &w, 16); }

/* The halves at `at` of four blocks, behind each other. */
static inline void put_halves(uint8_t *to, const uint8_t *const *block, int at) {
    for (int i = 0; i < 4; i++) memcpy(to + 2 * i, block[i] + at, 2);
}

/* The four lowest bits, one into each byte: bits 2 and 3 to 16 and 17, then bits 1 and 17 on to 8 and 24. */
static inline words spread(words bits) {
    words four = bits & 15u, twice = four | four << 14;
    return (twice | twice << 7) & 0x01010101u;
}

static inline words low_half(words w) { return w & 0x0f0f0f0fu; }
static inline words high_half(words w) { return w >> 4 & 0x0f0f0f0fu; }

/* 32 codes of 5 bits, in words, to the five vectors from `vector`. */
static inline void put_5_bits(const place *p, int vector, const words *code) {
    words high = {0};
    for (int s = 0; s < 4; s++) {
        put(p, vector + s, code[s] | (code[s + 4] & 0x07070707u) << 5);
        high |= (code[s + 4] >> 3 & 0x03030303u) << 2 * s;
    }
    put(p, vector + 4, high);
}

static inline void four_q8_0(const uint8_t *const *block, uint32_t flip, place p) {
    put_halves(p.scale, block, 0);
    for (int half = 0; half < 2; half++) {
        words w[4];
        read_words(block, 2 + 16 * half, w);
        for (int s = 0; s < 4; s++) put(&p, 4 * half + s, w[s] ^ flip);
    }
}

/* Nibbles already pair values 16 apart, as the layout does. */
static inline void put_nibbles(const place *p, const uint8_t *const *block, int at) {
    words w[4];
    read_words(block, at, w);
    for (int s = 0; s < 4; s++) put(p, s, w[s]);
}

static inline void four_q4_0(const uint8_t *const *block, uint32_t flip, place p) {
    (void)flip;
    put_halves(p.scale, block, 0);
    put_nibbles(&p, block, 2);
}

static inline void four_q4_1(const uint8_t *const *block, uint32_t flip, place p) {
    (void)flip;
    put_halves(p.scale, block, 0);
    put_halves(p.min, block, 2);
    put_nibbles(&p, block, 4);
}

static inline void four_iq4_nl(const uint8_t *const *block, uint32_t flip, place p) {
    (void)flip;
    put_halves(p.scale, block, 0);
    put_nibbles(&p, block, 2);
}

/* Nibbles with the fifth bits of 32 values in one word before them. */
static inline void put_nibbles_5(const place *p, const uint8_t *const *block, int at) {
    words bits[4], w[4], code[8];
    read_words(block, at, bits);
    read_words(block, at + 4, w);
    for (int s = 0; s < 4; s++) {
        code[s] = low_half(w[s]) | spread(bits[0] >> 4 * s) << 4;
        code[s + 4] = high_half(w[s]) | spread(bits[0] >> (16 + 4 * s)) << 4;
    }
    put_5_bits(p, 0, code);
}

static inline void four_q5_0(const uint8_t *const *block, uint32_t flip, place p) {
    (void)flip;
    put_halves(p.scale, block, 0);
    put_nibbles_5(&p, block, 2);
}

static inline void four_q5_1(const uint8_t *const *block, uint32_t flip, place p) {
    (void)flip;
    put_halves(p.scale, block, 0);
    put_halves(p.min, block, 2);
    put_nibbles_5(&p, block, 4);
}

/* d, dmin, and the scales and minima of 8 groups: four of 6 bits become four bytes at once. */
static inline void put_k_head(const place *p, const uint8_t *const *block) {
    words s[4];
    read_words(block, 4, s);
    put_halves(p->scale, block, 0);
    put_halves(p->min, block, 2);
    put(p, 0, s[0] & 0x3f3f3f3fu);
    put(p, 1, low_half(s[2]) | (s[0] >> 6 & 0x03030303u) << 4);
    put(p, 2, s[1] & 0x3f3f3f3fu);
    put(p, 3, high_half(s[2]) | (s[1] >> 6 & 0x03030303u) << 4);
}

/* Groups 2j and 2j + 1 share 32 bytes in the file, low and high halves. */
static inline void four_q4_k(const uint8_t *const *block, uint32_t flip, place p) {
    (void)flip;
    put_k_head(&p, block);
    for (int j = 0; j < 4; j++) {
        words low[4], high[4];
        read_words(block, 16 + 32 * j, low);
        read_words(block, 32 + 32 * j, high);
        for (int s = 0; s < 4; s++) {
            put(&p, 4 + 8 * j + s, low_half(low[s]) | low_half(high[s]) << 4);
            put(&p, 8 + 8 * j + s, high_half(low[s]) | (high[s] & 0xf0f0f0f0u));
        }
    }
}

static inline void four_q5_k(const uint8_t *const *block, uint32_t flip, place p) {
    words bits[8], w[8], code[8];
    (void)flip;
    put_k_head(&p, block);
    read_words(block, 16, bits);
    read_words(block, 32, bits + 4);
    for (int j = 0; j < 4; j++) {
        read_words(block, 48 + 32 * j, w);
        read_words(block, 64 + 32 * j, w + 4);
        for (int s = 0; s < 8; s++) code[s] = low_half(w[s]) | (bits[s] >> 2 * j & 0x01010101u) << 4;
        put_5_bits(&p, 4 + 10 * j, code);
        for (int s = 0; s < 8; s++) code[s] = high_half(w[s]) | (bits[s] >> (2 * j + 1) & 0x01010101u) << 4;
        put_5_bits(&p, 9 + 10 * j, code);
    }
}

static inline void four_q6_k(const uint8_t *const *block, uint32_t flip, place p) {
    words w[4], bits[4];
    (void)flip;
    put_halves(p.scale, block, 208);
    read_words(block, 192, w);
    for (int i = 0; i < 4; i++) put(&p, i, w[i]);
    for (int g = 0; g < 16; g++) { /* of 16 values: half of one of the file's runs of 32 */
        int n = g / 8, j = g % 8 / 2;
        words code[4];
        read_words(block, 64 * n + 32 * (j & 1) + 16 * (g & 1), w);
        read_words(block, 128 + 32 * n + 16 * (g & 1), bits);
        for (int s = 0; s < 4; s++) code[s] = (j >> 1 ? high_half(w[s]) : low_half(w[s])) | (bits[s] >> 2 * j & 0x03030303u) << 4;
        for (int s = 0; s < 3; s++) put(&p, 4 + 3 * g + s, code[s] | (code[3] >> 2 * s & 0x03030303u) << 6);
    }
}

/* Whole groups: blocks in order, rows in fours; what stands for rows past n is zero. */
static inline __attribute__((always_inline)) void each_four(void (*four)(const uint8_t *const *block, uint32_t flip, place p), const int type,
                                                            const int block_bytes, const uint8_t *rows, size_t row_bytes, int n,
                                                            int blocks, uint32_t flip, uint8_t *out) {
    static const uint8_t nothing[256] = {0};
    for (int lane = 0; lane < ST_LANES; lane += 4) {
        const uint8_t *block[4];
        size_t step[4];
        for (int i = 0; i < 4; i++) {
            block[i] = lane + i < n ? rows + (size_t)(lane + i) * row_bytes : nothing;
            step[i] = lane + i < n ? (size_t)block_bytes : 0;
        }
        for (int b = 0; b < blocks; b++) {
            four(block, flip, place_of(type, lane, b, blocks, out));
            for (int i = 0; i < 4; i++) block[i] += step[i];
        }
    }
}

#define PACK(U, l, size, bytes, bits, offset, min) \
    void st_pack_##l(const uint8_t *rows, size_t row_bytes, int n, int blocks, uint32_t flip, uint8_t *out) { \
        each_four(four_##l, ST_W_##U, bytes, rows, row_bytes, n, blocks, flip, out); \
    }
ST_WEIGHT_LIST(PACK)

void st_pack_group(const st_kernels *table, int type, const uint8_t *rows, size_t row_bytes, int n, int k, uint8_t *out) {
    const st_weight_type *t = st_weight_type_at(type);
    if (!t) return;
    int blocks = k / t->block;
    if (blocks % 2) memset(out, 0, st_pack_blocks_at(type, blocks)); /* what pads the scales */
    t->pack(rows, row_bytes, n, blocks, table->q8_bias ? 0x80808080u : 0, out);
}

/* A segment of 16 rows at a time is packed where the cache holds it, and multiplied there: the same kernels, so the
 * same bits. Every segment of a row starts from 0, and a row's total takes them in order (rule 3); no total is ever
 * minus zero, so that starting from a stored sum differs in nothing. */
enum { SEGMENT_ROOM = 2 * 256 + 8 * 512 }; /* the largest: Q8_0; scales and minima of 8 blocks */

/* One tile times a packed segment, values at.. of its rows, onto its sums. */
static void add_segment(const st_kernels *table, int type, const uint8_t *packed, int at, int n, const st_tile *t,
                        float sum[ST_TILE][ST_LANES]) {
    const st_weight_type *w = st_weight_type_at(type);
    _Alignas(64) float part[ST_TILE][ST_LANES];
    st_tile s = *t;
    s.mode = ST_STORE;
    for (int r = 0; r < t->rows; r++) {
        s.q[r] = t->q[r] + at;
        s.d[r] = t->d[r] + at / w->block;
        s.sum[r] = t->sum[r] + (w->form == ST_FORM_256 ? at / 256 * 12 : at / 32);
        s.y[r] = part[r];
    }
    table->mm[type](packed, 0, 1, n, &s);
    for (int r = 0; r < t->rows; r++)
        for (int l = 0; l < ST_LANES; l++) sum[r][l] += part[r][l];
}

static void join(const st_tile *t, int at, float sum[ST_TILE][ST_LANES]) {
    for (int r = 0; r < t->rows; r++)
        for (int l = 0; l < ST_LANES; l++) {
            float *y = t->y[r] + at + l, v = sum[r][l];
            *y = t->mode == ST_STORE ? v : t->mode == ST_ADD ? *y + v : fmaf(t->weight[r], v, *y);
        }
}

void st_mm_rows(const st_kernels *table, int type, const uint8_t *rows, size_t row_bytes, int groups, int k, const st_tile *tiles, int n) {
    const st_weight_type *w = st_weight_type_at(type);
    _Alignas(64) uint8_t packed[SEGMENT_ROOM];
    float sum[ST_TILES][ST_TILE][ST_LANES];
    for (int g = 0; g < groups; g++, rows += ST_LANES * row_bytes) {
        memset(sum, 0, (size_t)n * sizeof *sum);
        for (int at = 0; at < k; at += ST_SEGMENT) {
            int values = k - at < ST_SEGMENT ? k - at : ST_SEGMENT;
            const uint8_t *from = rows + (size_t)(at / w->block) * (size_t)w->block_bytes;
            st_pack_group(table, type, from, row_bytes, ST_LANES, values, packed);
            for (int i = 0; i < n; i++) add_segment(table, type, packed, at, values, &tiles[i], sum[i]);
        }
        for (int i = 0; i < n; i++) join(&tiles[i], g * ST_LANES, sum[i]);
    }
}

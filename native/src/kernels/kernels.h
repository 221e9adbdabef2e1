/* The kernels: one table of functions per instruction set. Scalar C is the specification (arith.h on these layouts);
 * every other table must give the same bits for every input, row count and split of the work.
 *
 * Packed matrices ("row in lane"): 16 weight rows ride in the 16 lanes of a vector, so no sum crosses lanes. A group
 * holds 16 rows of k values; a block is 32 values (types of 32) or 256 (super-blocks). First the blocks' scales and,
 * for types that have them, minima, then the blocks' codes:
 *   scales  f16 [blocks][16], padded to 64 bytes;   minima the same
 *   blocks  [blocks][vectors][64 bytes]
 * In the vectors of a block, byte (l, t) belongs to row l of the group and to value 4s + t of a step s of 4 values:
 *   8 bits (Q8_0)                  vector s: the code of step s, plus the table's q8_bias
 *   4 bits (Q4_0, Q4_1, IQ4_NL)    vector s < 4: low half step s, high half step s + 4
 *   5 bits (Q5_0, Q5_1)            vector s < 4: bits 0-4 step s, bits 5-7 the low three bits of step s + 4;
 *                                  vector 4: bits 2s, 2s + 1 the high two bits of step s + 4
 *   Q4_K, Q5_K                     vectors 0, 1: scales of groups 0-3, 4-7 of 32 values (byte (l, g % 4)); 2, 3:
 *                                  their minima; then 8 blocks of 32 codes of 4 or 5 bits as above
 *   Q6_K                           vectors 0-3: scales of groups 0-3, ... of 16 values; then for each group three
 *                                  vectors j: bits 0-5 step j, bits 6-7 bits 2j, 2j + 1 of step 3
 * Codes are the file's, unsigned (a type's offset leaves with the sums of the activation codes).
 * F32 matrices stay rows and go through `dots`.
 *
 * Attention blocks: 64 positions of one key/value head (int8):
 *   K       u8  [hd/4][64][4]            code + 128
 *   V       i8  [64/4][hd][4]
 *   scales  f16 [hd/64][64] for K, then for V
 * and as floats (F32 or F16, attend_float.c):
 *   K       [64][hd], then V [64][hd] */
#ifndef ST_KERNELS_H
#define ST_KERNELS_H

#include "strata.h"

extern const st_kernels st_kernels_scalar;
extern const st_kernels st_kernels_avx2;
extern const st_kernels st_kernels_avxvnni;      /* VEX encoding: AVX-VNNI */
extern const st_kernels st_kernels_avxvnni_evex; /* the same source for AVX-512 VL and VNNI */
extern const st_kernels st_kernels_avx512;

/* Bytes of the scales, or of the minima, of a packed group. */
static inline size_t st_pack_scale_bytes(int blocks) { return ((size_t)blocks * 32 + 63) & ~(size_t)63; }

/* The weight types, in the order of enum st_weight: name, suffix of its functions, values and bytes of a file's block,
 * bits of a code, what is taken off a code, whether blocks carry a minimum. */
#define ST_WEIGHT_LIST(X) \
    X(Q8_0, q8_0, 32, 34, 8, 0, 0) \
    X(Q4_0, q4_0, 32, 18, 4, 8, 0) \
    X(Q4_1, q4_1, 32, 20, 4, 0, 1) \
    X(Q5_0, q5_0, 32, 22, 5, 16, 0) \
    X(Q5_1, q5_1, 32, 24, 5, 0, 1) \
    X(IQ4_NL, iq4_nl, 32, 18, 4, 0, 0) \
    X(Q4_K, q4_k, 256, 144, 4, 0, 1) \
    X(Q5_K, q5_k, 256, 176, 5, 0, 1) \
    X(Q6_K, q6_k, 256, 210, 6, 32, 0)

/* Columns of the list as functions, which fold where the type is a constant. */
#define ST_COLUMN_BLOCK(U, l, size, bytes, bits, offset, min) case ST_W_##U: return size;
#define ST_COLUMN_BITS(U, l, size, bytes, bits, offset, min) case ST_W_##U: return bits;
#define ST_COLUMN_OFFSET(U, l, size, bytes, bits, offset, min) case ST_W_##U: return offset;
#define ST_COLUMN_MIN(U, l, size, bytes, bits, offset, min) case ST_W_##U: return min;
static inline int st_weight_block(int type) { switch (type) { ST_WEIGHT_LIST(ST_COLUMN_BLOCK) } return 0; }
static inline int st_weight_bits(int type) { switch (type) { ST_WEIGHT_LIST(ST_COLUMN_BITS) } return 0; }
static inline int st_weight_offset(int type) { switch (type) { ST_WEIGHT_LIST(ST_COLUMN_OFFSET) } return 0; }
static inline int st_weight_has_min(int type) { switch (type) { ST_WEIGHT_LIST(ST_COLUMN_MIN) } return 0; }

/* 64-byte vectors of scales and minima of groups before the codes of a super-block; vectors of a block in all. */
static inline int st_weight_head(int type) { return st_weight_block(type) == 256 ? 4 : 0; }
static inline int st_weight_vectors(int type) {
    return st_weight_head(type) + st_weight_block(type) / 32 * st_weight_bits(type);
}
/* Where the codes' blocks begin in a packed group of `blocks` blocks. */
static inline size_t st_pack_blocks_at(int type, int blocks) {
    return st_pack_scale_bytes(blocks) * (size_t)(1 + st_weight_has_min(type));
}

/* n <= 16 rows of a file into a packed group of `blocks` blocks (pack.c). */
#define ST_DECLARE_PACK(U, l, size, bytes, bits, offset, min) \
    void st_pack_##l(const uint8_t *rows, size_t row_bytes, int n, int blocks, uint32_t flip, uint8_t *out);
ST_WEIGHT_LIST(ST_DECLARE_PACK)

/* Sizes of the attention block layout above. */
static inline size_t st_kv_head_bytes(int hd) { return (size_t)hd * 128 + (size_t)((hd + 63) / 64) * 256; }
static inline size_t st_kv_v_offset(int hd) { return (size_t)hd * 64; }
static inline size_t st_kv_kscale_offset(int hd) { return (size_t)hd * 128; }
static inline size_t st_kv_vscale_offset(int hd) { return (size_t)hd * 128 + (size_t)((hd + 63) / 64) * 128; }

/* ---- keys and values of every type (attend_float.c) ----------------------------------------------------------- */

/* Bytes of a block of one head. */
size_t st_kv_bytes(int kv, int hd);
/* "int8", "f16", "f32"; the type of a name (NULL: int8), -1 when there is none. */
const char *st_kv_name(int kv);
int st_kv_find(const char *name);
/* Key and value rows of a head into slot 0..63 of its block; attention over them. Not for int8. hd is at most 1024. */
void st_store_float(int kv, int hd, int slot, const float *key, const float *value, uint8_t *head);
void st_attend_float(const st_attend *a, int kv);
/* Zero the positions from `from` (0..64) on of a head's block, of any type. */
void st_kv_clear(int kv, int hd, int from, uint8_t *head);

#endif

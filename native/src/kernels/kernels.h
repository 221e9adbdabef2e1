/* The kernels: one table of functions per instruction set. Scalar C is the specification (arith.h on these layouts);
 * every other table must give the same bits for every input, row count and split of the work.
 *
 * Packed matrices ("row in lane"): 16 weight rows ride in the 16 lanes of a vector, so no sum crosses lanes.
 * A group holds 16 rows of k values; b = 32-value block, s = 4-value step, l = row in group, t = value in step:
 *   scales  f16 [k/32][16], padded to 64 bytes
 *   Q8_0    u8  [k/32][8 steps][16][4]   code + the table's q8_bias
 *   Q4_0    u8  [k/32][4 steps][16][4]   low nibble: value 4s + t, high nibble: value 16 + 4s + t; code + 8
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
extern const st_kernels st_kernels_avx512;

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

#endif

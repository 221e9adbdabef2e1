/* CRC-32C: the processor's own instruction where it has one, else eight tables ("slicing by 8": Kounavis and Berry,
 * "Novel Table Lookup-Based Algorithms for High-Performance CRC Generation", 2008). */
#include "crc32c.h"

#include <pthread.h>
#include <string.h>

#ifdef __x86_64__
#include <nmmintrin.h>
#endif

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "words are loaded as stored: little-endian hosts only");

enum { POLYNOMIAL = (int)0x82f63b78 }; /* reflected */

static uint32_t table[8][256];
static pthread_once_t made = PTHREAD_ONCE_INIT;

static void make_table(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int bit = 0; bit < 8; bit++) c = (c >> 1) ^ (c & 1 ? (uint32_t)POLYNOMIAL : 0);
        table[0][i] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++) table[k][i] = (table[k - 1][i] >> 8) ^ table[0][table[k - 1][i] & 255];
}

uint32_t st_crc32c_table(uint32_t crc, const void *data, size_t len) {
    const uint8_t *p = data;
    pthread_once(&made, make_table);
    crc = ~crc;
    for (; len >= 8; p += 8, len -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= crc;
        crc = 0;
        for (int k = 0; k < 8; k++) crc ^= table[7 - k][(w >> (8 * k)) & 255];
    }
    for (; len; len--) crc = (crc >> 8) ^ table[0][(crc ^ *p++) & 255];
    return ~crc;
}

#ifdef __x86_64__
__attribute__((target("sse4.2"))) static uint32_t with_instruction(uint32_t crc, const void *data, size_t len) {
    const uint8_t *p = data;
    uint64_t c = ~crc;
    for (; len >= 8; p += 8, len -= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        c = _mm_crc32_u64(c, w);
    }
    for (; len; len--) c = _mm_crc32_u8((uint32_t)c, *p++);
    return ~(uint32_t)c;
}
#endif

uint32_t st_crc32c(uint32_t crc, const void *data, size_t len) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("sse4.2")) return with_instruction(crc, data, len);
#endif
    return st_crc32c_table(crc, data, len);
}

/* Repacking of GGUF rows into the row-in-lane layouts of kernels.h. */
#include "kernels/kernels.h"

#include <string.h>

enum { TYPE_Q4_0 = 2, TYPE_Q8_0 = 8 };

size_t st_pack_scale_bytes(int k) { return ((size_t)k / 32 * 32 + 63) & ~(size_t)63; }

size_t st_pack_group_bytes(int type, int k) {
    size_t blocks = (size_t)k / 32;
    if (type == TYPE_Q8_0) return st_pack_scale_bytes(k) + blocks * 512;
    if (type == TYPE_Q4_0) return st_pack_scale_bytes(k) + blocks * 256;
    return 0;
}

static void pack_row(uint32_t flip, int type, const uint8_t *row, int lane, int k, uint8_t *out) {
    uint8_t *codes = out + st_pack_scale_bytes(k);
    int blocks = k / 32, steps = type == TYPE_Q8_0 ? 8 : 4, bytes = type == TYPE_Q8_0 ? 34 : 18;
    for (int b = 0; b < blocks; b++, row += bytes) {
        memcpy(out + ((size_t)b * ST_LANES + (size_t)lane) * 2, row, 2);
        for (int s = 0; s < steps; s++) {
            uint32_t v;
            memcpy(&v, row + 2 + 4 * s, 4);
            v ^= flip;
            memcpy(codes + (((size_t)b * (size_t)steps + (size_t)s) * ST_LANES + (size_t)lane) * 4, &v, 4);
        }
    }
}

void st_pack_group(const st_kernels *table, int type, const uint8_t *rows, size_t row_bytes, int n, int k, uint8_t *out) {
    uint32_t flip = type == TYPE_Q8_0 && table->q8_bias ? 0x80808080u : 0;
    memset(out, 0, st_pack_group_bytes(type, k));
    for (int lane = 0; lane < n; lane++) pack_row(flip, type, rows + (size_t)lane * row_bytes, lane, k, out);
}

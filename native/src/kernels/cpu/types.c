/* The table of weight types: everything about a type but the speed of its kernels is asked here. */
#include "arith.h"
#include "kernels/kernels.h"

#define FUNCTIONS(U, l, size, bytes, bits, offset, min) \
    static float row_##l(const uint8_t *w, const int8_t *xq, const float *xd, int k) { return st_row_##l(w, xq, xd, k); } \
    static void floats_##l(const uint8_t *block, float *y) { \
        st_block##size b; \
        st_decode_##l(block, &b); \
        st_block##size##_floats(&b, min, y); \
    }
ST_WEIGHT_LIST(FUNCTIONS)

#define ENTRY(U, l, size, bytes, bits, offset, min) \
    {ST_GGML_##U, #U, size, bytes, size == 256 ? ST_FORM_256 : ST_FORM_32, min, (size == 256 ? 4 : 0) + size / 32 * bits, \
     row_##l, floats_##l, st_pack_##l},
static const st_weight_type TYPES[ST_WEIGHT_TYPES] = {ST_WEIGHT_LIST(ENTRY)};

const st_weight_type *st_weight_type_at(int i) { return i >= 0 && i < ST_WEIGHT_TYPES ? &TYPES[i] : NULL; }

int st_weight_find(int ggml_id) {
    for (int i = 0; i < ST_WEIGHT_TYPES; i++)
        if (TYPES[i].id == ggml_id) return i;
    return -1;
}

/* Attention over keys and values that are held as floats: the slow reference beside the int8 form of the kernel
 * tables. Plain C over arith.h, so one function gives every instruction set's bits.
 *
 * Only the scores and the weighted values differ from int8 (arith.h, "float keys and values"); blocks, spans and folds
 * are the same rule 6. */
#include "arith.h"
#include "kernels/kernels.h"

enum { MAX_HD = 1024 };

/* Row `slot` of a block's keys (at = 0) or values (at = 1) as floats: in place for F32, widened into `room` for F16. */
static const float *row(const uint8_t *head, int kv, int hd, int at, int slot, float *room) {
    size_t first = ((size_t)at * ST_POSBLOCK + (size_t)slot) * (size_t)hd;
    if (kv == ST_KV_F32) return (const float *)(const void *)head + first;
    const uint16_t *half = (const uint16_t *)(const void *)head + first;
    for (int j = 0; j < hd; j++) room[j] = st_h2f(half[j]);
    return room;
}

void st_store_float(int kv, int hd, int slot, const float *key, const float *value, uint8_t *head) {
    const float *from[2] = {key, value};
    for (int at = 0; at < 2; at++) {
        size_t first = ((size_t)at * ST_POSBLOCK + (size_t)slot) * (size_t)hd;
        if (kv == ST_KV_F32) {
            memcpy((float *)(void *)head + first, from[at], (size_t)hd * sizeof(float));
            continue;
        }
        uint16_t *half = (uint16_t *)(void *)head + first;
        for (int j = 0; j < hd; j++) half[j] = st_f2h(from[at][j]);
    }
}

/* Maximum, denominator and weighted values of n positions of one block. */
static st_soft block(const st_attend *a, int kv, const uint8_t *head, int n, float *out) {
    float score[ST_POSBLOCK] = {0}, room[MAX_HD];
    st_soft s;
    for (int i = 0; i < n; i++) score[i] = st_dot(a->query, row(head, kv, a->hd, 0, i, room), a->hd) * a->scale;
    s.m = st_attn_weights(score, n, &s.l);
    for (int j = 0; j < a->hd; j++) out[j] = 0.0f;
    for (int i = 0; i < n; i++) {
        const float *v = row(head, kv, a->hd, 1, i, room);
        for (int j = 0; j < a->hd; j++) out[j] = ST_FMA(score[i], v[j], out[j]);
    }
    return s;
}

void st_attend_float(const st_attend *a, int kv) {
    float total[MAX_HD] = {0}, span[MAX_HD], out[MAX_HD];
    st_soft all = {-INFINITY, 0.0f}, s = all;
    int blocks = (a->npos + ST_POSBLOCK - 1) / ST_POSBLOCK;
    for (int b = 0; b < blocks; b++) {
        int n = a->npos - b * ST_POSBLOCK < ST_POSBLOCK ? a->npos - b * ST_POSBLOCK : ST_POSBLOCK;
        st_soft one = block(a, kv, a->blocks[b] + a->offset, n, out);
        if (b % ST_SPAN == 0) {
            s = (st_soft){-INFINITY, 0.0f};
            memset(span, 0, sizeof span);
        }
        st_fold(&s, span, one.m, one.l, out, a->hd);
        if (b % ST_SPAN == ST_SPAN - 1 || b == blocks - 1) st_fold(&all, total, s.m, s.l, span, a->hd);
    }
    float inv = 1.0f / all.l;
    for (int j = 0; j < a->hd; j++) a->out[j] = total[j] * inv;
}

/* ---- the types by name and size ------------------------------------------------------------------------------- */

static const char *const NAMES[] = {[ST_KV_INT8] = "int8", [ST_KV_F16] = "f16", [ST_KV_F32] = "f32"};
enum { N_TYPES = sizeof NAMES / sizeof *NAMES };

const char *st_kv_name(int kv) { return kv >= 0 && kv < N_TYPES ? NAMES[kv] : NULL; }

int st_kv_find(const char *name) {
    for (int i = 0; name && i < N_TYPES; i++)
        if (!strcmp(NAMES[i], name)) return i;
    return name ? -1 : ST_KV_INT8;
}

size_t st_kv_bytes(int kv, int hd) {
    if (kv == ST_KV_INT8) return st_kv_head_bytes(hd);
    return (size_t)hd * 2 * ST_POSBLOCK * (kv == ST_KV_F32 ? sizeof(float) : sizeof(uint16_t));
}

/* ---- positions that are nobody's ------------------------------------------------------------------------------ */

/* Positions [from, 64) of rows that are 64 positions of `each` bytes wide. */
static void clear_rows(uint8_t *rows, size_t n, size_t each, int from) {
    for (size_t r = 0; r < n; r++) memset(rows + (r * ST_POSBLOCK + (size_t)from) * each, 0, (size_t)(ST_POSBLOCK - from) * each);
}

static void clear_int8(int hd, int from, uint8_t *head) {
    size_t groups = (size_t)(hd + ST_KVGROUP - 1) / ST_KVGROUP, width = (size_t)hd, four = (size_t)(from + 3) / 4 * 4;
    uint8_t *v = head + st_kv_v_offset(hd);
    clear_rows(head, width / 4, 4, from);
    for (size_t j = 0; from % 4 && j < width; j++) memset(v + ((size_t)(from / 4) * width + j) * 4 + from % 4, 0, (size_t)(4 - from % 4));
    memset(v + four * width, 0, (ST_POSBLOCK - four) * width);
    clear_rows(head + st_kv_kscale_offset(hd), 2 * groups, 2, from);
}

void st_kv_clear(int kv, int hd, int from, uint8_t *head) {
    size_t row = (size_t)hd * (kv == ST_KV_F32 ? sizeof(float) : sizeof(uint16_t));
    if (kv == ST_KV_INT8) clear_int8(hd, from, head);
    else clear_rows(head, 2, row, from);
}

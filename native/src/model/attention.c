/* Grouped-query attention over a session's blocks (rule 6), with or without a gate on every head. */
#include "arith.h"
#include "model/net.h"

/* The first n_rot values of a head, in pairs. */
static void rope(const st_net *p, int r, float *x) {
    int half = p->n_rot / 2;
    const float *cos = p->cos + r * half, *sin = p->sin + r * half;
    if (p->rope == ST_ROPE_HALVES)
        for (int i = 0; i < half; i++) st_rope_pair(x + i, x + i + half, cos[i], sin[i]);
    else
        for (int i = 0; i < half; i++) st_rope_pair(x + 2 * i, x + 2 * i + 1, cos[i], sin[i]);
}

/* A head of queries or keys as attention sees it: normed where the model norms, roped. */
static void prepare(const st_pass *c, const float *x, const float *norm, int r, float *out) {
    st_net *p = c->p;
    if (norm) c->k->rms_norm(x, norm, p->hd, p->eps, out);
    else memcpy(out, x, (size_t)p->hd * sizeof *out);
    rope(p, r, out);
}

static size_t head_offset(const st_net *p, const st_layer *l, int kvh) {
    return st_kv_bytes(p->kv, p->hd) * ((size_t)l->index * (size_t)p->kv_heads + (size_t)kvh);
}

/* Codes and scales of a key and a value into slot 0..63 of their block (layout: kernels.h). */
static void store_int8(const st_kernels *k, int hd, int slot, const float *key, const float *value, uint8_t *head) {
    int8_t code[ST_KVGROUP];
    for (int g = 0; g * ST_KVGROUP < hd; g++) {
        int n = hd - g * ST_KVGROUP < ST_KVGROUP ? hd - g * ST_KVGROUP : ST_KVGROUP, at = g * ST_KVGROUP;
        uint16_t scale = k->quantize_kv(key + at, n, code);
        memcpy(head + st_kv_kscale_offset(hd) + (size_t)(g * ST_POSBLOCK + slot) * 2, &scale, 2);
        for (int j = 0; j < n; j++)
            head[((at + j) / 4 * ST_POSBLOCK + slot) * 4 + j % 4] = (uint8_t)(code[j] + 128);
        scale = k->quantize_kv(value + at, n, code);
        memcpy(head + st_kv_vscale_offset(hd) + (size_t)(g * ST_POSBLOCK + slot) * 2, &scale, 2);
        for (int j = 0; j < n; j++)
            head[st_kv_v_offset(hd) + (size_t)((slot / 4 * hd + at + j) * 4 + slot % 4)] = (uint8_t)code[j];
    }
}

/* Key and value of one row and head into their block. */
static void store_kv(const st_pass *c, const st_layer *l, int r, int kvh) {
    st_net *p = c->p;
    int hd = p->hd, slot = p->rows[r].pos % ST_POSBLOCK;
    float key[ST_MAX_HEAD_DIM];
    const float *k = p->u + (size_t)r * (size_t)(2 * p->kv_heads * hd) + kvh * hd, *v = k + p->kv_heads * hd;
    uint8_t *head = p->rows[r].blocks[p->rows[r].pos / ST_POSBLOCK] + head_offset(p, l, kvh);
    prepare(c, k, l->k_norm, r, key);
    if (p->kv == ST_KV_INT8) store_int8(c->k, hd, slot, key, v, head);
    else st_store_float(p->kv, hd, slot, key, v, head);
}

/* One query head of one row over positions 0..pos; gated: times sigmoid of the gate, which follows the query. */
static void attend(const st_pass *c, const st_layer *l, int r, int h) {
    st_net *p = c->p;
    int hd = p->hd, width = p->gated ? 2 * hd : hd;
    float query[ST_MAX_HEAD_DIM];
    const float *q = p->c + ((size_t)r * (size_t)p->heads + (size_t)h) * (size_t)width;
    float *y = p->large.mix.x + ((size_t)r * (size_t)p->heads + (size_t)h) * (size_t)hd;
    prepare(c, q, l->q_norm, r, query);
    st_attend a = {.blocks = (const uint8_t *const *)p->rows[r].blocks, .offset = head_offset(p, l, h / (p->heads / p->kv_heads)),
                   .hd = hd, .npos = p->rows[r].pos + 1, .scale = 1.0f / sqrtf((float)hd), .query = query, .out = y};
    if (p->kv == ST_KV_INT8) c->k->attend(&a);
    else st_attend_float(&a, p->kv);
    if (p->gated) c->k->sigmoid_mul(y, q + hd, hd, y);
}

void st_stage_attention(const st_pass *c, const st_layer *l) {
    st_net *p = c->p;
    size_t kv = (size_t)(p->kv_heads * p->hd), q = (size_t)l->q.n;
    st_columns(c, &c->t->h, c->n_rows,
               (st_column[]){{&l->q, p->c, q}, {&l->k, p->u, 2 * kv}, {&l->v, p->u + kv, 2 * kv}}, 3, ST_STORE);
    st_pass_barrier(c);
    for (int i = c->member; i < c->n_rows * p->kv_heads; i += c->size) store_kv(c, l, i / p->kv_heads, i % p->kv_heads);
    st_pass_barrier(c);
    for (int i = c->member; i < c->n_rows * p->heads; i += c->size) attend(c, l, i / p->heads, i % p->heads);
    st_pass_barrier(c);
    st_project_out(c, &l->o);
}

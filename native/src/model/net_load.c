/* Reading keys and tensors into a net, and the scratch of its windows. */
#include "arith.h"
#include "errors.h"
#include "math_d.h"
#include "model/net.h"

#include <stdio.h>
#include <stdlib.h>

static const char *tensor_name(const st_loader *L, const char *suffix, char *buf, size_t n) {
    snprintf(buf, n, "blk.%d.%s", L->block, suffix);
    return buf;
}

int st_load_mat(const st_loader *L, const char *suffix, int k, int n, int experts, st_mat *out) {
    char name[96];
    return st_weights_mat(L->m->weights, tensor_name(L, suffix, name, sizeof name), k, n, experts, out, L->err);
}

int st_load_vec(const st_loader *L, const char *suffix, int k, int rows, float **out) {
    char name[96];
    return st_weights_f32(L->m->weights, tensor_name(L, suffix, name, sizeof name), k, rows, out, L->err);
}

int st_load_attention_keys(st_model *m, st_net *p, st_error *err) {
    int value_length;
    double eps, base;
    if (st_model_int(m, "embedding_length", 32, 1 << 16, -1, &p->E, err) ||
        st_model_int(m, "attention.head_count", 1, 4096, -1, &p->heads, err) ||
        st_model_int(m, "attention.head_count_kv", 1, 4096, p->heads, &p->kv_heads, err) ||
        st_model_int(m, "attention.key_length", 4, ST_MAX_HEAD_DIM, p->E / p->heads, &p->hd, err) ||
        st_model_int(m, "attention.value_length", 4, ST_MAX_HEAD_DIM, p->hd, &value_length, err) ||
        st_model_int(m, "rope.dimension_count", 2, p->hd, p->hd, &p->n_rot, err) ||
        st_model_float(m, "attention.layer_norm_rms_epsilon", -1, &eps, err) || st_model_float(m, "rope.freq_base", 10000.0, &base, err))
        return -1;
    p->eps = (float)eps;
    p->kv = m->shape.kv;
    if (value_length != p->hd)
        return st_fail(err, "model_unsupported", "attention.value_length %d differs from key_length %d", value_length, p->hd);
    if (p->heads % p->kv_heads)
        return st_fail(err, "model_format", "attention.head_count %d is no multiple of head_count_kv %d", p->heads, p->kv_heads);
    if (p->n_rot % 2) return st_fail(err, "model_format", "rope.dimension_count %d is odd", p->n_rot);
    if (p->E % 32 || p->hd % 4 || (p->heads * p->hd) % 32)
        return st_fail(err, "model_unsupported", "embedding_length %d and attention width %d x %d must be multiples of 32", p->E, p->heads, p->hd);
    if (!(p->inv_freq = calloc((size_t)p->n_rot / 2, sizeof *p->inv_freq))) return st_fail(err, "no_memory", "no memory for rope");
    for (int i = 0; i < p->n_rot / 2; i++) p->inv_freq[i] = st_pow_d(base, -2.0 * i / p->n_rot);
    return 0;
}

int st_load_delta_net_keys(st_model *m, st_net *p, st_error *err) {
    int inner, taps;
    if (st_model_int(m, "ssm.group_count", 1, 4096, -1, &p->hk, err) || st_model_int(m, "ssm.time_step_rank", 1, 4096, -1, &p->hv, err) ||
        st_model_int(m, "ssm.state_size", 4, ST_MAX_HEAD_DIM, -1, &p->d, err) ||
        st_model_int(m, "ssm.inner_size", 1, 1 << 20, p->hv * p->d, &inner, err) ||
        st_model_int(m, "ssm.conv_kernel", ST_TAPS, ST_TAPS, ST_TAPS, &taps, err))
        return -1;
    p->values = p->hv * p->d;
    p->channels = 2 * p->hk * p->d + p->values;
    if (p->hv % p->hk) return st_fail(err, "model_format", "ssm.time_step_rank %d is no multiple of ssm.group_count %d", p->hv, p->hk);
    if (inner != p->values) return st_fail(err, "model_format", "ssm.inner_size %d is not time_step_rank x state_size = %d", inner, p->values);
    if (p->values % 32 || p->d % 4) return st_fail(err, "model_unsupported", "ssm.inner_size %d must be a multiple of 32", p->values);
    return 0;
}

int st_load_expert_keys(st_model *m, st_net *p, st_error *err) {
    double scale;
    if (st_model_int(m, "expert_count", 1, ST_MAX_EXPERTS, -1, &p->experts, err) ||
        st_model_int(m, "expert_used_count", 1, ST_MAX_USED, -1, &p->used, err) ||
        st_model_int(m, "expert_feed_forward_length", 32, 1 << 16, -1, &p->ff, err) ||
        st_model_int(m, "expert_shared_feed_forward_length", 32, 1 << 16, p->ff, &p->shared_ff, err) ||
        st_model_float(m, "expert_weights_scale", 1.0, &scale, err))
        return -1;
    p->expert_scale = (float)scale;
    if (p->used > p->experts) return st_fail(err, "model_format", "expert_used_count %d exceeds expert_count %d", p->used, p->experts);
    if (p->ff % 32 || p->shared_ff % 32)
        return st_fail(err, "model_unsupported", "expert widths %d and %d must be multiples of 32", p->ff, p->shared_ff);
    return 0;
}

int st_load_delta_net(const st_loader *L, st_layer *l) {
    const st_net *p = L->p;
    float *conv;
    if (st_load_mat(L, "attn_qkv.weight", p->E, p->channels, 0, &l->qkv) || st_load_mat(L, "attn_gate.weight", p->E, p->values, 0, &l->gate) ||
        st_load_mat(L, "ssm_out.weight", p->values, p->E, 0, &l->out) || st_load_vec(L, "ssm_conv1d.weight", ST_TAPS, p->channels, &conv) ||
        st_load_vec(L, "ssm_alpha.weight", p->E, p->hv, &l->alpha) || st_load_vec(L, "ssm_beta.weight", p->E, p->hv, &l->beta) ||
        st_load_vec(L, "ssm_a", p->hv, 1, &l->a) || st_load_vec(L, "ssm_dt.bias", p->hv, 1, &l->dt) || st_load_vec(L, "ssm_norm.weight", p->d, 1, &l->norm))
        return -1;
    if (!(l->conv = st_weights_room(L->m->weights, (size_t)ST_TAPS * (size_t)p->channels, L->err))) return -1;
    for (int ch = 0; ch < p->channels; ch++) /* taps outermost: channels ride in lanes */
        for (int t = 0; t < ST_TAPS; t++) l->conv[t * p->channels + ch] = conv[ch * ST_TAPS + t];
    return 0;
}

int st_load_attention(const st_loader *L, st_layer *l) {
    const st_net *p = L->p;
    int q = p->heads * p->hd, kv = p->kv_heads * p->hd;
    if (st_load_mat(L, "attn_q.weight", p->E, p->gated ? 2 * q : q, 0, &l->q) || st_load_mat(L, "attn_k.weight", p->E, kv, 0, &l->k) ||
        st_load_mat(L, "attn_v.weight", p->E, kv, 0, &l->v) || st_load_mat(L, "attn_output.weight", q, p->E, 0, &l->o))
        return -1;
    return p->gated ? st_load_vec(L, "attn_q_norm.weight", p->hd, 1, &l->q_norm) || st_load_vec(L, "attn_k_norm.weight", p->hd, 1, &l->k_norm) : 0;
}

int st_load_experts(const st_loader *L, st_layer *l) {
    const st_net *p = L->p;
    if (st_load_vec(L, "ffn_gate_inp.weight", p->E, p->experts, &l->router) ||
        st_load_mat(L, "ffn_gate_exps.weight", p->E, p->ff, p->experts, &l->gate_e) ||
        st_load_mat(L, "ffn_up_exps.weight", p->E, p->ff, p->experts, &l->up_e) ||
        st_load_mat(L, "ffn_down_exps.weight", p->ff, p->E, p->experts, &l->down_e))
        return -1;
    return st_load_vec(L, "ffn_gate_inp_shexp.weight", p->E, 1, &l->shared_gate) ||
           st_load_mat(L, "ffn_gate_shexp.weight", p->E, p->shared_ff, 0, &l->gate_s) ||
           st_load_mat(L, "ffn_up_shexp.weight", p->E, p->shared_ff, 0, &l->up_s) ||
           st_load_mat(L, "ffn_down_shexp.weight", p->shared_ff, p->E, 0, &l->down_s);
}

int st_load_dense(const st_loader *L, st_layer *l) {
    const st_net *p = L->p;
    return st_load_mat(L, "ffn_gate.weight", p->E, p->ff_dense, 0, &l->ff_gate) ||
           st_load_mat(L, "ffn_up.weight", p->E, p->ff_dense, 0, &l->ff_up) || st_load_mat(L, "ffn_down.weight", p->ff_dense, p->E, 0, &l->ff_down);
}

int st_load_globals(st_model *m, st_net *p, st_error *err) {
    const char *out = st_weights_has(m->weights, "output.weight") ? "output.weight" : "token_embd.weight"; /* tied */
    p->embedding = st_gguf_tensor_find(m->gguf, "token_embd.weight");
    if (!p->embedding) return st_fail(err, "model_format", "tensor token_embd.weight is missing");
    if (p->embedding->ne[1] < 1 || p->embedding->ne[1] > 1 << 24)
        return st_fail(err, "model_format", "tensor token_embd.weight has %lld rows", (long long)p->embedding->ne[1]);
    m->n_vocab = (int)p->embedding->ne[1];
    m->n_embd = p->E;
    if (p->embedding->ne[0] != p->E)
        return st_fail(err, "model_format", "tensor token_embd.weight is %lld wide, embedding_length is %d", (long long)p->embedding->ne[0], p->E);
    if (!st_gguf_row_readable(p->embedding)) return st_gguf_refuse_type(p->embedding, err);
    if (st_weights_f32(m->weights, "output_norm.weight", p->E, 1, &p->out_norm, err)) return -1;
    return st_weights_mat(m->weights, out, p->E, m->n_vocab, 0, &p->head, err);
}

int st_load_draft(const st_loader *L) {
    st_net *p = L->p;
    return st_load_mat(L, "nextn.eh_proj.weight", 2 * p->E, p->E, 0, &p->draft_in) ||
           st_load_vec(L, "nextn.enorm.weight", p->E, 1, &p->draft_token_norm) ||
           st_load_vec(L, "nextn.hnorm.weight", p->E, 1, &p->draft_hidden_norm) ||
           st_load_vec(L, "nextn.shared_head_norm.weight", p->E, 1, &p->draft_out_norm);
}

static int temp_new(const st_model *m, const st_net *p, st_temp *t, int rows) {
    const st_kernels *k = m->kernels;
    const st_weights *w = m->weights;
    int wide = p->values > p->heads * p->hd ? p->values : p->heads * p->hd, pairs = rows * p->used;
    int single = p->shared_ff > p->ff_dense ? p->shared_ff : p->ff_dense; /* the shared expert, or the dense form */
    size_t n = (size_t)pairs, ints = n * 2 + (size_t)p->experts * 2 + 2;
    int mixed = st_weights_forms(w, p->values) | st_weights_forms(w, p->heads * p->hd);
    if (st_act_new(k, &t->h, rows, p->E, st_weights_forms(w, p->E)) || st_act_new(k, &t->mix, rows, wide, mixed) ||
        st_act_new(k, &t->pair, pairs, p->ff, st_weights_forms(w, p->ff)) ||
        st_act_new(k, &t->shared, rows, single, st_weights_forms(w, p->shared_ff) | st_weights_forms(w, p->ff_dense)))
        return -1;
    t->logits = malloc(((size_t)rows * (size_t)(p->experts + 1) + 2 * n) * sizeof(float));
    t->expert = malloc(ints * sizeof(int));
    t->state = malloc((size_t)(p->d * p->d) * sizeof(float) + 64);
    if (!t->logits || !t->expert || !t->state) return -1;
    if (p->draft && st_act_new(k, &t->draft, rows, 2 * p->E, st_weights_forms(w, 2 * p->E))) return -1;
    t->gate = t->logits + (size_t)rows * (size_t)p->experts;
    t->weight = t->gate + rows;
    t->share = t->weight + n;
    t->token = t->expert + n;
    t->active = t->token + n;
    t->first = t->active + p->experts;
    return 0;
}

static void temp_free(st_temp *t) {
    free(t->h.x);
    free(t->mix.x);
    free(t->pair.x);
    free(t->shared.x);
    free(t->logits);
    free(t->expert);
    free(t->state);
    free(t->draft.x);
}

static float *floats(size_t rows, int width) {
    void *p = NULL;
    return posix_memalign(&p, 64, rows * (size_t)width * sizeof(float) + 64) ? NULL : p;
}

static int make_scratch(st_model *m, st_net *p, st_error *err) {
    size_t R = (size_t)m->max_rows;
    int q = 2 * p->heads * p->hd, kv = 2 * p->kv_heads * p->hd, wide = p->channels > q ? p->channels : q;
    int single = p->shared_ff > p->ff_dense ? p->shared_ff : p->ff_dense;
    p->members = st_team_size(m->team);
    p->rows = malloc(R * sizeof *p->rows);
    p->x = floats(R, p->E);
    p->u = floats(R, p->channels > kv ? p->channels : kv);
    p->c = floats(R, wide);
    p->z = floats(R, p->values);
    p->decay = floats(R, p->hv);
    p->beta = floats(R, p->hv);
    p->cos = floats(R, p->n_rot / 2);
    p->sin = floats(R, p->n_rot / 2);
    p->gate_rows = floats(R * (size_t)p->used, p->ff);
    p->up_rows = floats(R * (size_t)p->used, p->ff);
    p->gate_shared = floats(R, single);
    p->up_shared = floats(R, single);
    p->moe = floats(R, p->E);
    p->small = calloc((size_t)p->members, sizeof *p->small);
    p->next = calloc((size_t)p->n_layers + 1, sizeof *p->next); /* the last: the drafter */
    int bad = !p->rows || !p->x || !p->u || !p->c || !p->z || !p->decay || !p->beta || !p->cos || !p->sin || !p->gate_rows || !p->up_rows || !p->gate_shared ||
              !p->up_shared || !p->moe || !p->small || !p->next || temp_new(m, p, &p->large, m->max_rows);
    for (int i = 0; !bad && i < p->members; i++) bad = temp_new(m, p, &p->small[i], ST_SMALL_ROWS);
    return bad ? st_fail(err, "no_memory", "no memory for windows of %d rows", m->max_rows) : 0;
}

st_net *st_net_new(st_model *m, st_error *err) {
    st_net *p = calloc(1, sizeof *p);
    if (!p) st_fail(err, "no_memory", "no memory for a model");
    m->self = p;
    return p;
}

int st_net_layers(st_model *m, st_net *p, st_error *err) {
    int nextn, blocks;
    if (st_model_int(m, "block_count", 1, 4096, -1, &blocks, err) || st_model_int(m, "nextn_predict_layers", 0, 64, 0, &nextn, err)) return -1;
    p->n_layers = blocks - nextn;
    if (p->n_layers < 1) return st_fail(err, "model_format", "block_count %d leaves no layer besides %d MTP blocks", blocks, nextn);
    if (!(p->layers = calloc((size_t)p->n_layers, sizeof *p->layers))) return st_fail(err, "no_memory", "no memory for %d layers", p->n_layers);
    return 0;
}

int st_net_finish(st_model *m, st_net *p, st_error *err) {
    for (int i = 0; i < p->n_layers; i++)
        p->layers[i].index = p->layers[i].recurrent ? m->shape.recurrent_layers++ : m->shape.attn_layers++;
    m->shape.kv_heads = p->kv_heads;
    m->shape.head_dim = p->hd;
    m->shape.state_floats = (size_t)p->hv * (size_t)(p->d * p->d);
    m->shape.conv_floats = (size_t)(ST_TAPS - 1) * (size_t)p->channels;
    m->shape.draft_row_floats = (size_t)(2 * p->channels + 2 * p->hv);
    m->shape.n_embd = p->E;
    m->shape.drafter = p->draft != NULL;
    return make_scratch(m, p, err);
}

void st_net_release(st_model *m) {
    st_net *p = m->self;
    if (!p) return;
    free(p->inv_freq);
    free(p->layers);
    free(p->draft);
    float *all[] = {p->x, p->u, p->c, p->z, p->decay, p->beta, p->cos, p->sin, p->gate_rows, p->up_rows, p->gate_shared, p->up_shared, p->moe};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(p->rows);
    temp_free(&p->large);
    for (int i = 0; p->small && i < p->members; i++) temp_free(&p->small[i]);
    free(p->small);
    free((void *)p->next);
    free(p);
    m->self = NULL;
}

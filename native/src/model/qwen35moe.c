/* qwen35moe (Qwen3.5 / 3.6 mixture-of-experts): gated delta net layers, every `full_attention_interval`-th layer gated
 * full attention, and in every layer routed experts with a gated shared expert.
 *
 *   x += Mixer(RMS(x, attn_norm));  x += MoE(RMS(x, post_attention_norm));  logits = W_out RMS(x, output_norm)
 *
 * Formulae: Qwen's transformers implementation (qwen3_5_moe); tensor names: GGUF. The stored norms are already 1 + w,
 * ssm_a is already -exp(A_log), value heads are tiled. Text positions make its interleaved rope the half-split one. */
#include "errors.h"
#include "model/net.h"

#include <stdio.h>
#include <stdlib.h>

static void forward(st_model *m, const st_window *w, int member, int size) {
    st_pass c;
    st_pass_start(&c, m, w, member, size);
    st_stage_begin(&c);
    for (int i = 0; i < c.p->n_layers; i++) {
        const st_layer *l = &c.p->layers[i];
        st_stage_norm(&c, l->attn_norm);
        if (l->recurrent) st_stage_delta_net(&c, l);
        else st_stage_attention(&c, l);
        st_stage_norm(&c, l->post_norm);
        st_stage_experts(&c, l);
    }
    st_stage_head(&c);
}

/* The MTP block: an ordinary attention block whose input joins the next token with the hidden state before it. */
static void draft(st_model *m, const st_draft *d, int member, int size) {
    st_pass c;
    st_pass_start_draft(&c, m, d, member, size);
    const st_layer *l = c.p->draft;
    st_stage_draft_begin(&c, d);
    st_stage_norm(&c, l->attn_norm);
    st_stage_attention(&c, l);
    st_stage_norm(&c, l->post_norm);
    st_stage_experts(&c, l);
    st_stage_draft_head(&c, d);
}

/* Which layers are recurrent: a flag for each block, else every layer but the interval-th. */
static int layer_kinds(st_model *m, st_net *p, st_error *err) {
    int interval, n = p->n_layers;
    if (st_model_int(m, "full_attention_interval", 1, 4096, 4, &interval, err)) return -1;
    int64_t *flags = calloc((size_t)n + 64, sizeof *flags);
    if (!flags) return st_fail(err, "no_memory", "no memory for %d layers", n);
    char key[128];
    snprintf(key, sizeof key, "%s.attention.recurrent_layers", m->arch->name);
    const st_gguf_kv *kv = st_gguf_kv_find(m->gguf, key);
    if (kv && (kv->count < (uint64_t)n || kv->count > (uint64_t)n + 64)) {
        st_fail(err, "model_format", "key %s has %llu entries for %d layers", key, (unsigned long long)kv->count, n);
        free(flags);
        return -1;
    }
    int have = kv ? st_gguf_get_array_i64(m->gguf, key, flags, kv->count, err) : 0;
    for (int i = 0; i < n; i++) {
        st_layer *l = &p->layers[i];
        l->recurrent = have > 0 ? flags[i] != 0 : (i + 1) % interval != 0;
    }
    free(flags);
    return have < 0 ? -1 : 0;
}

static int load_block(const st_loader *L, st_layer *l) {
    return st_load_vec(L, "attn_norm.weight", L->p->E, 1, &l->attn_norm) || st_load_vec(L, "post_attention_norm.weight", L->p->E, 1, &l->post_norm) ||
           (l->recurrent ? st_load_delta_net(L, l) : st_load_attention(L, l)) || st_load_experts(L, l);
}

/* The first MTP block behind the trunk, when the file has one. Further blocks are not used. */
static int load_drafter(st_model *m, st_net *p, st_error *err) {
    st_loader L = {m, p, err, p->n_layers};
    char name[64];
    snprintf(name, sizeof name, "blk.%d.nextn.eh_proj.weight", p->n_layers);
    if (!st_weights_has(m->weights, name)) return 0;
    if (!(p->draft = calloc(1, sizeof *p->draft))) return st_fail(err, "no_memory", "no memory for the MTP block");
    return load_block(&L, p->draft) || st_load_draft(&L);
}

static int load(st_model *m, st_error *err) {
    st_net *p = st_net_new(m, err);
    if (!p) return -1;
    p->gated = 1;
    if (st_load_attention_keys(m, p, err) || st_load_delta_net_keys(m, p, err) || st_load_expert_keys(m, p, err) ||
        st_net_layers(m, p, err) || layer_kinds(m, p, err) || st_load_globals(m, p, err))
        return -1;
    for (int i = 0; i < p->n_layers; i++)
        if (load_block(&(st_loader){m, p, err, i}, &p->layers[i])) return -1;
    if (load_drafter(m, p, err)) return -1;
    return st_net_finish(m, p, err);
}

const st_arch st_arch_qwen35moe = {.name = "qwen35moe", .load = load, .forward = forward, .draft = draft, .settle = st_net_settle, .release = st_net_release};

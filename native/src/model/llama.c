/* llama (dense; SmolLM2 and its kin): full attention and a SwiGLU feed-forward in every layer.
 *
 *   x += Attention(RMS(x, attn_norm));  x += W_down(silu(W_gate h) * W_up h), h = RMS(x, ffn_norm)
 *
 * GGUF files of this architecture hold query and key rows permuted, so rope pairs neighbours (2i, 2i + 1). */
#include "errors.h"
#include "model/net.h"

static void forward(st_model *m, const st_window *w, int member, int size) {
    st_pass c;
    st_pass_start(&c, m, w, member, size);
    st_stage_begin(&c);
    for (int i = 0; i < c.p->n_layers; i++) {
        const st_layer *l = &c.p->layers[i];
        st_stage_norm(&c, l->attn_norm);
        st_stage_attention(&c, l);
        st_stage_norm(&c, l->post_norm);
        st_stage_dense(&c, l);
    }
    st_stage_head(&c);
}

/* What this file's formulae do not cover is refused, never computed wrongly. */
static int check(const st_model *m, st_error *err) {
    static const char *const foreign[] = {"blk.0.attn_q.bias", "blk.0.attn_output.bias", "rope_freqs.weight", "blk.0.ffn_gate_inp.weight"};
    for (unsigned i = 0; i < sizeof foreign / sizeof *foreign; i++)
        if (st_weights_has(m->weights, foreign[i]))
            return st_fail(err, "model_unsupported", "tensor %s: this kind of llama model is not served yet", foreign[i]);
    return 0;
}

static int load(st_model *m, st_error *err) {
    st_net *p = st_net_new(m, err);
    if (!p || check(m, err)) return -1;
    p->rope = ST_ROPE_ADJACENT;
    if (st_load_attention_keys(m, p, err) || st_model_int(m, "feed_forward_length", 32, 1 << 20, -1, &p->ff_dense, err) ||
        st_net_layers(m, p, err) || st_load_globals(m, p, err))
        return -1;
    if (p->ff_dense % 32) return st_fail(err, "model_unsupported", "feed_forward_length %d must be a multiple of 32", p->ff_dense);
    for (int i = 0; i < p->n_layers; i++) {
        st_layer *l = &p->layers[i];
        st_loader L = {m, p, err, i};
        if (st_load_vec(&L, "attn_norm.weight", p->E, 1, &l->attn_norm) || st_load_vec(&L, "ffn_norm.weight", p->E, 1, &l->post_norm) ||
            st_load_attention(&L, l) || st_load_dense(&L, l))
            return -1;
    }
    return st_net_finish(m, p, err);
}

const st_arch st_arch_llama = {.name = "llama", .load = load, .forward = forward, .release = st_net_release};

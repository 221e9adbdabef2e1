"""Write transformers_reference.json: what transformers' own models say on the weights of the tiny models.

Needs `torch` and `transformers`, which the tests do not: they read the JSON. Run it again when a tiny model changes:

    python -m tests.native.make_transformers_reference

The weights go from GGUF form back to the form of the published checkpoints: norms without their 1, value heads from
tiled to grouped order, rotary rows of llama from neighbouring pairs to halves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.native.tiny_models import BY_NAME, Floats, Tiny, sample_ids, tensors

OUTPUT = Path(__file__).with_name("transformers_reference.json")
NAMES = ("llama-32", "qwen35moe-32", "qwen35moe-64")  # llama-64 is none of theirs: its rope turns parts of heads
POSITIONS = 80
SHOWN = (0, 1, 5, 17, 40, 63, 64, 79)  # positions whose values are kept
TOP = 8


def halves(rows: Floats, heads: int) -> Floats:
    """Query or key rows of a llama file, whose rotary pairs are neighbours, with the pairs half a head apart."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def llama(m: Tiny, w: dict[str, Floats]) -> tuple[Any, dict[str, Floats]]:
    config = transformers.LlamaConfig(
        vocab_size=m.vocab,
        hidden_size=m.width,
        intermediate_size=m.dense,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        rms_norm_eps=m.eps,
        rope_parameters={"rope_type": "default", "rope_theta": m.rope_base},
        max_position_embeddings=m.context,
        tie_word_embeddings=m.tied,
    )
    out = {"model.embed_tokens.weight": w["token_embd.weight"], "model.norm.weight": w["output_norm.weight"]}
    for i in range(m.layers):
        here, there = f"blk.{i}.", f"model.layers.{i}."
        out[f"{there}input_layernorm.weight"] = w[f"{here}attn_norm.weight"]
        out[f"{there}post_attention_layernorm.weight"] = w[f"{here}ffn_norm.weight"]
        out[f"{there}self_attn.q_proj.weight"] = halves(w[f"{here}attn_q.weight"], m.heads)
        out[f"{there}self_attn.k_proj.weight"] = halves(w[f"{here}attn_k.weight"], m.kv_heads)
        out[f"{there}self_attn.v_proj.weight"] = w[f"{here}attn_v.weight"]
        out[f"{there}self_attn.o_proj.weight"] = w[f"{here}attn_output.weight"]
        for part in ("gate", "up", "down"):
            out[f"{there}mlp.{part}_proj.weight"] = w[f"{here}ffn_{part}.weight"]
    return transformers.LlamaForCausalLM(config), out


def grouped(x: Floats, m: Tiny, width: int, axis: int = 0) -> Floats:
    """Value heads of `width` entries along an axis: from tiled (r * hk + g) to grouped order (g * r + r)."""
    x = np.moveaxis(x, axis, 0)
    shape = x.shape
    x = x.reshape(m.hv // m.hk, m.hk, width, *shape[1:]).swapaxes(0, 1).reshape(shape)
    return np.moveaxis(x, 0, axis)


def delta_net(m: Tiny, w: dict[str, Floats], here: str) -> dict[str, Floats]:
    keys = 2 * m.hk * m.state
    qkv, conv = w[f"{here}attn_qkv.weight"], w[f"{here}ssm_conv1d.weight"]
    return {
        "in_proj_qkv.weight": np.concatenate([qkv[:keys], grouped(qkv[keys:], m, m.state)]),
        "conv1d.weight": np.concatenate([conv[:keys], grouped(conv[keys:], m, m.state)])[:, None],
        "in_proj_z.weight": grouped(w[f"{here}attn_gate.weight"], m, m.state),
        "in_proj_b.weight": grouped(w[f"{here}ssm_beta.weight"], m, 1),
        "in_proj_a.weight": grouped(w[f"{here}ssm_alpha.weight"], m, 1),
        "dt_bias": grouped(w[f"{here}ssm_dt.bias"], m, 1),
        "A_log": np.log(-grouped(w[f"{here}ssm_a"], m, 1)),
        "norm.weight": w[f"{here}ssm_norm.weight"],
        "out_proj.weight": grouped(w[f"{here}ssm_out.weight"], m, m.state, axis=1),
    }


def qwen35moe(m: Tiny, w: dict[str, Floats]) -> tuple[Any, dict[str, Floats]]:
    config = transformers.Qwen3_5MoeTextConfig(
        vocab_size=m.vocab,
        hidden_size=m.width,
        num_hidden_layers=m.layers,
        num_attention_heads=m.heads,
        num_key_value_heads=m.kv_heads,
        head_dim=m.head_dim,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=m.state,
        linear_value_head_dim=m.state,
        linear_num_key_heads=m.hk,
        linear_num_value_heads=m.hv,
        moe_intermediate_size=m.ff,
        shared_expert_intermediate_size=m.shared_ff,
        num_experts=m.experts,
        num_experts_per_tok=m.used,
        rms_norm_eps=m.eps,
        max_position_embeddings=m.context,
        tie_word_embeddings=m.tied,
        layer_types=["linear_attention" if (i + 1) % m.interval else "full_attention" for i in range(m.layers)],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": m.rope_base,
            "partial_rotary_factor": m.n_rot / m.head_dim,
            "mrope_section": [m.n_rot // 2, 0, 0],
            "mrope_interleaved": True,
        },
    )
    out = {"model.embed_tokens.weight": w["token_embd.weight"], "model.norm.weight": w["output_norm.weight"] - 1}
    for i in range(m.layers):
        here, there = f"blk.{i}.", f"model.layers.{i}."
        out[f"{there}input_layernorm.weight"] = w[f"{here}attn_norm.weight"] - 1
        out[f"{there}post_attention_layernorm.weight"] = w[f"{here}post_attention_norm.weight"] - 1
        if (i + 1) % m.interval:
            out.update({f"{there}linear_attn.{k}": v for k, v in delta_net(m, w, here).items()})
        else:
            for their, ours in (("q", "attn_q"), ("k", "attn_k"), ("v", "attn_v"), ("o", "attn_output")):
                out[f"{there}self_attn.{their}_proj.weight"] = w[f"{here}{ours}.weight"]
            for part in ("q", "k"):
                out[f"{there}self_attn.{part}_norm.weight"] = w[f"{here}attn_{part}_norm.weight"] - 1
        gate_up = np.concatenate([w[f"{here}ffn_gate_exps.weight"], w[f"{here}ffn_up_exps.weight"]], axis=1)
        out[f"{there}mlp.gate.weight"] = w[f"{here}ffn_gate_inp.weight"]
        out[f"{there}mlp.experts.gate_up_proj"] = gate_up
        out[f"{there}mlp.experts.down_proj"] = w[f"{here}ffn_down_exps.weight"]
        out[f"{there}mlp.shared_expert_gate.weight"] = w[f"{here}ffn_gate_inp_shexp.weight"][None]
        for part in ("gate", "up", "down"):
            out[f"{there}mlp.shared_expert.{part}_proj.weight"] = w[f"{here}ffn_{part}_shexp.weight"]
    return transformers.Qwen3_5MoeForCausalLM(config), out


BUILDERS = {"llama": llama, "qwen35moe": qwen35moe}


def logits(m: Tiny, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[positions, vocab] of transformers' model, computed in float32."""
    weights = tensors(m)
    model, state = BUILDERS[m.arch](m, weights)
    state["lm_head.weight"] = weights["token_embd.weight" if m.tied else "output.weight"]
    model.load_state_dict({k: torch.from_numpy(np.ascontiguousarray(v)) for k, v in state.items()}, strict=True)
    with torch.no_grad():
        out = model.float().eval()(torch.tensor([ids])).logits[0]
    return np.asarray(out.numpy(), np.float64)


def reference(name: str) -> dict[str, Any]:
    m = BY_NAME[name]
    ids = sample_ids(m, POSITIONS, seed=7)
    rows = logits(m, ids)
    shown = []
    for at in SHOWN:
        log_probs = rows[at] - np.log(np.exp(rows[at] - rows[at].max()).sum()) - rows[at].max()
        top = np.argsort(-rows[at])[:TOP]
        shown.append(
            {
                "position": at,
                "logits": {str(i): round(float(rows[at][i]), 7) for i in top},
                "log_probs": {str(i): round(float(log_probs[i]), 7) for i in (*top[:2], *range(0, m.vocab, 97))},
            }
        )
    return {"ids": ids, "std": round(float(rows.std()), 6), "argmax": rows.argmax(1).tolist(), "rows": shown}


def main() -> None:
    """Write the file beside this script."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    out = {"made_with": versions, "models": {name: reference(name) for name in NAMES}}
    OUTPUT.write_text(json.dumps(out).replace('{"ids"', '\n{"ids"').replace('{"position"', '\n{"position"') + "\n")


if __name__ == "__main__":
    main()

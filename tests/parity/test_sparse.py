"""Compares DeepSeek-V3.2 in float32 with transformers' ``deepseek_v32``, on files that it saved,
and with the float64 oracle on the same files. GLM-5's ``glm_moe_dsa`` rotates other pairs.

transformers masks the scores of all tokens; we attend to the selected ones in the absorbed form.
"""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import dsv3_jax
from dsv3_jax.layers.rope import rotation_at
from tests.parity.test_transformers import BOUND, PLAIN, VOCAB, YARN
from tests.support.oracle import relative_error
from tests.support.running import forward
from tests.support.selection import selected_tokens
from tests.support.sparse_oracle import SparseOracle

pytestmark = [pytest.mark.parity, pytest.mark.slow]


def random_model(**settings: Any):
    """Returns transformers' model with random weights. Scores of tokens differ by more than
    rounding: with 16 heads hardly any is 0."""
    import torch
    import transformers

    name = settings.pop("family", "DeepseekV32")
    config = getattr(transformers, f"{name}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 60,
            "intermediate_size": 90,
            "moe_intermediate_size": 42,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "n_routed_experts": 12,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 40,
            "kv_lora_rank": 33,
            "qk_nope_head_dim": 18,
            "qk_rope_head_dim": 10,
            "v_head_dim": 14,
            "index_n_heads": 16,
            "index_head_dim": 22,
            "index_topk": 16,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-3,  # which the norms of latents and index keys do not use
            "rope_parameters": dict(YARN),
            "attn_implementation": "eager",
            "experts_implementation": "eager",
            **settings,
        }
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("k_norm.bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.ndim == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                gain = 3.0 if name.endswith("mlp.gate.weight") else 1.0
                parameter.copy_(gain * noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator) - 0.4)
    return model


def saved(directory, **settings: Any):
    """Returns transformers' model, and ours loaded from the files that it saved."""
    theirs = random_model(**settings)
    theirs.save_pretrained(directory)
    return theirs, dsv3_jax.load(directory, dtype=jnp.float32)[0]


def their_logits_and_selections(model, tokens: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns logits, and the selected tokens [B, T, k] of each layer."""
    import torch

    selections: list[np.ndarray] = []
    hooks = [
        layer.self_attn.indexer.register_forward_hook(
            lambda *call: selections.append(call[-1].numpy())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens), use_cache=False).logits.numpy()
    for hook in hooks:
        hook.remove()
    return logits, selections


@pytest.mark.parametrize(
    ("length", "settings"),
    [
        pytest.param(120, {}, id="V3.2"),
        pytest.param(
            120,
            {
                "family": "GlmMoeDsa",
                "index_topk": 7,
                "index_n_heads": 24,
                "index_head_dim": 10,
                "n_group": 1,
                "topk_group": 1,
                "rope_parameters": PLAIN,
            },
            id="GLM-5, other sizes",
        ),
        pytest.param(
            2100,
            {
                "index_topk": 2048,
                "num_hidden_layers": 1,
                "max_position_embeddings": 2200,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
            },
            id="the published number of tokens",
        ),
    ],
)
def test_logits(length, settings, tmp_path):
    theirs, ours = saved(tmp_path, **settings)
    tokens = np.random.default_rng(21).integers(0, VOCAB, (1, length))
    want, selections = their_logits_and_selections(theirs, tokens)
    got, topk = np.asarray(forward(ours, tokens)[0]), ours.config.index_topk
    config = json.loads((tmp_path / "config.json").read_text())
    config["indexer_rope_interleave"] = ours.config.indexer_rope_interleave
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    tensors = load_file(tmp_path / "model.safetensors")
    oracle = SparseOracle(config, tensors, latent_norm_eps=1e-6)
    for expected in (want, oracle.forward(tokens).logits):
        for part in (slice(0, topk), slice(topk, None)):  # dense, and sparse
            assert relative_error(got[:, part], expected[:, part]) < BOUND
    # transformers selects tokens that a query does not see if it sees too few, and masks them.
    theirs_by_layer = [
        [{s for s in row.tolist() if s <= t} for t, row in enumerate(selected[0])]
        for selected in selections
    ]
    for layer, of_queries in enumerate(theirs_by_layer):
        selected = oracle.selected[f"model.layers.{layer}.self_attn"]
        assert of_queries == [selected[0, t] for t in range(length)]
    x = ours.layers[0].input_layernorm(ours.embed_tokens(jnp.asarray(tokens)))
    rotation = rotation_at(ours.config, jnp.arange(length)[None])
    assert selected_tokens(ours.layers[0].self_attn, x, rotation) == theirs_by_layer[0]

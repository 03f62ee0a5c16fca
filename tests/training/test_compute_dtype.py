"""Gradients of bfloat16 compute, array by array, compared with those of float32 compute.

Tokens follow Zipf's law: the most frequent one is at a fifth of all positions, as in text. A sum
over its positions that is rounded to bfloat16 on the way loses most of them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.objective import compute_weights
from dsv3_jax.training.trainer import Trainer
from sharding import make_layout
from tests.support.checkpoints import sparse_config, tiny_config
from tests.support.oracle import relative_error

VOCABULARY = 64
RUN = TrainingConfig(steps=10, learning_rate=0.1, final_learning_rate=0.01, warmup_steps=0)

BOUNDS = {"embed_tokens": 0.005, "norm": 0.01, "indexer": 0.05}
"""Relative error of an array's gradient, by a part of its name. A term of a sum has been rounded to
8 bits (0.2 %) a few times on its way, and in the embedding and the norms the errors of many terms
average out. An indexer's loss is small, so that the errors of its scores count for more. Measured:
0.3 %, 0.6 %, 2.5 %, and 0.8 % in other arrays."""
OTHERS = 0.015

# All experts take all tokens and all tokens are selected: a token that bfloat16 sends to another
# expert would change gradients by more than rounding.
ALL = {"n_routed_experts": 4, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
SIZES = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "hidden_size": 32}
V3 = tiny_config(**ALL, **SIZES)
DENSE = tiny_config(
    **SIZES | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "hidden_size": 16}
)
SPARSE = sparse_config(**ALL, **SIZES, index_topk=128)

CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "experts and MTP": (V3, {}),
    "microbatches, remat, scan": (
        V3 | {"num_hidden_layers": 3},
        {"accumulate": 2, "remat": True, "scan_layers": True},
    ),
    "sparse": (SPARSE, {"indexer_stage": "sparse"}),
    "dense indexer warm-up": (SPARSE, {"indexer_stage": "dense"}),
    "low-rank updates": (V3, {"lora_rank": 4}),
    "drafts": (V3, {"draft_depth": 2}),
}


def zipf_tokens(sequences: int, length: int) -> np.ndarray:
    odds = 1 / np.arange(1, VOCABULARY)
    rng = np.random.default_rng(0)
    tokens = rng.choice(np.arange(1, VOCABULARY), (sequences, length), p=odds / odds.sum())
    tokens[:, 0] = 0
    return tokens.astype(np.int32)


def rounded_model(config: dict[str, Any], layout=None) -> DeepSeekV3:
    """Returns a float32 model whose weights are bfloat16 numbers, so that rounding them for the
    computation changes nothing."""
    graph, weights, rest = nnx.split(
        random_model(ModelConfig.from_hf(config), 0, layout), nnx.Param, ...
    )
    weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), weights)
    return nnx.merge(graph, weights, rest)


def gradients(
    model: DeepSeekV3, config: TrainingConfig, tokens: np.ndarray, dtype: str
) -> dict[str, np.ndarray]:
    """Returns the gradient of each trained array by its path."""
    trainer = Trainer(model, dataclasses.replace(config, compute_dtype=dtype))
    params, objective = trainer.init().params, trainer._objective
    if config.lora_rank:  # updates that are not zero
        rng = np.random.default_rng(1)
        params = jax.tree.map(lambda p: p + 0.005 * rng.normal(size=p.shape).astype("f4"), params)
    biases = nnx.state(model, nnx.Not(nnx.Param))
    graded = jax.jit(objective.gradient)(
        params, trainer._frozen, biases, trainer.shard_batch(tokens), jnp.float32(0.3)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(value)
        for path, value in jax.tree.leaves_with_path(graded[0])
    }


def bound(name: str) -> float:
    return max((BOUNDS[part] for part in BOUNDS if part in name), default=OTHERS)


def too_wrong(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Returns the relative errors that exceed their bound."""
    assert list(got) == list(want)
    errors = {name: relative_error(got[name], want[name]) for name in want}
    return {name: error for name, error in errors.items() if not error < bound(name)}


def test_embedding_of_frequent_tokens():
    """Every row of the embedding is right, and each array of a dense model."""
    model, tokens = rounded_model(DENSE), zipf_tokens(96, 128)
    got, want = (gradients(model, RUN, tokens, dtype) for dtype in ("bfloat16", "float32"))
    assert too_wrong(got, want) == {}
    (name,) = [name for name in want if "embed_tokens" in name]
    counts = np.bincount(tokens.ravel(), minlength=VOCABULARY)
    assert counts[1] > 2000
    frequent = np.argsort(-counts)[:8]
    rows = [relative_error(got[name][token], want[name][token]) for token in frequent]
    assert max(rows) < 0.01, rows


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_array(case):
    shape, settings = CASES[case]
    model, tokens = rounded_model(shape), zipf_tokens(32, 64)
    config = dataclasses.replace(RUN, **settings)
    got, want = (gradients(model, config, tokens, dtype) for dtype in ("bfloat16", "float32"))
    assert too_wrong(got, want) == {}
    assert all(np.linalg.norm(value) > 0 for value in want.values())


@pytest.mark.slow
def test_every_array_on_a_mesh():
    tokens = zipf_tokens(32, 64)
    on_mesh = rounded_model(V3, make_layout("train", expert_devices=4))
    got = gradients(on_mesh, RUN, tokens, "bfloat16")
    assert too_wrong(got, gradients(rounded_model(V3), RUN, tokens, "float32")) == {}


def test_which_weights_are_rounded():
    """Norms, routers, layer norms of indexers and the embedding keep their dtype, as they have it
    in inference; frozen weights in bfloat16 are not converted to float32 and back."""
    weights = nnx.state(rounded_model(SPARSE), nnx.Param)
    computed = nnx.to_flat_state(compute_weights(weights, jnp.bfloat16))
    unrounded = {".".join(map(str, path)) for path, w in computed if w.dtype == jnp.float32}
    expected = {"embed_tokens.weight", "norm.weight", "mtp.0.shared_head.norm.weight"}
    expected |= {"mtp.0.enorm.weight", "mtp.0.hnorm.weight"}
    expected |= {f"{layer}.mlp.gate.weight" for layer in ("layers.1", "mtp.0")}
    for layer in ("layers.0", "layers.1", "mtp.0"):
        attention = f"{layer}.self_attn"
        expected |= {f"{layer}.input_layernorm.weight", f"{layer}.post_attention_layernorm.weight"}
        expected |= {f"{attention}.q_a_layernorm.weight", f"{attention}.kv_a_layernorm.weight"}
        expected |= {f"{attention}.indexer.k_norm.{name}" for name in ("weight", "bias")}
    assert unrounded == expected
    frozen = jax.tree.map(lambda w: w.astype(jnp.bfloat16), weights)
    for dtype in (jnp.bfloat16, jnp.float32):
        computed = nnx.to_flat_state(compute_weights(frozen, dtype))
        assert {w.dtype for _, w in computed} == {jnp.dtype(dtype)}

"""Compares gradients of the training loss with slopes of an independent float64 oracle's loss.

The oracle shares no code with the model and has no gradient. Its slopes are central differences of
its loss along random directions, in every published tensor. Over random normal directions d, the
mean of ``(slope - g.d)^2`` is ``|error of g|^2``. The tests therefore bound an estimate of the
relative error of the whole gradient of a tensor.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from flax import nnx

from dsv3_jax import ModelConfig
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.layers.router import Router
from dsv3_jax.training.trainer import Trainer
from tests.support.checkpoints import BIAS, tiny_config
from tests.support.oracle import Oracle, relative_error, route, sigmoid
from tests.training.tiny import CONFIG, RUN, TOKENS, as_model, evaluate, gradients, weighted

DIRECTIONS = 4
BOUND = 1e-4  # rounding in float32 causes up to 1e-5

# Suffixes of published names, which cover every tensor of the tiny model.
KINDS = {
    "embedding": "embed_tokens.weight",
    "head": "lm_head.weight",
    "final norm": "model.norm.weight",
    "layer norms": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "q_a": "q_a_proj.weight",
    "q_a norm": "q_a_layernorm.weight",
    "q_b": "q_b_proj.weight",
    "kv_a": "kv_a_proj_with_mqa.weight",
    "kv_a norm": "kv_a_layernorm.weight",
    "kv_b": "kv_b_proj.weight",
    "o": "o_proj.weight",
    "router": "mlp.gate.weight",
    "experts' gate": "gate_proj.weight",
    "experts' up": "up_proj.weight",
    "experts' down": "down_proj.weight",
    "MTP eh_proj": "eh_proj.weight",
    "MTP enorm": "enorm.weight",
    "MTP hnorm": "hnorm.weight",
    "MTP head norm": "shared_head.norm.weight",
}


class Recording(Oracle):
    """An oracle that records each MoE layer's scores [B, T, E] and chosen experts [B, T, K]."""

    def forward(self, tokens, **kwargs):
        self.routed = []
        return super().forward(tokens, **kwargs)

    def _moe(self, prefix, x):
        out, chosen = super()._moe(prefix, x)
        self.routed.append((sigmoid(x @ self.tensors[f"{prefix}.gate.weight"].T), chosen))
        return out, chosen


def mean_loss(logits: npt.NDArray[np.float64], ahead: int) -> float:
    """Returns the mean of -log p over the positions whose target is in the same document."""
    total, count = 0.0, 0
    for sequence, scores in zip(TOKENS, logits, strict=True):
        for i in range(len(sequence) - ahead):
            if 0 not in sequence[i + 1 : i + 1 + ahead]:
                x = scores[i]
                total += np.log(np.exp(x - x.max()).sum()) + x.max() - x[sequence[i + ahead]]
                count += 1
    return total / count


def oracle_loss(oracle: Recording) -> float:
    out = oracle.forward(TOKENS)
    balance = 0.0
    for scores, chosen in oracle.routed:
        _, T, E = scores.shape
        counts = (chosen[..., None] == np.arange(E)).sum(axis=(1, 2))
        shares = (scores / scores.sum(-1, keepdims=True)).mean(axis=1)
        balance += (E / (chosen.shape[-1] * T) * counts * shares).sum(-1).mean()
    mtp = np.mean([mean_loss(logits, 2 + k) for k, logits in enumerate(out.mtp_logits)])
    return mean_loss(out.logits, 1) + RUN.mtp_weight * mtp + RUN.balance_weight * balance


def is_copy(name: str) -> bool:
    """Returns whether a tensor is the MTP layer's copy of the embedding or the head, which is not a
    parameter of its own."""
    return ".layers." in name and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


@pytest.fixture(scope="module")
def oracle(model) -> Recording:
    tensors = {n: t for n, t in published_tensors(model).items() if not is_copy(n)}
    return Recording(CONFIG, tensors, latent_norm_eps=1e-6)


@pytest.fixture(scope="module")
def errors(trainer, oracle) -> dict[str, float]:
    """Estimated relative error of each published tensor's gradient."""
    start = trainer.init()
    gradient_tensors = published_tensors(as_model(trainer, start, gradients(trainer, start)))
    rng = np.random.default_rng(9)
    errors = {}
    for name, weight in oracle.tensors.items():
        if name.endswith(BIAS):
            continue
        gradient = np.asarray(gradient_tensors[name], np.float64)
        squares = []
        for _ in range(DIRECTIONS):
            direction = rng.normal(size=weight.shape)
            # So short that no token changes its experts along the way.
            distance = 1e-5 * np.linalg.norm(weight) / np.linalg.norm(direction)
            slope = 0.0
            for sign in (1, -1):
                oracle.tensors[name] = weight + sign * distance * direction
                slope += sign * oracle_loss(oracle) / (2 * distance)
            oracle.tensors[name] = weight
            squares.append((slope - np.sum(gradient * direction)) ** 2)
        errors[name] = float(np.sqrt(np.mean(squares)) / np.linalg.norm(gradient))
    return errors


@pytest.mark.slow
def test_loss_is_the_oracles(trainer, oracle):
    losses = evaluate(trainer, trainer.init())
    assert weighted(losses) == pytest.approx(oracle_loss(oracle), rel=1e-6)


@pytest.mark.slow
def test_loss_of_mtp_layers_with_pre_norm_input(model, trainer, oracle):
    before = Trainer(model, dataclasses.replace(RUN, mtp_hidden="pre_norm"))
    losses = evaluate(before, before.init())
    want = mean_loss(oracle.forward(TOKENS, mtp_hidden="pre_norm").mtp_logits[0], 2)
    assert float(losses.mtp) == pytest.approx(want, rel=1e-6)
    assert float(evaluate(trainer, trainer.init()).mtp) != pytest.approx(want, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_gradient(kind, errors):
    wrong = {n: e for n, e in errors.items() if n.endswith(KINDS[kind]) and not e < BOUND}
    assert wrong == {}


@pytest.mark.slow
def test_every_tensor_belongs_to_a_kind(errors):
    endings = tuple(
        e for kind in KINDS.values() for e in ([kind] if isinstance(kind, str) else kind)
    )
    assert [name for name in errors if not name.endswith(endings)] == []
    assert {e for e in endings if not any(name.endswith(e) for name in errors)} == set()
    # A layer has 10 tensors outside its experts and 3 in each of 8 + 1 experts. The MTP layer has 4
    # more, and the model 3.
    assert len(errors) == 2 * (10 + 27) + 4 + 3


SOFTMAX = {"model_type": "deepseek_v2", "scoring_func": "softmax", "norm_topk_prob": False}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"norm_topk_prob": False, "n_group": 1, "topk_group": 1},
        SOFTMAX | {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
        SOFTMAX | {"topk_method": "group_limited_greedy"},
    ],
    ids=["v3", "v3 without norm", "v2 greedy", "v2 groups"],
)
def test_gradient_of_the_router_element_by_element(settings, tmp_path):
    """Checks the gradient of ``sum_mk c_m,e(k) weight_mk`` with random c for every element of the
    router's weight."""
    config = tiny_config(hidden_size=6, **settings)
    (tmp_path / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(2)
    x, weight, factors = (rng.normal(size=shape) for shape in ((20, 6), (8, 6), (20, 8)))
    bias = 0.3 * rng.normal(size=8) if config["topk_method"] == "noaux_tc" else None

    router = Router(ModelConfig.from_hf(tmp_path), rngs=nnx.Rngs(0), dtype=jnp.float32)
    if bias is not None:
        router.e_score_correction_bias[...] = jnp.asarray(bias, jnp.float32)
    graph, params, rest = nnx.split(router, nnx.Param, ...)

    @jax.jit
    def ours(params):
        routing = nnx.merge(graph, params, rest)(jnp.asarray(x, jnp.float32))
        picked = jnp.take_along_axis(jnp.asarray(factors, jnp.float32), routing.experts, axis=1)
        return jnp.sum(picked * routing.weights)

    def theirs(moved: npt.NDArray[np.float64]) -> float:
        chosen, weights = route(config, x @ moved.T, bias)
        return float(np.sum(np.take_along_axis(factors, chosen, axis=1) * weights))

    params = jax.tree.map(lambda _: jnp.asarray(weight, jnp.float32), params)
    weight = weight.astype(np.float32).astype(np.float64)
    slopes = np.zeros_like(weight)
    for index in np.ndindex(weight.shape):
        moved = np.zeros_like(weight)
        moved[index] = 1e-5
        slopes[index] = (theirs(weight + moved) - theirs(weight - moved)) / 2e-5
    assert float(ours(params)) == pytest.approx(theirs(weight), rel=1e-5)
    assert relative_error(jax.tree.leaves(jax.grad(ours)(params))[0], slopes) < 1e-5

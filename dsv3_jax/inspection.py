"""Captures intermediate results of a forward pass: routing, latents, hidden states, attention.

The layers have no code for this. :func:`capture` runs them through the hook that training uses
(``run_layers`` of :class:`~dsv3_jax.model.DeepSeekV3`), so the program of a model that is not
inspected does not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.on_mesh import on_mesh
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.router import routing_rule
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.model_io import check_tokens
from pallas_kernels.softmax import masked_softmax

What = Literal["routing", "latents", "hidden", "attention_entropy", "attention_weights", "logits"]

_OF_ATTENTION = "latents", "attention_entropy", "attention_weights"
_QUERIES_PER_BLOCK = 128  # their attention scores are in memory at once


class Routing(NamedTuple):
    """Routing of every MoE layer of the main model, in order. MTP layers are not run."""

    experts: Int[Array, "L_moe B T K"]
    """Chosen experts, best first."""
    weights: Float32[Array, "L_moe B T K"]
    """Weights of the chosen experts' outputs in the sum."""
    scores: Float32[Array, "L_moe B T E"]
    """Scores of all experts, without the bias that is added for the choice."""
    counts: Int[Array, "L_moe E"]
    """Number of tokens that chose each expert."""


class Captured(NamedTuple):
    """Intermediate results that were asked for. The others are None."""

    routing: Routing | None = None
    latents: Float[Array, "L B T CR"] | None = None
    """Cache entries of the tokens: the normed latent, then the rotated rope key."""
    hidden: Float[Array, "L+1 B T D"] | None = None
    """Residual stream: the embedding, then the output of each layer, before any norm."""
    attention_entropy: Float32[Array, "L B H T"] | None = None
    """Entropy of each query's attention weights in nats: 0 if one key has all the weight,
    log(t + 1) if all visible keys have the same."""
    attention_weights: Float32[Array, "L B H T T"] | None = None
    """Attention weights of each query (second to last dimension) to each key, which sum to 1: 0 for
    keys after the query."""
    logits: Float32[Array, "B T W"] | None = None
    """Logits of every token."""


def capture(
    model: DeepSeekV3,
    tokens: Int[Array, "B T"],
    what: What | Sequence[What] = ("routing", "latents", "hidden", "attention_entropy"),
) -> Captured:
    """Runs whole sequences without a cache, and returns the intermediate results named in ``what``.

    Call it inside jit: ``nnx.jit(capture, static_argnames="what")(model, tokens, what="routing")``.
    The compiler then computes once what layers and capture share, and leaves out the LM head if
    logits are not asked for. Each result costs, in addition to the forward pass and with i bytes
    per number of the model's dtype:

    | name | FLOPs | bytes of the result |
    | --- | --- | --- |
    | routing | 0 | L_moe B T (4 E + 8 K) |
    | latents | 0 | L B T (C + R) i |
    | hidden | 0 | (L + 1) B T D i |
    | attention_entropy | 2 L B H T^2 (N + R) | 4 L B H T |
    | attention_weights | 2 L B H T^2 (N + R) | 4 L B H T^2 |
    | logits | 0 | 4 B T W |

    Entropy computes the scores of all queries and keys again, for 128 queries at a time: 512 B H T
    bytes of scores, with the H heads of a device. The weights are large: for 4,096 tokens, 64 MiB
    per layer and head, so they are not captured by default. Sequences of different lengths are
    padded at the right, which does not change the results of earlier tokens; the caller cuts the
    padding off. On a mesh, results are sharded like the layers' sequences and heads, and
    projections may be computed twice for latents, entropy and weights.

    Raises:
      ValueError: an unknown name, or none; routing of a model without MoE layers; entropy of sparse
        attention, of more than ``index_topk`` tokens; tokens that the model refuses.
    """
    names = _check_names(model.config, tokens, what)
    per_layer: dict[str, list[Any]] = {"hidden": []} | {name: [] for name in _OF_ATTENTION}
    routing_stats: list[RoutingStats] = []

    def run_and_capture(
        layers: Sequence[DecoderLayer], x: jax.Array, rotation: Rotation
    ) -> tuple[jax.Array, list[RoutingStats]]:
        for layer in layers:
            per_layer["hidden"].append(x)
            for name, value in _attention_results(layer, x, rotation, names).items():
                per_layer[name].append(value)
            x, stats = layer(x, rotation)
            if stats is not None:
                routing_stats.append(stats)
        per_layer["hidden"].append(x)
        return x, routing_stats

    logits = model(tokens, run_layers=run_and_capture)
    results: dict[str, Any] = {
        name: jnp.stack(per_layer[name]) for name in names if name in per_layer
    }
    if "routing" in names:
        results["routing"] = _routing(model.config, tokens.shape, routing_stats)
    if "logits" in names:
        results["logits"] = logits
    return Captured(**results)


def attention_entropy(
    q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], *, scale: float
) -> Float32[Array, "B H T"]:
    """Returns the entropy of causal attention, ``-sum_s p_s log p_s``, ``p = softmax(scale q k)``.

    With ``z_s = scale q k_s - max`` and ``Z = sum_s exp z_s`` this is
    ``log Z - (sum_s z_s exp z_s) / Z``. All sums are in float32.
    """
    B, T, H, K = q.shape
    block = min(_QUERIES_PER_BLOCK, T)
    count = -(-T // block)
    q = jnp.pad(q, ((0, 0), (0, count * block - T), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(q.reshape(B, count, block, H, K), 1, 0)
    s = jnp.arange(T)

    def block_entropy(inputs: tuple[jax.Array, jax.Array]) -> Float32[Array, "B H block"]:
        first, q = inputs
        scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
        is_visible = s <= (first + jnp.arange(block))[:, None]
        z = jnp.where(is_visible, scores * scale, -jnp.inf)
        z -= jnp.max(z, axis=-1, keepdims=True)
        weights = jnp.exp(z)
        total = jnp.sum(weights, axis=-1)
        # exp underflows long before z does: where it is 0, weight * z is 0 too, and not NaN.
        z_sum = jnp.sum(weights * jnp.where(is_visible, z, 0.0), axis=-1)
        return jnp.log(total) - z_sum / total

    entropies = jax.lax.map(block_entropy, (jnp.arange(count) * block, blocks))
    return jnp.moveaxis(entropies, 0, 2).reshape(B, H, -1)[..., :T]


def attention_weights(
    q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], *, scale: float
) -> Float32[Array, "B H T T"]:
    """Returns the weights of causal attention, ``softmax(scale q k)`` over the visible keys."""
    scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
    T = q.shape[1]
    return masked_softmax(scores * scale, jnp.tri(T, dtype=bool))[0]


def _check_names(config: ModelConfig, tokens: Any, what: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names in ``what`` without repetitions, or raises ValueError."""
    names = (what,) if isinstance(what, str) else tuple(what)
    known = get_args(What)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        got = f"{unknown[0]!r}" if unknown else "none"
        raise ValueError(f"what: expected some of {', '.join(known)}; got {got}")
    if "routing" in names and not config.num_moe_layers:
        raise ValueError("routing: expected a model with MoE layers, got one without")
    check_tokens(config, tokens)
    of_scores = [name for name in _OF_ATTENTION[1:] if name in names]
    if of_scores and config.index_topk and tokens.shape[1] > config.index_topk:
        raise ValueError(
            f"{of_scores[0]}: expected at most index_topk={config.index_topk} tokens, for which"
            f" the attention of {config.model_type} is dense, got {tokens.shape[1]}"
        )
    return tuple(dict.fromkeys(names))


def _attention_results(
    layer: DecoderLayer, x: Float[Array, "B T D"], rotation: Rotation, names: Sequence[str]
) -> dict[str, jax.Array]:
    """Returns those of latents, entropy and weights of a layer with input ``x`` that ``names``
    has."""
    wanted = [name for name in _OF_ATTENTION if name in names]

    def body(layer: DecoderLayer, x: jax.Array, rotation: Rotation) -> dict[str, jax.Array]:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        latents = attention.latents(normed, rotation)
        results = {"latents": latents}
        functions = {"attention_entropy": attention_entropy, "attention_weights": attention_weights}
        if of_scores := [name for name in functions if name in wanted]:
            queries = attention.queries(attention.query_latent(normed), rotation)
            q, (keys, _) = jnp.concatenate(queries, axis=-1), attention.expand(latents)
            for name in of_scores:
                results[name] = functions[name](q, keys, scale=attention.config.softmax_scale)
        return {name: results[name] for name in wanted}

    if not wanted:
        return {}
    if layer.layout is None:
        return body(layer, x, rotation)
    batch = layer.layout.partition_spec(("batch",))
    heads = layer.layout.partition_spec(("batch", "heads"))
    specs = {"latents": batch, "attention_entropy": heads, "attention_weights": heads}
    out_specs = {name: specs[name] for name in wanted}
    return on_mesh(layer.layout, layer, body, (batch, batch), out_specs)(x, rotation)


def _routing(c: ModelConfig, shape: tuple[int, ...], stats: Sequence[RoutingStats]) -> Routing:
    """Returns the routing of all layers, with tokens [B, T] as in ``shape``."""
    K, E = c.num_experts_per_tok, c.n_routed_experts
    scores = jnp.stack([layer.scores for layer in stats])
    experts = jnp.stack([layer.experts for layer in stats])
    weights = jax.vmap(routing_rule(c).weights)(scores, experts)
    return Routing(
        experts=experts.reshape(-1, *shape, K),
        weights=weights.reshape(-1, *shape, K),
        scores=scores.reshape(-1, *shape, E),
        counts=jnp.stack([layer.counts for layer in stats]),
    )

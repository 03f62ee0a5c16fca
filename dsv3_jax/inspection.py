"""What a forward pass computes on its way: routing, latents, hidden states, attention entropy.

Layers know nothing of this. :func:`capture` runs them through the hook that training uses
(``run_layers`` of :class:`~dsv3_jax.model.DeepSeekV3`), so a model that nobody inspects compiles to
the program that it always was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.config import ModelConfig
from dsv3_jax.input_checks import check_tokens
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.on_mesh import on_mesh
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.model import DeepSeekV3
from pallas_kernels.route.reference import Rule

What = Literal["routing", "latents", "hidden", "attention_entropy", "logits"]

_QUERIES = 128  # whose scores are in memory at a time


class Routing(NamedTuple):
    """Where the tokens of each MoE layer went, in order; MTP layers are not run."""

    experts: Int[Array, "L_moe B T K"]
    """Chosen, best first."""
    weights: Float32[Array, "L_moe B T K"]
    """Of the chosen experts' outputs in the sum."""
    scores: Float32[Array, "L_moe B T E"]
    """Of all experts, without the bias that the choice adds."""
    counts: Int[Array, "L_moe E"]
    """Tokens that chose each expert."""


class Captured(NamedTuple):
    """What was asked for; the rest is None."""

    routing: Routing | None = None
    latents: Float[Array, "L B T CR"] | None = None
    """What the cache holds of a token: the normed latent, then the rotated rope key."""
    hidden: Float[Array, "L+1 B T D"] | None = None
    """The residual stream: the embedding, then behind each layer, before any norm."""
    attention_entropy: Float32[Array, "L B H T"] | None = None
    """Nats, of each query's attention: 0 for one key, log(t + 1) for all that it sees alike."""
    logits: Float32[Array, "B T W"] | None = None


def capture(
    model: DeepSeekV3,
    tokens: Int[Array, "B T"],
    what: What | Sequence[What] = ("routing", "latents", "hidden", "attention_entropy"),
) -> Captured:
    """Runs whole sequences, without a cache, and keeps what is named.

    To be jitted: ``nnx.jit(capture, static_argnames="what")(model, tokens, what="routing")``. The
    compiler then computes once what layer and capture share, and drops the LM head where nobody
    asked for logits. What each costs beside the forward pass, with i bytes a number of the model's
    dtype:

    | name | FLOPs | bytes kept |
    | --- | --- | --- |
    | routing | 0 | L_moe B T (4 E + 8 K) |
    | latents | 0 | L B T (C + R) i |
    | hidden | 0 | (L + 1) B T D i |
    | attention_entropy | 2 L B H T^2 (N + R) | 4 L B H T |
    | logits | 0 | 4 B T W |

    Entropy scores all queries with all keys once more, 128 queries at a time: 512 B H T bytes of
    scores at once, H heads of a device. Rows of unequal length are the caller's to cut: padding
    behind a row changes nothing before it. On a mesh all of it lies as the layers' rows and heads
    do; there projections may be computed twice, for latents and entropy.

    Raises:
      ValueError: an unknown name, or none; routing of a model without MoE layers; tokens that the
        model refuses.
    """
    names = _checked(model.config, tokens, what)
    found: dict[str, list[Any]] = {"hidden": [], "latents": [], "attention_entropy": []}
    routed: list[RoutingStats] = []

    def run(
        layers: Sequence[DecoderLayer], x: jax.Array, turn: Rotation
    ) -> tuple[jax.Array, list[RoutingStats]]:
        for layer in layers:
            found["hidden"].append(x)
            for name, value in _of_attention(layer, x, turn, names).items():
                found[name].append(value)
            x, stats = layer(x, turn)
            if stats is not None:
                routed.append(stats)
        found["hidden"].append(x)
        return x, routed

    logits = model(tokens, run_layers=run)
    kept: dict[str, Any] = {name: jnp.stack(found[name]) for name in names if name in found}
    if "routing" in names:
        kept["routing"] = _routing(model.config, tokens.shape, routed)
    if "logits" in names:
        kept["logits"] = logits
    return Captured(**kept)


def attention_entropy(
    q: Float[Array, "B T H K"], k: Float[Array, "B T H K"], *, scale: float
) -> Float32[Array, "B H T"]:
    """``-sum_s p_s log p_s`` with ``p = softmax(scale q k)`` over keys up to the query's own.

    With ``z_s = scale q k_s - max`` and ``Z = sum_s exp z_s`` that is
    ``log Z - (sum_s z_s exp z_s) / Z``. Products of K numbers are summed in float32, as all else.
    """
    B, T, H, K = q.shape
    block = min(_QUERIES, T)
    count = -(-T // block)
    q = jnp.pad(q, ((0, 0), (0, count * block - T), (0, 0), (0, 0)))
    blocks = jnp.moveaxis(q.reshape(B, count, block, H, K), 1, 0)
    s = jnp.arange(T)

    def of_block(each: tuple[jax.Array, jax.Array]) -> Float32[Array, "B H block"]:
        first, q = each
        scores = jnp.einsum("bthk,bshk->bhts", q, k, preferred_element_type=jnp.float32)
        seen = s <= (first + jnp.arange(block))[:, None]
        z = jnp.where(seen, scores * scale, -jnp.inf)
        z -= jnp.max(z, axis=-1, keepdims=True)
        weights = jnp.exp(z)
        total = jnp.sum(weights, axis=-1)
        # exp underflows long before z does: where it is 0, its product is too, and not NaN.
        return jnp.log(total) - jnp.sum(weights * jnp.where(seen, z, 0.0), axis=-1) / total

    rows = jax.lax.map(of_block, (jnp.arange(count) * block, blocks))
    return jnp.moveaxis(rows, 0, 2).reshape(B, H, -1)[..., :T]


def _checked(config: ModelConfig, tokens: Any, what: str | Sequence[str]) -> tuple[str, ...]:
    names = (what,) if isinstance(what, str) else tuple(what)
    known = get_args(What)
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        got = f"{unknown[0]!r}" if unknown else "none"
        raise ValueError(f"what: expected some of {', '.join(known)}; got {got}")
    if "routing" in names and not config.num_moe_layers:
        raise ValueError("routing: expected a model with MoE layers, got one without")
    check_tokens(config, tokens, mtp=False)
    return tuple(dict.fromkeys(names))


def _of_attention(
    layer: DecoderLayer, x: Float[Array, "B T D"], turn: Rotation, names: Sequence[str]
) -> dict[str, jax.Array]:
    """Latents and entropy, as far as asked for, of a layer with this input."""
    asked = [name for name in ("latents", "attention_entropy") if name in names]

    def of_attention(layer: DecoderLayer, x: jax.Array, turn: Rotation) -> dict[str, jax.Array]:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        latents = attention.latents(normed, turn)
        of_layer = {"latents": latents}
        if "attention_entropy" in asked:
            q = jnp.concatenate(attention.queries(normed, turn), axis=-1)
            keys, _ = attention.expand(latents)
            scale = attention.config.softmax_scale
            of_layer["attention_entropy"] = attention_entropy(q, keys, scale=scale)
        return {name: of_layer[name] for name in asked}

    if not asked:
        return {}
    if layer.layout is None:
        return of_attention(layer, x, turn)
    rows, heads = (
        layer.layout.partition_spec(("batch",)),
        layer.layout.partition_spec(("batch", "heads")),
    )
    lies = {"latents": rows, "attention_entropy": heads}
    specs = {name: lies[name] for name in asked}
    return on_mesh(layer.layout, layer, of_attention, (rows, rows), specs)(x, turn)


def _routing(c: ModelConfig, shape: tuple[int, ...], stats: Sequence[RoutingStats]) -> Routing:
    """Of all layers, tokens in their rows again."""
    K, E = c.num_experts_per_tok, c.n_routed_experts
    scores = jnp.stack([one.scores for one in stats])
    experts = jnp.stack([one.experts for one in stats])
    rule = Rule(
        K,
        c.n_group,
        c.topk_group,
        c.topk_method,
        c.scoring_func,
        c.norm_topk_prob,
        c.routed_scaling_factor,
    )
    weights = jax.vmap(rule.weights)(scores, experts)
    return Routing(
        experts.reshape(-1, *shape, K),
        weights.reshape(-1, *shape, K),
        scores.reshape(-1, *shape, E),
        jnp.stack([one.counts for one in stats]),
    )

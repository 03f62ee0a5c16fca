"""Decoder layers of few tokens in two long-running Hopper kernels, one on each side of attention.

``pallas_kernels.attention_inputs`` is everything before attention itself, and
``pallas_kernels.feed_forward`` everything after it. :func:`choose` decides when a program is traced
whether a layer runs so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.linear import Weight
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import Experts, MoE, RoutingStats
from dsv3_jax.layers.mtp import MTPLayer, newest_cache, newest_positions, select
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.paged_cache import (
    AppendedTokens,
    Form,
    LayerCache,
    LayerPages,
    PageShard,
    join_tokens,
    new_slots,
)
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.router import routing_rule
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.quantization import INT4, INT8, BlockQuantization
from pallas_kernels import attention_inputs, feed_forward, mla_decode_parts
from pallas_kernels.attention_inputs.reference import AttentionWeights
from pallas_kernels.decoder_layer.plan import PART_COLUMNS
from pallas_kernels.decoder_layer.reference import Chosen, Matrices, Projection, Router
from pallas_kernels.decoder_layer.stream import MOST_TOKENS
from pallas_kernels.dispatch import Implementation, dispatch
from pallas_kernels.hopper import require_hopper
from pallas_kernels.hopper.grid_barrier import new_counter
from pallas_kernels.hopper.split_kv import Parts
from sharding import Layout

# ---- the choice ----------------------------------------------------------------------------------


class Threshold(NamedTuple):
    """Most new tokens for which the kernels have been measured to be faster."""

    is_quantized: bool
    mebibytes: float
    """Upper bound of the weights that one token reads in the second half of a layer."""
    tokens: int


THRESHOLDS = (
    # The demo's layers (1 MB) gained nothing, and lost nothing.
    Threshold(False, 4, tokens=2),
    # A model of 346 M parameters (13 MB) took 9 % less time for a step with four drafts and 20 %
    # less with two.
    Threshold(False, 32, tokens=5),
    # Moonlight (147 MB). Larger layers have been measured in float8 only, V3's.
    Threshold(False, 256, tokens=2),
    # Four tokens gained 3 % in Moonlight's float8 layers (74 MB) and 20 % in int4 (37 MB), and lost
    # 11 % in DeepSeek-V2's int4 layers (138 MB).
    Threshold(True, 128, tokens=4),
    Threshold(True, math.inf, tokens=2),
)
"""The first row that fits a layer counts. Layers that no row fits do not use the kernels."""

MOST_MERGED = 8192
"""Positions of a block table up to which the second kernel merges attention's parts. Each thread
block merges those of its heads, which takes longer than a kernel for all heads if there are
many."""


def choose(
    layer: DecoderLayer, implementation: Implementation, tokens: int, counter: Any = None
) -> FewTokens | None:
    """Returns the kernels if a program should run the layer by them, for this number of new tokens
    of all sequences; None for its own code. If ``implementation``
    (:meth:`DeepSeekV3.use_feed_forward`) names only the kernels, it raises NotImplementedError for
    a layer with a module that has been replaced."""
    is_default = implementation is None
    if implementation == "separate" or (
        is_default and (tokens > MOST_TOKENS or not _on_one_hopper(layer.layout))
    ):
        return None
    module = replaced(layer)
    if is_default and (module is not None or tokens > most_tokens(layer)):
        return None
    if module is not None and not is_default:
        if "separate" in implementation:
            return None
        raise NotImplementedError(
            f"use_feed_forward: takes layers of the model's own modules, got {module}"
        )
    return FewTokens(implementation, counter)


def extend_mtp(
    layer: MTPLayer,
    implementation: Implementation,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    cache: LayerCache,
    form: Form,
    *,
    newest_only: bool,
) -> tuple[Float[Array, "B t D"], LayerPages, RoutingStats | None]:
    """Does :meth:`MTPLayer.extend` or ``extend_newest``, by the kernels where :func:`choose`
    returns them."""

    def extend(x: Array, rotation: Rotation, cache: LayerCache, form: Form) -> Any:
        kernels = choose(layer, implementation, x.shape[0] * x.shape[1])
        return layer.extend(x, rotation, cache, form, kernels and kernels.forward_cached)

    B, T, _ = x.shape
    if T == 1 or not newest_only:
        return extend(x, rotation, cache, form)
    kernels, queries = choose(layer, implementation, B * T), None
    if kernels is not None and layer.layout is None:
        queries = kernels.queries(layer, x, rotation, [cache], [form])
    if kernels is None or queries is None:
        return layer.extend_newest(x, rotation, cache, form, extend)
    # The kernel has written all tokens to the cache. Only the newest attend.
    newest = newest_positions(cache)
    q_latent, q_rope = select(queries.q_latent, newest), select(queries.q_rope, newest)
    queries = AbsorbedQueries(q_latent, q_rope, queries.pages)
    cache = newest_cache(cache, newest)
    return kernels.after_queries(layer, select(x, newest), queries, [cache], cache.valid)


def most_tokens(layer: DecoderLayer) -> int:
    """Returns the number of tokens up to which :data:`THRESHOLDS` prefer the kernels."""
    is_quantized = layer.self_attn.o_proj.quantization is not None
    size = read_bytes(layer)
    rows = (row for row in THRESHOLDS if row.is_quantized == is_quantized)
    return next((row.tokens for row in rows if size <= row.mebibytes * 2**20), 0)


def shared_counter(layout: Layout | None, tokens: int) -> Any:
    """Returns the counter that the kernels of all layers share, or None if none can run. With a
    counter each, XLA would copy a constant for every layer."""
    if layout is not None or tokens > MOST_TOKENS or not _on_one_hopper(layout):
        return None
    return jax.new_ref(new_counter())


def _on_one_hopper(layout: Layout | None) -> bool:
    try:
        require_hopper()
    except NotImplementedError:
        return False
    return layout is None or layout.mesh.size == 1


def replaced(layer: DecoderLayer) -> str | None:
    """Returns the first module that replaces one of the model's own, or None. The kernels read
    weights, and would not call it."""
    norms = dict.fromkeys(("input_layernorm", "post_attention_layernorm"), RMSNorm)
    attentions = MultiHeadLatentAttention, SparseAttention
    kinds = {**norms, "mlp": (MLP, MoE), "self_attn": attentions}
    for path, module in nnx.iter_modules(layer):
        name = ".".join(map(str, path))
        is_own = type(module).__module__.startswith("dsv3_jax.layers.") or type(module) is nnx.List
        if path and not (is_own and isinstance(module, kinds.get(name, nnx.Module))):
            return f"{type(module).__name__} in {name}"
    return None


def read_bytes(layer: DecoderLayer) -> int:
    """Returns the bytes of the weights that one token reads in the layer's second half."""
    mlp, total = layer.mlp, _size(layer.self_attn.o_proj)
    if isinstance(mlp, MLP):
        return total + _size(mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    config, experts = mlp.config, mlp.experts
    routed = _size(experts.gate_proj, experts.up_proj, experts.down_proj)
    total += routed // config.n_routed_experts * config.num_experts_per_tok + _size(mlp.gate)
    if config.n_shared_experts:
        shared = mlp.shared_experts
        total += _size(shared.gate_proj, shared.up_proj, shared.down_proj)
    return total


def _size(*modules: Any) -> int:
    weights = [module.weight for module in modules]
    return sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in weights)


# ---- a layer -------------------------------------------------------------------------------------


class AbsorbedQueries(NamedTuple):
    """The queries of attention in absorbed form, when the new tokens are in the cache."""

    q_latent: Float[Array, "B T H C"]
    q_rope: Float[Array, "B T H R"]
    pages: LayerPages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FewTokens:
    """A decoder layer in two kernels, or in one of them where the other refuses the layer."""

    implementation: Implementation = dataclasses.field(metadata={"static": True})
    """See :meth:`DeepSeekV3.use_feed_forward`. None tries the kernels first."""
    counter: Any = None
    """From :func:`shared_counter`. None makes one for each kernel."""

    def forward_cached(
        self,
        layer: DecoderLayer,
        x: Float[Array, "B T D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> tuple[Float[Array, "B T D"], LayerPages, RoutingStats | None]:
        valid = join_tokens([cache.valid for cache in caches])
        queries = self.queries(layer, x, rotation, caches, forms)
        if queries is not None:
            return self.after_queries(layer, x, queries, caches, valid)
        attention = layer.self_attn
        heads, pages = attention.attend(layer.input_layernorm(x), rotation, caches, forms)
        y, stats = self._dispatch(
            "a layer after attention",
            lambda: layer.feed_forward(x, attention.output(heads), valid),
            lambda: _second_half(layer, x, valid, heads, self.counter),
        )
        return y, pages, stats

    def queries(
        self,
        layer: DecoderLayer,
        x: Float[Array, "B T D"],
        rotation: Rotation,
        caches: Sequence[LayerCache],
        forms: Sequence[Form],
    ) -> AbsorbedQueries | None:
        """Runs the kernel before attention. Returns None where it is not used."""
        if type(layer.self_attn) is not MultiHeadLatentAttention:
            return None
        return self._dispatch(
            "a layer before attention",
            lambda: None,
            lambda: _first_half(layer, x, rotation, caches, forms, self.counter),
        )

    def after_queries(
        self,
        layer: DecoderLayer,
        x: Float[Array, "B T D"],
        queries: AbsorbedQueries,
        caches: Sequence[LayerCache],
        valid: Bool[Array, "B T"],
    ) -> tuple[Float[Array, "B T D"], LayerPages, RoutingStats | None]:
        """Runs attention itself, and the kernel after it or the layer's own operations."""
        attention = layer.self_attn

        def separate() -> tuple[Array, RoutingStats | None]:
            latents: Any = _attend(attention, queries, caches, in_parts=False)
            heads = attention.unfold(latents, x.dtype)
            return layer.feed_forward(x, attention.output(heads), valid)

        def kernel() -> tuple[Array, RoutingStats | None]:
            positions = caches[0].block_tables.shape[1] * caches[0].page_size
            fits = attention.config.kv_lora_rank % PART_COLUMNS == 0
            in_parts = fits and len(caches) == 1 and positions <= MOST_MERGED
            latents = _attend(attention, queries, caches, in_parts=in_parts)
            w_uv = attention.up_projections(x.dtype).w_uv
            return _second_half(layer, x, valid, latents, self.counter, w_uv)

        y, stats = self._dispatch("a layer after attention", separate, kernel)
        return y, queries.pages, stats

    def _dispatch(self, name: str, separate: Callable[[], Any], kernel: Callable[[], Any]) -> Any:
        return dispatch(name, {"mosaic_gpu": kernel, "separate": separate}, self.implementation)


def _attend(
    attention: MultiHeadLatentAttention,
    queries: AbsorbedQueries,
    caches: Sequence[LayerCache],
    *,
    in_parts: bool,
) -> Float[Array, "_ _ H C"] | Parts:
    """Returns attention's output before W_UV. The new tokens are in ``queries.pages``. ``in_parts``
    leaves the parts of split sequences, of one batch, unmerged."""
    q_latent, q_rope, pages = queries
    caches = [cache._replace(pages=pages) for cache in caches]
    if in_parts:
        arrays, schedule = attention.decode_arguments(q_latent, q_rope, caches[0])
        scale = attention.config.softmax_scale
        return mla_decode_parts(*arrays, scale=scale, schedule=schedule)[0]
    shard = PageShard(caches[0].page_size)
    appended = [AppendedTokens({}, cache, shard) for cache in caches]
    return attention.attend_latents(q_latent, q_rope, appended)[0]


# ---- the kernels' arguments ----------------------------------------------------------------------


def _first_half(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    rotation: Rotation,
    caches: Sequence[LayerCache],
    forms: Sequence[Form],
    counter: Any,
) -> AbsorbedQueries:
    """Calls the kernel before attention, which also writes the new tokens to the cache. Raises
    NotImplementedError if the kernel does not take the layer, the number of tokens, or this
    device."""
    attention = layer.self_attn
    if layer.layout is not None or "expanded" in forms or attention.float8_latents:
        raise NotImplementedError(
            "takes layers without a layout, attention in absorbed form, and caches that are not in"
            " float8"
        )
    without_rank = attention.config.q_lora_rank is None
    weights = AttentionWeights(
        norm=layer.input_layernorm.weight[...],
        q_proj=projection(attention.q_proj if without_rank else attention.q_b_proj),
        kv_a_proj=projection(attention.kv_a_proj_with_mqa),
        kv_a_norm=attention.kv_a_layernorm.weight[...],
        w_uk=attention.up_projections(x.dtype).w_uk,
        q_a_proj=None if without_rank else projection(attention.q_a_proj),
        q_a_norm=None if without_rank else attention.q_a_layernorm.weight[...],
    )
    x_rows, cos, sin = (
        each.reshape(-1, each.shape[-1]) for each in (x, rotation.cos, rotation.sin)
    )
    slots = [new_slots(cache).reshape(-1) for cache in caches]
    q_latent, q_rope, pages = attention_inputs(
        x_rows,
        weights,
        cos,
        sin,
        caches[0].pages["latent"],
        jnp.concatenate(slots),
        eps=layer.input_layernorm.eps,
        latent_eps=attention.kv_a_layernorm.eps,
        counter=counter,
        implementation="mosaic_gpu",
    )
    q_latent, q_rope = (q.reshape(*x.shape[:-1], *q.shape[1:]) for q in (q_latent, q_rope))
    return AbsorbedQueries(q_latent, q_rope, {"latent": pages})


def _second_half(
    layer: DecoderLayer,
    x: Float[Array, "B T D"],
    valid: Bool[Array, "B T"],
    attended: Float[Array, "B T H _"] | Parts,
    counter: Any,
    w_uv: Float[Array, "H V C"] | None = None,
) -> tuple[Float[Array, "B T D"], RoutingStats | None]:
    """Calls the kernel after attention, whose output before its projection is ``attended``, or
    before W_UV if that is given. ``valid`` only affects the statistics."""
    if layer.layout is not None and layer.layout.mesh.size > 1:
        raise NotImplementedError(f"takes layers on one device, got {layer.layout.mesh.size}")
    arrays, settings = arguments(layer)
    rows = x.reshape(-1, x.shape[-1])
    y, chosen = feed_forward(
        rows,
        **arrays,
        **settings,
        w_uv=w_uv,
        o_proj=projection(layer.self_attn.o_proj),
        attended=attended if isinstance(attended, Parts) else attended.reshape(len(rows), -1),
        counter=counter,
        implementation="mosaic_gpu",
    )
    return y.reshape(x.shape), _stats(chosen, valid)


def _stats(chosen: Chosen | None, valid: Bool[Array, "B T"]) -> RoutingStats | None:
    if chosen is None:
        return None
    E = chosen.scores.shape[1]
    slots = jnp.where(valid.reshape(-1, 1), chosen.experts, E).reshape(-1)
    counts = jnp.zeros((E,), jnp.int32).at[slots].add(1, mode="drop")
    return RoutingStats(counts, chosen.scores, chosen.experts)


def arguments(layer: DecoderLayer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the layer's arrays and settings for feed_forward. Raises NotImplementedError if the
    operation has no such weights, or experts have several slots."""
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    arrays: dict[str, Any] = {"norm": norm.weight[...], "router": None, "routed": None}
    if isinstance(mlp, MLP):
        return arrays | {"shared": _matrices(mlp)}, {"rule": None, "eps": norm.eps}
    if mlp.replicas is not None:
        raise NotImplementedError("takes experts in their own order, got placed experts")
    gate, config = mlp.gate, mlp.config
    bias = gate.e_score_correction_bias[...] if config.topk_method == "noaux_tc" else None
    arrays["router"] = Router(gate.weight[...], bias)
    arrays["routed"] = _matrices(mlp.experts)
    arrays["shared"] = _matrices(mlp.shared_experts) if config.n_shared_experts else None
    return arrays, {"rule": routing_rule(config), "eps": norm.eps}


def projection(linear: Weight) -> Projection:
    """Returns a projection for the kernels. It raises as :func:`arguments`."""
    return Projection(linear.weight[...], _scales(linear))


def _matrices(mlp: MLP | Experts) -> Matrices:
    weights: tuple[Weight, ...] = mlp.gate_proj, mlp.up_proj, mlp.down_proj
    gate, up, down = (weight.weight[...] for weight in weights)
    return Matrices(gate, up, down, _scales(*weights))


def _scales(*weights: Weight) -> tuple[Array, ...]:
    quantization = weights[0].quantization
    if quantization is None:
        return ()
    is_float8 = isinstance(quantization, BlockQuantization) and weights[0].block_shape == (128, 128)
    if not is_float8 and quantization not in (INT8, INT4):
        raise NotImplementedError(
            "takes matrices without quantization, in float8 with blocks of 128x128, in int8 with a"
            f" scale for each row, or in int4 with blocks of 1x128, got {quantization}"
        )
    return tuple(weight.scale for weight in weights)

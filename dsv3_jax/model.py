"""The whole network: embedding, decoder layers, LM head, and the MTP layers behind them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int

from dsv3_jax.attn_impl import AttnImpl
from dsv3_jax.config import ModelConfig, MTPHidden
from dsv3_jax.input_checks import check_extension, check_tokens
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.attention import Form, LayerCache, MultiHeadLatentAttention
from dsv3_jax.layers.attention_variants import check_variant
from dsv3_jax.layers.block import DecoderLayer, MTPLayer
from dsv3_jax.layers.linear import Embedding, Linear, Weight
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, Replicas, RoutingStats
from dsv3_jax.layers.norm import RMSNorm
from dsv3_jax.layers.on_mesh import by_rows
from dsv3_jax.layers.rope import Rotation, rotation
from dsv3_jax.logical_axes import check_layout, parameter_shardings
from dsv3_jax.quantization import BlockQuantization, Quantization
from sharding import Layout, Placement

# Layers in order over [B, T, D]: the result, and each MoE layer's statistics.
LayerRunner = Callable[
    [Sequence[DecoderLayer], jax.Array, Rotation], tuple[jax.Array, list[RoutingStats]]
]


class Hidden(NamedTuple):
    """Hidden states [B, T, D] at the end of the decoder layers, or of an MTP layer."""

    pre_norm: Float[Array, "B T D"]
    post_norm: Float[Array, "B T D"]
    """After the norm that stands before the LM head: the head's input."""

    def feed(self, which: MTPHidden) -> Float[Array, "B T D"]:
        """What an MTP layer takes."""
        return self.post_norm if which == "post_norm" else self.pre_norm


class Aux(NamedTuple):
    """What a forward pass computes beside its logits."""

    routing_counts: Int[Array, "L_moe E"]
    """Tokens that chose each expert, in each MoE layer of the main model."""
    mtp_logits: tuple[Float32[Array, "B T_k W"], ...]
    """One an MTP layer: entry k is [B, T-1-k, W], and position i predicts token i+2+k."""
    routing: tuple[RoutingStats, ...]
    """Each MoE layer's counts and scores: the main model's layers, then the MTP layers."""


class DeepSeekV3(nnx.Module):
    """A model of the DeepSeek-V2/V3 family.

    Modules carry the checkpoint's names; ``mtp[k]`` is its layer ``num_hidden_layers + k``.

    Args:
      config: the shape. Models with a sparse-attention indexer (V3.2) are refused.
      rngs: source of the random initial weights, normal with ``initializer_range``.
      dtype: of weights and activations. Router, norms, softmax, residual sums and expert sums are
        float32 whatever it is. Other matmuls of float32 arrays run at JAX's default precision,
        which is TF32 on NVIDIA GPUs (a relative error of 3e-4 on an H200), unless they run under
        ``jax.default_matmul_precision("highest")``.
      quantization: keeps the projections in float8 with block scales, as published, or in int8 or
        int4.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
        quantization: Quantization | None = None,
    ):
        if config.has_indexer:
            raise ValueError(
                f"model_type {config.model_type} attends through a sparse indexer, which this "
                "model does not build; expected a model without index_topk"
            )
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.layout: Layout | None = None
        self.attn_impl: AttnImpl | None = None
        kwargs = {"rngs": rngs, "dtype": dtype, "quantization": quantization}
        W, D, std = config.vocab_size, config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(W, D, std=std, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dense=i < config.first_k_dense_replace, **kwargs)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=dtype)
        self.lm_head = Linear(D, W, std=std, rngs=rngs, dtype=dtype)
        self.mtp = nnx.List(
            MTPLayer(config, **kwargs) for _ in range(config.num_nextn_predict_layers)
        )

    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        return_aux: Literal[False] = False,
        run_layers: LayerRunner | None = None,
    ) -> Float32[Array, "B T W"]: ...
    @overload
    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        return_aux: Literal[True],
        mtp_hidden: MTPHidden = "post_norm",
        run_layers: LayerRunner | None = None,
    ) -> tuple[Float32[Array, "B T W"], Aux]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        return_aux: bool = False,
        mtp_hidden: MTPHidden = "post_norm",
        run_layers: LayerRunner | None = None,
    ) -> Float32[Array, "B T W"] | tuple[Float32[Array, "B T W"], Aux]:
        """Logits of whole sequences, without a cache.

        Args:
          tokens: ids below ``vocab_size``. Outside of ``jax.jit`` they are checked, for which the
            host waits for them. Inside, other ids are not noticed: they get the embedding of some
            token, and their sequence's logits mean nothing.
          return_aux: also run the MTP layers and return :class:`Aux`.
          run_layers: how the layers run; default one after the other. Training and
            :mod:`dsv3_jax.inspection` bring others.

        Raises:
          ValueError: ``tokens`` are no integers [B, T], or empty, or ids outside of the vocabulary;
            a sequence longer than ``max_position_embeddings``; with ``return_aux``, one too short
            for the MTP layers, each of which predicts one token less than the one before.
        """
        check_tokens(self.config, tokens, mtp=return_aux)
        if self.layout is not None:
            self.layout.check_batch(len(tokens))
        run = run_layers or one_by_one
        x, stats = run(self.layers, self._embed(tokens), self._turn(tokens))
        hidden = self._hidden(x)
        logits = self.logits(hidden.post_norm)
        if not return_aux:
            return logits
        counts = [s.counts for s in stats]
        mtp_logits = []
        for k, layer in enumerate(self.mtp):
            upcoming = tokens[:, k + 1 :]
            before = hidden.feed(mtp_hidden)[:, : upcoming.shape[1]]
            joined = layer.join(before, self._embed(upcoming))
            y, layer_stats = run([layer], joined, self._turn(upcoming))
            stats += layer_stats
            hidden = Hidden(y, layer.shared_head.norm(y))
            mtp_logits.append(self.logits(hidden.post_norm))
        E = self.config.n_routed_experts
        stacked = jnp.stack(counts) if counts else jnp.zeros((0, E), jnp.int32)
        return logits, Aux(stacked, tuple(mtp_logits), tuple(stats))

    def use_float8_activations(self) -> None:
        """From now on, products of more than ``FEW_ROWS`` rows a float8 matrix take them in float8
        too, rounded in blocks of 128 columns, as DeepSeek's inference code multiplies. On a mesh
        the rows are those of a device."""
        for _, module in nnx.iter_modules(self):
            if isinstance(module, Weight):
                module.float8_rows = isinstance(module.quantization, BlockQuantization)

    def use_attn_impl(self, attn_impl: AttnImpl | None) -> None:
        """From now on, decode attends in one of the five ways of :mod:`dsv3_jax.attn_impl`; prefill
        stays as it is, but for ``CD``, which has a cache of its own. None: as the model would by
        itself. Caches, and Generators, are to be made afterwards.

        Raises:
          ValueError: no such name, or one that a model on a mesh cannot take.
        """
        check_variant(attn_impl, self.layout)
        self.attn_impl = attn_impl
        for layer in (*self.layers, *self.mtp):
            layer.attn_impl = attn_impl

    def lay_out(self, layout: Layout) -> None:
        """From now on, layers run on the devices of ``layout``, where the parameters must lie as it
        says: :func:`dsv3_jax.load` sees to both.

        Raises:
          ValueError, NotImplementedError: as :func:`dsv3_jax.logical_axes.check_layout`.
        """
        check_variant(self.attn_impl, layout)
        moes = self.moe_layers()
        check_layout(self.config, layout, moes[0].places if moes else None)
        self.layout = layout
        for _, module in nnx.iter_modules(self):
            if isinstance(module, DecoderLayer | MultiHeadLatentAttention | MLP | MoE):
                module.layout = layout

    def place_experts(self, placement: Placement) -> DeepSeekV3:
        """Returns the same model with its experts in the slots that ``placement`` assigns them,
        some in several. The results are the same. On a mesh, weights move between devices.

        This model stays as it is, and may be placed again. Both share every array but the routed
        experts'.

        Args:
          placement: one row per MoE layer in order, those of MTP layers last. It is always of
            logical experts, whether this model is placed already or not.

        Raises:
          ValueError: another number of layers or experts, tables that contradict each other, or
            slots that do not divide over the devices.
        """
        self.check_placement(placement, self.layout)
        model = nnx.clone(self)  # a merge of the split parts would share its Variables
        for moe, phy2log, *tables in zip(
            model.moe_layers(), placement.phy2log, placement.log2phy, placement.logcnt, strict=True
        ):
            moe.place(phy2log, Replicas(*tables))
        return model

    def check_placement(self, placement: Placement, layout: Layout | None) -> None:
        """Raises ValueError as :meth:`place_experts` would on ``layout``."""
        if not isinstance(placement, Placement):
            raise ValueError(
                f"placement: expected a Placement, got {type(placement).__name__};"
                " Placement.from_phy2log makes one"
            )
        placement.check()
        (L, P), E = placement.phy2log.shape, placement.logcnt.shape[1]
        if (want := (len(self.moe_layers()), self.config.n_routed_experts)) != (L, E):
            raise ValueError(
                f"placement: expected {want[0]} layers of {want[1]} experts, got {L} of {E}"
            )
        if layout is not None and P % (parts := layout.num_shards("expert")):
            raise ValueError(
                f"placement: expected places that divide over {parts} devices, got {P}"
            )

    def moe_layers(self) -> list[MoE]:
        """In order, those of MTP layers last."""
        return [m.mlp for m in (*self.layers, *self.mtp) if isinstance(m.mlp, MoE)]

    def ready_to_decode(self) -> DeepSeekV3:
        """Returns the same model with the absorbed projections of attention precomputed for all
        the steps that follow: H (N + V) C numbers a layer, 2 GB for DeepSeek-V3 in bfloat16. Some
        values of ``attn_impl`` need others, or none. This model stays as it is."""
        model = nnx.clone(self)
        for layer in (*model.layers, *model.mtp):
            layer.ready_to_decode(self.dtype)
        return model

    def extend(
        self,
        tokens: Int[Array, "B T"],
        counts: Int[Array, " B"],
        cache: LatentKVCache,
        form: Form,
    ) -> tuple[Hidden, LatentKVCache]:
        """Runs ``counts`` new tokens a row behind those in the cache, and caches them.

        Args:
          tokens: padded at the right; only the first ``counts[b]`` of row b are tokens. Ids inside
            ``jax.jit`` as :meth:`__call__` takes them.
          form: ``expanded`` for prefill, ``absorbed`` for decode; the results are equal.

        Returns:
          Hidden states, undefined where padded, and the extended cache. Tokens past
          :meth:`LatentKVCache.limit` are dropped like padding, though ``lengths`` count them. No
          other position or sequence is touched.

        Raises:
          ValueError: the cache was made for another ``attn_impl``, or for another batch; tokens
            past its limit, outside of ``jax.jit``.
        """
        check_extension(self.config, tokens, cache.lengths, counts, cache)
        cache.check_width(self.config, self.attn_impl)
        if self.layout is not None:
            self.layout.check_batch(len(tokens))
        valid = self._valid(tokens, cache.lengths, counts, cache)
        turn = self._turn(tokens, cache.lengths)
        x = self._embed(tokens)
        new_pages, chosen = [], []
        for layer, pages in zip(self.layers, cache.pages, strict=True):
            layer_cache = LayerCache(pages, cache.block_tables, cache.lengths, valid)
            x, pages, of_layer = _extend(form, *nnx.split(layer), x, turn, layer_cache)
            new_pages.append(pages)
            chosen += [] if of_layer is None else [of_layer]
        cache = dataclasses.replace(
            cache,
            pages=tuple(new_pages),
            lengths=cache.lengths + counts.astype(jnp.int32),
            routing_counts=_counted(cache.routing_counts, 0, chosen),
        )
        return self._hidden(x), cache

    def extend_mtp(
        self,
        feed: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        starts: Int[Array, " B"],
        counts: Int[Array, " B"],
        cache: LatentKVCache,
        form: Form,
    ) -> tuple[Hidden, LatentKVCache]:
        """Runs the first MTP layer behind its own cache. Place i there joins ``h_i`` and token i+1,
        and predicts token i+2.

        Args:
          feed: hidden states of the places ``starts`` and on; the main model's, or the layer's own
            where it is applied again to draft further.
          tokens: the token after each of those places, padded at the right like ``feed``.
          starts: places that the layer's cache already holds. ``cache.lengths`` has no say here,
            and stays.

        Raises:
          ValueError: as :meth:`extend`, which also says what becomes of tokens without room.
        """
        check_extension(self.config, tokens, starts, counts, cache)
        layer = self.mtp[0]
        valid = self._valid(tokens, starts, counts, cache)
        layer_cache = LayerCache(cache.mtp_pages[0], cache.block_tables, starts, valid)
        joined = layer.join(feed, self._embed(tokens))
        y, pages, stats = layer.extend(joined, self._turn(tokens, starts), layer_cache, form)
        chosen = [] if stats is None else [stats.counts]
        counts_of = _counted(cache.routing_counts, self.config.num_moe_layers, chosen)
        cache = dataclasses.replace(cache, mtp_pages=(pages,), routing_counts=counts_of)
        return Hidden(y, layer.shared_head.norm(y)), cache

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float32[Array, "*batch W"]:
        """The LM head, on hidden states after the norm: ``Hidden.post_norm``."""
        return by_rows(self.layout, "lm_head", self.lm_head, hidden, jnp.float32)

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return by_rows(self.layout, "embed_tokens", self.embed_tokens, tokens)

    def _hidden(self, x: Float[Array, "B T D"]) -> Hidden:
        return Hidden(x, self.norm(x))

    def _valid(
        self,
        tokens: Int[Array, "B T"],
        starts: Int[Array, " B"],
        counts: Int[Array, " B"],
        cache: LatentKVCache,
    ) -> Bool[Array, "B T"]:
        """Marks tokens that have room, the rest being padding or dropped."""
        room = cache.limit(self.config) - starts
        return jnp.arange(tokens.shape[1]) < jnp.minimum(counts, room)[:, None]

    def _turn(self, tokens: Int[Array, "B T"], starts: Int[Array, " B"] | None = None) -> Rotation:
        """Rope rotations of the tokens' places, which count up from ``starts``, or from 0."""
        first = jnp.zeros(tokens.shape[:1], jnp.int32) if starts is None else starts
        return rotation(self.config, first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _extend(
    form: Form,
    graph: nnx.GraphDef[DecoderLayer],
    weights: Any,
    x: Float[Array, "B T D"],
    turn: Rotation,
    cache: LayerCache,
) -> tuple[Float[Array, "B T D"], Float[Array, "P page width"], Int[Array, " E"] | None]:
    """A layer's ``extend``, and the tokens that chose each expert. Jitted: layers of a kind are
    traced and lowered once."""
    x, pages, stats = nnx.merge(graph, weights).extend(x, turn, cache, form)
    return x, pages, None if stats is None else stats.counts


def _counted(
    counts: Int[Array, "L_moe E"] | None, first: int, chosen: list[jax.Array]
) -> Int[Array, "L_moe E"] | None:
    """With what layers from ``first`` on counted, if anything is to be counted."""
    if counts is None or not chosen:
        return counts
    return counts.at[first : first + len(chosen)].add(jnp.stack(chosen))


def one_by_one(
    layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], turn: Rotation
) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
    """Layers in order, unrolled."""
    stats = []
    for layer in layers:
        x, layer_stats = layer(x, turn)
        if layer_stats is not None:
            stats.append(layer_stats)
    return x, stats


class _SameKey(nnx.Rngs):
    """The same key at every draw, for models of which only the shapes are wanted.

    With jax 0.10, counting draws inside a trace takes time quadratic in the trace's length: a
    minute for DeepSeek-V3 in float8, against two seconds this way.
    """

    def params(self) -> jax.Array:
        return jax.random.key(0)


def abstract(config: ModelConfig, **kwargs: Any) -> DeepSeekV3:
    """The model with shapes for weights: what it would hold, without allocating any of it."""
    return nnx.eval_shape(lambda: DeepSeekV3(config, rngs=_SameKey(0), **kwargs))


def random_model(config: ModelConfig, seed: int, layout: Layout | None = None) -> DeepSeekV3:
    """A new model in float32, with random weights.

    Args:
      layout: where it goes, from the host, which makes and meanwhile holds all of it.

    Raises:
      ValueError, NotImplementedError: the model cannot be laid out so.
    """
    if layout is None:
        return DeepSeekV3(config, rngs=nnx.Rngs(seed))
    model = abstract(config)
    model.lay_out(layout)
    lies = parameter_shardings(model, layout.mesh, layout.rules, fsdp_axes=layout.fsdp_axes)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = nnx.to_flat_state(nnx.state(DeepSeekV3(config, rngs=nnx.Rngs(seed))))
    placed = []
    for path, leaf in made:
        value = np.asarray(leaf.get_value())
        part = jax.make_array_from_callback(value.shape, lies[path], value.__getitem__)
        placed.append((path, leaf.replace(part)))
    return nnx.merge(nnx.graphdef(model), nnx.from_flat_state(placed))


def parameter_count(model: DeepSeekV3, *, mtp: bool = False) -> int:
    """Number of parameters of the main model, or of the MTP layers alone.

    Scales and replicas of experts do not count, nor does what a model holds beside its parameters.
    """
    count = 0
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        scale = path[-1] in ("weight_scale_inv", "weight_scale")
        if not isinstance(variable, nnx.Variable) or scale or (path[0] == "mtp") != mtp:
            continue
        shape = variable.shape
        if "experts" in path:
            shape = (model.config.n_routed_experts, *shape[1:])
        # A byte holds two int4.
        count += math.prod(shape) * (2 if variable.dtype == jnp.uint8 else 1)
    return count

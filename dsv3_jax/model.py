"""The whole network: embedding, decoder layers, LM head, and the MTP layers after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args, overload

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.attn_impl import AttnImpl
from dsv3_jax.config import ModelConfig, MTPHidden
from dsv3_jax.field_checks import check_choice
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache, PagePool, TokenBatch
from dsv3_jax.layers import run_layer
from dsv3_jax.layers.attention import MultiHeadLatentAttention
from dsv3_jax.layers.block import DecoderLayer, LayerRunner, run_in_order
from dsv3_jax.layers.indexer import Indexer
from dsv3_jax.layers.linear import Embedding, Linear, Weight
from dsv3_jax.layers.logical_axes import check_layout, check_placement
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.moe import MoE, Replicas
from dsv3_jax.layers.mtp import MTPLayer
from dsv3_jax.layers.norm import RMSNorm, norm_dtype
from dsv3_jax.layers.on_mesh import apply, batch_sharded
from dsv3_jax.layers.paged_cache import Form, LayerCache
from dsv3_jax.layers.rope import Rotation, rotation_at
from dsv3_jax.model_io import Aux, Hidden, HiddenStates, check_extension, check_tokens
from dsv3_jax.overrides import few_tokens
from dsv3_jax.quantization import CacheDtype, Quantization
from pallas_kernels.dispatch import Implementation
from sharding import Layout, Placement


class DeepSeekV3(nnx.Module):
    """A model of the DeepSeek-V2/V3 family.

    Modules have the checkpoint's names; ``mtp[k]`` is its layer ``num_hidden_layers + k``.

    Args:
      config: the shape. With ``index_topk``, attention is sparse (V3.2).
      rngs: source of the random initial weights, normal with ``initializer_range``.
      dtype: dtype of weights and activations. Router, norms, softmax, residual sums and expert sums
        are always float32. Other matmuls of float32 arrays run at JAX's default precision, which is
        TF32 on NVIDIA GPUs (a relative error of 3e-4 on an H200), unless they run under
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
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.layout: Layout | None = None
        self.attn_impl: AttnImpl | None = None
        self.feed_forward: Implementation = None  # see use_feed_forward
        kwargs = {"rngs": rngs, "dtype": dtype, "quantization": quantization}
        W, D, std = config.vocab_size, config.hidden_size, config.initializer_range
        self.embed_tokens = Embedding(W, D, std=std, rngs=rngs, dtype=dtype)
        self.layers = nnx.List(
            DecoderLayer(config, dense=i < config.first_k_dense_replace, **kwargs)
            for i in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(D, eps=config.rms_norm_eps, dtype=norm_dtype(config, dtype))
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
        draft_depth: int | None = None,
    ) -> tuple[Float32[Array, "B T W"], Aux]: ...

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        return_aux: bool = False,
        mtp_hidden: MTPHidden = "post_norm",
        run_layers: LayerRunner | None = None,
        draft_depth: int | None = None,
    ) -> Float32[Array, "B T W"] | tuple[Float32[Array, "B T W"], Aux]:
        """Computes the logits of whole sequences, without a cache.

        Args:
          tokens: ids below ``vocab_size``. Outside of ``jax.jit`` they are checked, and the host
            waits for them. Inside, other ids make the logits of their sequence meaningless.
          return_aux: also run the MTP layers and return :class:`Aux`.
          mtp_hidden: the hidden state that MTP layers take, as in the model's training.
          run_layers: function that runs the layers; by default :func:`run_in_order`. Training and
            :mod:`dsv3_jax.inspection` have others.
          draft_depth: with ``return_aux``, how often to apply the first MTP layer, from the second
            time on to its own output, as in drafting; None applies each MTP layer once.

        Raises:
          ValueError: ``tokens`` are not integers [B, T], or empty, or ids outside the vocabulary; a
            sequence is longer than ``max_position_embeddings``, or with ``return_aux`` too short
            for the MTP layers. Each of them predicts one token less than the one before.
        """
        options = {"mtp_hidden": mtp_hidden, "run_layers": run_layers, "draft_depth": draft_depth}
        states = self.hidden_states(tokens, mtp=return_aux, **options)
        logits = self.logits(states.main.post_norm)
        if not return_aux:
            return logits
        T = tokens.shape[1]
        mtp_logits = (self.logits(h.post_norm[:, : T - 1 - k]) for k, h in enumerate(states.mtp))
        return logits, Aux.of(states, tuple(mtp_logits), self.config.n_routed_experts)

    def hidden_states(
        self,
        tokens: Int[Array, "B T"],
        *,
        mtp: bool,
        mtp_hidden: MTPHidden = "post_norm",
        run_layers: LayerRunner | None = None,
        draft_depth: int | None = None,
        first_keys: Int[Array, "B T"] | None = None,
    ) -> HiddenStates:
        """Does :meth:`__call__` without the LM head.

        MTP layers run on T positions too, because T suits kernels better than T - 1. Their last
        positions are padding. Attention is causal, so that no other position depends on it.

        Args:
          mtp: also run the MTP layers.
          first_keys: first position that each position attends to, in all layers; None for 0. With
            the first of its own document, no position depends on the document before it. The other
            arguments are those of :meth:`__call__`.

        Raises:
          ValueError: see :meth:`__call__`, or attention is sparse and there are ``first_keys``.
        """
        layers = list(self.mtp) if draft_depth is None else [self.mtp[0]] * draft_depth
        layers = layers if mtp else []
        check_tokens(self.config, tokens, predictions=len(layers))
        if self.layout is not None:
            self.layout.check_batch(len(tokens))
            self.layout.check_length(tokens.shape[1])
        run = run_layers or run_in_order
        rotation = self._rotation(tokens)._replace(first_keys=first_keys)
        x, routing = run(self.layers, self._embed(tokens), rotation)
        main = hidden = Hidden(x, self.norm(x))
        mtp_states, mtp_routing = [], []
        for k, layer in enumerate(layers):
            upcoming = jnp.pad(tokens[:, k + 1 :], ((0, 0), (0, k + 1)))
            joined = layer.join(hidden.mtp_input(mtp_hidden), self._embed(upcoming))
            y, stats = run([layer], joined, rotation)
            if k < len(self.mtp):
                mtp_routing += [each.without_last(k + 1, len(tokens)) for each in stats]
            hidden = Hidden(y, layer.shared_head.norm(y))
            mtp_states.append(hidden)
        return HiddenStates(main, tuple(mtp_states), tuple(routing), tuple(mtp_routing))

    def use_float8_activations(self) -> None:
        """Makes matmuls with float8 weights, and int4 experts, take large inputs in float8 too, and
        indexers cache float8 keys, as in DeepSeek's inference code.

        Inputs of more than ``FEW_TOKENS`` rows per matrix are rounded in blocks of 128 columns. On
        a mesh these are the rows on one device. Make caches and Generators afterwards.

        Raises:
          ValueError: see :meth:`dsv3_jax.layers.indexer.Indexer.use_float8_keys`.
        """
        for _, module in nnx.iter_modules(self):
            if isinstance(module, Weight):
                module.float8_activations = module.can_take_float8_activations
            elif isinstance(module, Indexer):
                module.use_float8_keys()

    def use_cache_dtype(self, cache_dtype: CacheDtype) -> None:
        """Makes attention cache float8: indexer keys, or latents and indexer keys.

        A key takes 132 bytes of DeepSeek-V3.2's 256, a latent with its rope key 656 of 1,152.
        Attention without a cache rounds them alike. Make caches and Generators afterwards.

        Raises:
          ValueError: the model has an attention variant, or see :meth:`CacheSpec.of_config`.
        """
        check_choice("cache_dtype", cache_dtype, get_args(CacheDtype))
        if self.attn_impl is not None:
            raise ValueError(f"cache_dtype: expected attn_impl None with it, got {self.attn_impl}")
        CacheSpec.of_config(self.config, self.dtype, cache_dtype=cache_dtype)
        for _, module in nnx.iter_modules(self):
            if isinstance(module, MultiHeadLatentAttention):
                module.float8_latents = cache_dtype == "fp8"
            elif isinstance(module, Indexer):
                module.use_float8_keys()

    def use_attn_impl(self, attn_impl: AttnImpl | None) -> None:
        """Makes decode use one of the five attention variants of :mod:`dsv3_jax.attn_impl`.

        Prefill does not change, except with ``CD``, which caches other arrays. None restores the
        default. Make caches and Generators afterwards.

        Raises:
          ValueError: an unknown name, a variant that does not run on a mesh, or a model with
            sparse attention or float8 latents, which has no variants.
        """
        if attn_impl is not None and any(x.self_attn.float8_latents for x in self.layers):
            raise ValueError(f"attn_impl: expected None with cache_dtype fp8, got {attn_impl}")
        from dsv3_jax.overrides.attention_variants import check_variant, set_variant

        check_variant(self.config, attn_impl, self.layout)
        self.attn_impl = attn_impl
        for layer in (*self.layers, *self.mtp):
            set_variant(layer.self_attn, attn_impl)

    def use_feed_forward(self, implementation: Implementation) -> None:
        """Selects how the layers of steps with a cache run, apart from attention itself.

        Args:
          implementation: ``"mosaic_gpu"`` is one kernel for everything before attention itself and
            one for everything after it, for up to eight tokens; ``"separate"`` is an operation for
            each step. A sequence of names is tried in its order. None uses the kernels where they
            have been measured to be faster: see ``few_tokens.THRESHOLDS``.
        """
        if implementation is not None and not isinstance(implementation, str):
            implementation = tuple(implementation)  # it is static under jit
        self.feed_forward = implementation

    def lay_out(self, layout: Layout) -> None:
        """Makes layers run on the devices of ``layout``.

        The parameters must have the shardings of the layout. :func:`dsv3_jax.load` does both.

        Raises:
          ValueError, NotImplementedError: see :func:`dsv3_jax.layers.logical_axes.check_layout`.
        """
        if self.attn_impl is not None:
            from dsv3_jax.overrides.attention_variants import check_variant

            check_variant(self.config, self.attn_impl, layout)
        moe_layers = self.moe_layers()
        check_layout(self.config, layout, moe_layers[0].num_slots if moe_layers else None)
        self.layout = layout
        for _, module in nnx.iter_modules(self):
            if isinstance(module, DecoderLayer | MultiHeadLatentAttention | MLP | MoE):
                module.layout = layout

    def place_experts(self, placement: Placement) -> DeepSeekV3:
        """Returns the same model with its experts in the slots that ``placement`` assigns to them.

        The results are the same. On a mesh, weights move between devices. This model does not
        change. Both models share every array except those of the routed experts.

        Args:
          placement: one row per MoE layer in order, those of MTP layers last. It assigns slots to
            logical experts, whether or not this model is placed already.

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
        """Raises ValueError if :meth:`place_experts` refuses ``placement`` on ``layout``."""
        check_placement(placement, len(self.moe_layers()), self.config.n_routed_experts, layout)

    def moe_layers(self) -> list[MoE]:
        """Returns the MoE layers in order, those of MTP layers last."""
        return [m.mlp for m in (*self.layers, *self.mtp) if isinstance(m.mlp, MoE)]

    def cache_spec(self, *, mtp: bool = False) -> CacheSpec:
        """Returns the page arrays of each layer, the argument of :meth:`LatentKVCache.init`.

        Args:
          mtp: include the first MTP layer, which needs a cache to draft.
        """
        specs = [x.self_attn.cache_spec(self.dtype) for x in (*self.layers, *self.mtp[:mtp])]
        L = len(self.layers)
        return CacheSpec(tuple(specs[:L]), tuple(specs[L:]))

    def precompute_for_decode(self) -> DeepSeekV3:
        """Returns the same model with additional arrays that decode steps derive from the weights.

        By default they are attention's absorbed projections: H (N + V) C numbers per layer, 2 GB
        for DeepSeek-V3 in bfloat16. This model does not change.
        """
        model = nnx.clone(self)
        for layer in (*model.layers, *model.mtp):
            layer.self_attn.precompute_for_decode(self.dtype)
        return model

    def attend_to_whole_sequences(self) -> None:
        """Makes decode steps compute the attention of each sequence in one piece.

        Otherwise a kernel may split a sequence where it suits all sequences of the batch, which is
        faster for few long ones, and a result's last bits depend on the lengths of the others.
        """
        for layer in (*self.layers, *self.mtp):
            layer.self_attn.whole_sequences = True

    def extend(
        self, tokens: Int[Array, "B T"], counts: Int[Array, " B"], cache: LatentKVCache, form: Form
    ) -> tuple[Hidden, LatentKVCache]:
        """Runs ``counts`` new tokens per sequence after the cached ones, and caches them.

        Args:
          tokens: padded at the right; only the first ``counts[b]`` of sequence b are tokens. Inside
            ``jax.jit`` ids are not checked, see :meth:`__call__`.
          form: ``expanded`` for prefill, ``absorbed`` for decode; the results are equal.

        Returns:
          Hidden states, undefined for padding, and the extended cache. Tokens past
          :meth:`LatentKVCache.max_length` are dropped like padding, though ``lengths`` count them.
          No other position or sequence changes.

        Raises:
          ValueError: the cache has other page arrays than the model caches, or another batch size;
            outside of ``jax.jit``, a sequence becomes too long.
        """
        check_extension(self.config, tokens, cache.lengths, counts, cache)
        batch = TokenBatch(tokens, counts, cache.sequences, form)
        (hidden,), pool, expert_counts = self.extend_batches([batch], cache.pool)
        cache = dataclasses.replace(cache, pool=pool).add_routing_counts(0, expert_counts)
        return hidden, cache.with_lengths(cache.lengths + counts.astype(jnp.int32))

    def extend_batches(
        self, batches: Sequence[TokenBatch], pool: PagePool
    ) -> tuple[list[Hidden], PagePool, list[Int[Array, " E"]]]:
        """Runs several batches of new tokens together. Only attention treats each by itself.

        A sequence may have consecutive tokens in several entries of a batch.

        Returns:
          The hidden states of each batch; the pool with the new tokens; and for each MoE layer, the
          number of tokens that chose each expert.

        Raises:
          ValueError: the pool has other page arrays than the model caches, a batch size does not
            divide over the devices, or the layout shards the tokens of sequences for training.
        """
        pool.check_spec(self.cache_spec())
        if self.layout is not None and (shards := self.layout.num_shards("tokens")) > 1:
            raise ValueError(f"context_devices: expected none with a cache, got {shards}")
        xs, rotations, caches = [], [], []
        for batch in batches:
            if self.layout is not None:
                self.layout.check_batch(len(batch.tokens))
            tables, starts = batch.sequences.block_tables, batch.sequences.lengths
            cache = LatentKVCache(pool, batch.sequences)
            valid = cache.valid(batch.tokens, starts, batch.counts, self.config)
            xs.append(self._embed(batch.tokens))
            rotations.append(self._rotation(batch.tokens, starts))
            caches.append(LayerCache({}, tables, starts, valid))
        forms = tuple(batch.form for batch in batches)
        new_pages, expert_counts = [], []
        tokens = sum(batch.tokens.size for batch in batches)
        counter = few_tokens.shared_counter(self.layout, tokens)
        for layer, pages in zip(self.layers, pool.layers, strict=True):
            override = few_tokens.choose(layer, self.feed_forward, tokens, counter)
            xs, pages, layer_counts = run_layer.extend_layer(
                forms, *run_layer.split(layer), xs, rotations, caches, pages, override
            )
            new_pages.append(pages)
            expert_counts += [] if layer_counts is None else [layer_counts]
        pool = dataclasses.replace(pool, layers=tuple(new_pages))
        return [Hidden(x, self.norm(x)) for x in xs], pool, expert_counts

    def extend_mtp(
        self,
        mtp_input: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        starts: Int[Array, " B"],
        counts: Int[Array, " B"],
        cache: LatentKVCache,
        form: Form,
        *,
        newest_only: bool = False,
    ) -> tuple[Hidden, LatentKVCache]:
        """Runs the first MTP layer on new positions of each sequence, and caches them.

        Position i combines ``h_i`` with token i+1 and predicts token i+2.

        Args:
          mtp_input: hidden states of the positions from ``starts`` on: the main model's, or the
            layer's own where it is applied again to draft further.
          tokens: the token after each of those positions, padded at the right like ``mtp_input``.
          starts: number of positions in the layer's cache. ``cache.lengths`` are not used and do
            not change.
          newest_only: whether to return the hidden states [B, 1, D] of each sequence's last new
            position alone. Nothing but their cache entries is computed for the others.

        Raises:
          ValueError: see :meth:`extend`, which also documents which tokens are dropped.
        """
        check_extension(self.config, tokens, starts, counts, cache)
        layer = self.mtp[0]
        valid = cache.valid(tokens, starts, counts, self.config)
        layer_cache = LayerCache(cache.pool.mtp[0], cache.block_tables, starts, valid)
        joined = layer.join(mtp_input, self._embed(tokens))
        step = joined, self._rotation(tokens, starts), layer_cache, form
        y, pages, stats = few_tokens.extend_mtp(
            layer, self.feed_forward, *step, newest_only=newest_only
        )
        cache = dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, mtp=(pages,)))
        if stats is not None:
            cache = cache.add_routing_counts(self.config.num_moe_layers, [stats.counts])
        return Hidden(y, layer.shared_head.norm(y)), cache

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float32[Array, "*batch W"]:
        """Applies the LM head to hidden states after the norm, ``Hidden.post_norm``."""
        if not isinstance(self.lm_head, Linear):  # replaced
            return apply(self.lm_head, hidden, jnp.float32)
        return batch_sharded(self.layout, "lm_head", self.lm_head, hidden, jnp.float32)

    def _embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        # In training the table is float32, and so is the sum of a frequent token's gradients.
        x = batch_sharded(self.layout, "embed_tokens", self.embed_tokens, tokens)
        return x.astype(self.dtype)

    def _rotation(
        self, tokens: Int[Array, "B T"], starts: Int[Array, " B"] | None = None
    ) -> Rotation:
        """Returns the rotation of T consecutive positions from ``starts`` on, by default 0."""
        first = jnp.zeros(tokens.shape[:1], jnp.int32) if starts is None else starts
        positions = first[:, None] + jnp.arange(tokens.shape[1], dtype=jnp.int32)
        return rotation_at(self.config, positions)

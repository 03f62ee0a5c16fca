"""DeepSeekMoE: each token passes through a few routed experts and one shared expert."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jax.tree_util import Partial
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, Int32

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.linear import Weight, WeightArgs
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.router import Router
from pallas_kernels import Routes, gather_rows, grouped_matmul, grouped_swiglu, sort_pairs
from sharding import Layout, choose_replicas, mix_experts, physical_experts, weighted_sum


class RoutingStats(NamedTuple):
    """Routing of one MoE layer, for balancing and inspection."""

    counts: Int[Array, " E"]  # number of tokens that chose each expert, without padding
    scores: Float32[Array, "M E"]  # unbiased scores of every token, padding included
    experts: Int[Array, "M K"]  # chosen experts of every token, padding included

    def without_last(self, positions: int, sequences: int) -> RoutingStats:
        """Returns the statistics without those of the last ``positions`` of every sequence."""
        T = len(self.scores) // sequences
        scores, experts = (
            x.reshape(sequences, T, -1)[:, : T - positions].reshape(-1, x.shape[-1])
            for x in (self.scores, self.experts)
        )
        numbers = jnp.arange(scores.shape[-1])
        counts = jnp.sum(experts[..., None] == numbers, axis=(0, 1), dtype=self.counts.dtype)
        return RoutingStats(counts, scores, experts)


class Experts(nnx.Module):
    """The routed experts: stacks of matrices [E, out, in], with one matrix per expert slot."""

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        std = config.initializer_range
        self.gate_proj = Weight((E, F, D), std=std, **weights)
        self.up_proj = Weight((E, F, D), std=std, **weights)
        self.down_proj = Weight((E, D, F), std=std, **weights)

    def __call__(
        self,
        tokens: Float[Array, "M D"],
        rows: Int[Array, " MK"],
        group_sizes: Int[Array, " E"],
        copies: Int[Array, "M K"] | None = None,
    ) -> tuple[Float[Array, "MK F"], Partial]:
        """Runs the MLP of every expert on the tokens that chose it, up to its last matmul.

        Args:
          rows: index into ``tokens`` of each (token, expert) pair, with the pairs sorted by expert.
          group_sizes: number of pairs of each expert.
          copies: positions of each token's pairs in ``rows``, if known. The gradient needs them.

        Returns:
          The hidden activations of each pair, in the order of ``rows``, and the last matmul as a
          function of them, see :data:`sharding.expert_mixture.ExpertMLP`.
        """
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        if gate.uses_float8_activations(len(rows)):
            return self._float8(tokens, rows, group_sizes)
        tokens = gather_rows(tokens, rows, copies)
        if gate.quantization is None:
            first, second, last = (weight.dense(tokens.dtype) for weight in (gate, up, down))
            hidden = grouped_swiglu(tokens, first, second, group_sizes)
            return hidden, Partial(_matmul, last, group_sizes)
        arrays = gate.weight[...], up.weight[...], group_sizes, None, gate.scale, up.scale
        hidden = grouped_swiglu(tokens, *arrays, block_shape=gate.block_shape)
        matmul = functools.partial(_quantized_matmul, block_shape=down.block_shape)
        return hidden, Partial(matmul, down.weight[...], down.scale, group_sizes)

    def _float8(
        self, tokens: Float[Array, "M D"], rows: Int[Array, " MK"], group_sizes: Int[Array, " E"]
    ) -> tuple[BFloat16[Array, "MK F"], Partial]:
        """Does :meth:`__call__` with activations in float8. Each token is rounded once for all its
        experts."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        values, scale = gate.quantize_activations(tokens)
        hidden: Any = grouped_swiglu(
            gather_rows(values, rows),
            gate.weight[...],
            up.weight[...],
            group_sizes,
            scale[rows],
            gate.scale,
            up.scale,
            block_shape=gate.block_shape,
        )
        quantize, block_shape, dtype = down.quantize_activations, down.block_shape, tokens.dtype

        def matmul(matrices: jax.Array, scale: jax.Array, sizes: jax.Array, hidden: jax.Array):
            values, row_scale = quantize(hidden)
            out = grouped_matmul(values, matrices, sizes, row_scale, scale, block_shape=block_shape)
            return out.astype(dtype)

        return hidden, Partial(matmul, down.weight[...], down.scale, group_sizes)


def _matmul(matrices: jax.Array, sizes: jax.Array, hidden: jax.Array) -> jax.Array:
    return grouped_matmul(hidden, matrices, sizes)


def _quantized_matmul(
    matrices: jax.Array,
    scale: jax.Array,
    sizes: jax.Array,
    hidden: jax.Array,
    *,
    block_shape: tuple[int, int],
) -> jax.Array:
    return grouped_matmul(hidden, matrices, sizes, None, scale, block_shape=block_shape)


def _sum_of_rows(
    rows: Float[Array, "MK D"],
    position: Int[Array, "M K"],
    keep: Bool[Array, "M 1"] | None,
    weights: Float32[Array, "M K"],
) -> Float32[Array, "M D"]:
    """Returns the weighted sum of each token's rows, see :func:`sharding.weighted_sum`."""
    # Back in token order, so that every token sums its experts in the same order.
    picked = rows[position.reshape(-1)].reshape(*position.shape, -1).astype(jnp.float32)
    if keep is not None:
        picked = jnp.where(keep[..., None], picked, 0.0)
    # HIGHEST: a GPU may otherwise use TF32 for both operands, with a mantissa of 10 bits.
    return jnp.einsum("mkd,mk->md", picked, weights, precision=jax.lax.Precision.HIGHEST)


class Replicas(NamedTuple):
    """The slots of each expert of one layer, from :class:`sharding.Placement`."""

    log2phy: Int32[Array, "E max_rep"]  # slots of each logical expert, ascending, then -1
    logcnt: Int32[Array, " E"]  # number of slots of each logical expert


class MoE(nnx.Module):
    """``y = sum_k weight_k expert_k(x) + shared(x)``, summed in float32. No token is dropped.

    The experts' weights are stored in slots. Slot p holds expert p unless experts are placed, see
    :meth:`place`; then an expert may have several slots.
    """

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        self.config = config
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.replicas: Replicas | None = None  # see place; None: slot p holds expert p
        self.gate = Router(config, rngs=weights["rngs"], dtype=weights["dtype"])
        self.experts = Experts(config, **weights)
        if config.n_shared_experts:
            # Several shared experts are published as one MLP of their summed width.
            D, F = config.hidden_size, config.n_shared_experts * config.moe_intermediate_size
            std = config.initializer_range
            self.shared_experts = MLP(D, F, std=std, hidden_axis="shared_ffn", **weights)

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], RoutingStats]:
        """Returns the layer's output and its routing. Padding, where ``valid`` is False, goes to no
        expert, and its output is undefined."""
        tokens = x.reshape(-1, x.shape[-1])
        valid = None if valid is None else valid.reshape(-1)
        routes = self.gate(tokens, valid)
        if self.layout is None:
            mixed = self._mix(tokens, routes, valid)
        else:
            mixed = self._mix_on_mesh(self.layout, tokens, routes, valid)
        if self.config.n_shared_experts:
            mixed += self.shared_experts(tokens, jnp.float32)
        counts = routes.group_sizes
        if self.layout is not None:
            counts = self.layout.psum(counts, "batch", "tokens")
        stats = RoutingStats(counts, routes.scores, routes.experts)
        return mixed.astype(x.dtype).reshape(x.shape), stats

    def place(self, phy2log: Int32[Array, " P"], replicas: Replicas) -> None:
        """Moves expert ``phy2log[p]`` to slot p of the stacks, on a copy of the model: see
        :meth:`~dsv3_jax.model.DeepSeekV3.place_experts`."""
        current = self.replicas
        # All copies of an expert are equal: take the first.
        source = phy2log if current is None else current.log2phy[phy2log, 0]
        for _, parameter in nnx.to_flat_state(nnx.state(self.experts)):
            value = parameter.get_value()
            sharding = None if self.layout is None else value.sharding
            parameter.set_value(jax.jit(physical_experts, out_shardings=sharding)(value, source))
        self.replicas = nnx.data(replicas)

    @property
    def num_slots(self) -> int:
        """Number of expert slots on all devices. Without replicas, the number of experts."""
        return self.experts.gate_proj.weight.shape[0]

    def _slots(self, routes: Routes) -> Int[Array, "M K"]:
        """Returns the slot of each chosen expert. On a mesh, shards of the batch begin with
        different replicas: with few tokens on each, all replicas get some."""
        if self.replicas is None:
            return routes.experts
        shard = 0 if self.layout is None else self.layout.shard_index("batch")
        return choose_replicas(routes.experts, *self.replicas, shard)

    def _mix(
        self, tokens: Float[Array, "M D"], routes: Routes, valid: Bool[Array, " M"] | None
    ) -> Float32[Array, "M D"]:
        """Returns the weighted sum of each token's K experts, all on this device. They run on
        (token, slot) pairs sorted by slot: by expert, as the router sorts them, unless experts are
        placed."""
        K = self.config.num_experts_per_tok
        if self.replicas is not None:
            order, inverse, sizes = sort_pairs(self._slots(routes), valid, self.num_slots)
            routes = routes._replace(order=order, inverse=inverse, group_sizes=sizes)
        position = routes.inverse.reshape(-1, K)
        hidden, down = self.experts(tokens, routes.order // K, routes.group_sizes, position)
        keep = None if valid is None else valid[:, None]
        pairs = routes.order, position, keep
        return weighted_sum(_sum_of_rows, down, hidden, routes.weights, *pairs)

    def _mix_on_mesh(
        self,
        layout: Layout,
        tokens: Float[Array, "M D"],
        routes: Routes,
        valid: Bool[Array, " M"] | None,
    ) -> Float32[Array, "M D"]:
        """Returns the same sum for this device's tokens, with experts on several devices."""
        local_slots = self.experts.gate_proj.weight.shape[0]
        num_slots = local_slots * layout.num_shards("expert")
        slots = self._slots(routes)
        if valid is not None:
            slots = jnp.where(valid[:, None], slots, num_slots)
        mixed = mix_experts(
            tokens,
            slots,
            routes.weights,
            self.experts,
            num_experts=num_slots,
            exchange_axes=layout.exchange_axes,
            reduce_axes=layout.reduce_axes,
            exchange=layout.exchange,
            float8=layout.float8_dispatch,
            combine_dtype=layout.combine_dtype,
        )
        return layout.psum(mixed, "expert_ffn")

"""DeepSeekMoE: each token passes through a few routed experts and one shared expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, Int32

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.linear import Weight, WeightArgs
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.router import Router
from pallas_kernels import Routes, gather_rows, grouped_matmul, grouped_swiglu, sort_pairs
from sharding import Layout, choose_replicas, mix_experts, physical_experts


class RoutingStats(NamedTuple):
    """Routing of one MoE layer, for balancing and inspection."""

    counts: Int[Array, " E"]  # number of tokens that chose each expert, without padding
    scores: Float32[Array, "M E"]  # unbiased scores of every token, padding included
    experts: Int[Array, "M K"]  # chosen experts of every token, padding included


class Experts(nnx.Module):
    """The routed experts: stacks of matrices [E, out, in], with one matrix per expert slot."""

    def __init__(self, config: ModelConfig, **weights: Unpack[WeightArgs]):
        E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        std = config.initializer_range
        self.gate_proj = Weight((E, F, D), std=std, **weights)
        self.up_proj = Weight((E, F, D), std=std, **weights)
        self.down_proj = Weight((E, D, F), std=std, **weights)

    def __call__(
        self, tokens: Float[Array, "M D"], rows: Int[Array, " MK"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "MK D"]:
        """Runs the MLP of every expert on the tokens that chose it. ``rows`` has the index into
        ``tokens`` of each (token, expert) pair, sorted by expert, and ``group_sizes`` the pairs of
        each expert. Returns one output per pair, in the order of ``rows``."""
        if self.gate_proj.uses_float8_activations(len(rows)):
            return self._float8(tokens, rows, group_sizes).astype(tokens.dtype)
        tokens = gather_rows(tokens, rows)
        hidden = _grouped(grouped_swiglu, tokens, (self.gate_proj, self.up_proj), group_sizes)
        return _grouped(grouped_matmul, hidden, (self.down_proj,), group_sizes)

    def _float8(
        self, tokens: Float[Array, "M D"], rows: Int[Array, " MK"], group_sizes: Int[Array, " E"]
    ) -> BFloat16[Array, "MK D"]:
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
        hidden, hidden_scale = down.quantize_activations(hidden)
        return grouped_matmul(
            hidden,
            down.weight[...],
            group_sizes,
            hidden_scale,
            down.scale,
            block_shape=down.block_shape,
        )


def _grouped(
    op: Callable[..., Any],
    rows: Float[Array, "M K"],
    stacks: tuple[Weight, ...],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "M N"]:
    """Calls grouped_matmul or grouped_swiglu with weights as they are stored."""
    if stacks[0].quantization is None:
        return op(rows, *(weight.dense(rows.dtype) for weight in stacks), group_sizes)
    matrices, scales = zip(*((w.weight[...], w.scale) for w in stacks), strict=True)
    return op(rows, *matrices, group_sizes, None, *scales, block_shape=stacks[0].block_shape)


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
            counts = self.layout.psum(counts, "batch")
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
        out = self.experts(tokens, routes.order // K, routes.group_sizes)
        # Back in token order, so that every token sums its experts in the same order.
        out = out[routes.inverse].reshape(-1, K, tokens.shape[-1]).astype(jnp.float32)
        if valid is not None:
            out = jnp.where(valid[:, None, None], out, 0.0)
        # HIGHEST: a GPU may otherwise use TF32 for both operands, with a mantissa of 10 bits.
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("mkd,mk->md", out, routes.weights, precision=highest)

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

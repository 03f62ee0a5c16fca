"""DeepSeekMoE: routed experts, of which a token visits a few, beside one that all visit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, BFloat16, Bool, Float, Float32, Int, Int32

from dsv3_jax.config import ModelConfig
from dsv3_jax.layers.linear import Weight
from dsv3_jax.layers.mlp import MLP
from dsv3_jax.layers.router import Router
from dsv3_jax.quantization import Quantization
from pallas_kernels import Routes, grouped_matmul, grouped_swiglu
from sharding import Layout, choose_replicas, mix_experts, physical_experts


class RoutingStats(NamedTuple):
    """What one MoE layer did, for balancing and inspection; padding does not count."""

    counts: Int[Array, " E"]
    """Tokens that chose each expert."""
    scores: Float32[Array, "M E"]
    """Every token's unbiased scores."""
    experts: Int[Array, "M K"]
    """Every token's choice, padding's too."""


class Experts(nnx.Module):
    """The routed experts' weights, one matrix an expert, stacked: [E, out, in]."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        E, D, F = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        kwargs = {
            "std": config.initializer_range,
            "rngs": rngs,
            "dtype": dtype,
            "quantization": quantization,
        }
        self.gate_proj = Weight((E, F, D), **kwargs)
        self.up_proj = Weight((E, F, D), **kwargs)
        self.down_proj = Weight((E, D, F), **kwargs)

    def __call__(
        self, tokens: Float[Array, "M D"], rows: Int[Array, " MK"], group_sizes: Int[Array, " E"]
    ) -> Float[Array, "MK D"]:
        """Each expert's MLP on its rows: ``tokens[rows]``, sorted by expert."""
        if self.gate_proj.takes_float8(len(rows)):
            return self._float8(tokens, rows, group_sizes).astype(tokens.dtype)
        tokens = tokens[rows]
        hidden = _product(grouped_swiglu, tokens, (self.gate_proj, self.up_proj), group_sizes)
        return _product(grouped_matmul, hidden, (self.down_proj,), group_sizes)

    def _float8(
        self, tokens: Float[Array, "M D"], rows: Int[Array, " MK"], group_sizes: Int[Array, " E"]
    ) -> BFloat16[Array, "MK D"]:
        """The same of rounded rows; a token is rounded once for all its experts."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        values, scale = gate.rounded(tokens)
        hidden: Any = grouped_swiglu(
            values[rows],
            gate.weight[...],
            up.weight[...],
            group_sizes,
            scale[rows],
            gate.scale,
            up.scale,
            block_shape=gate.block_shape,
        )
        hidden, hidden_scale = down.rounded(hidden)
        return grouped_matmul(
            hidden,
            down.weight[...],
            group_sizes,
            hidden_scale,
            down.scale,
            block_shape=down.block_shape,
        )


def _product(
    op: Callable[..., Any],
    rows: Float[Array, "M K"],
    stacks: tuple[Weight, ...],
    group_sizes: Int[Array, " E"],
) -> Float[Array, "M N"]:
    """grouped_matmul or grouped_swiglu, of the weights as they are stored."""
    if stacks[0].quantization is None:
        return op(rows, *(weight.dense(rows.dtype) for weight in stacks), group_sizes)
    matrices, scales = zip(*((w.weight[...], w.scale) for w in stacks), strict=True)
    return op(rows, *matrices, group_sizes, None, *scales, block_shape=stacks[0].block_shape)


class Replicas(NamedTuple):
    """Where copies of this layer's experts stand: a layer of :class:`sharding.Placement`."""

    log2phy: Int32[Array, "E max_rep"]
    logcnt: Int32[Array, " E"]


class MoE(nnx.Module):
    """``y = sum_k weight_k expert_k(x) + shared(x)``, summed in float32; no token is dropped."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        quantization: Quantization | None,
    ):
        self.config = config
        self.layout: Layout | None = None  # see DeepSeekV3.lay_out
        self.replicas: Replicas | None = None  # see place
        self.gate = Router(config, rngs=rngs, dtype=dtype)
        self.experts = Experts(config, rngs=rngs, dtype=dtype, quantization=quantization)
        if config.n_shared_experts:
            # Several shared experts are published as one MLP of their summed width.
            self.shared_experts = MLP(
                config.hidden_size,
                config.n_shared_experts * config.moe_intermediate_size,
                std=config.initializer_range,
                rngs=rngs,
                dtype=dtype,
                quantization=quantization,
                inner_axis="shared_ffn",
            )

    def __call__(
        self, x: Float[Array, "B T D"], valid: Bool[Array, "B T"] | None = None
    ) -> tuple[Float[Array, "B T D"], RoutingStats]:
        """``valid`` marks tokens: padding goes to no expert, and its output is undefined."""
        tokens = x.reshape(-1, x.shape[-1])
        valid = None if valid is None else valid.reshape(-1)
        routes = self.gate(tokens, valid)
        alone = self.layout is None and self.replicas is None
        mixed = (self._mix if alone else self._mix_placed)(tokens, routes, valid)
        if self.config.n_shared_experts:
            mixed += self.shared_experts(tokens, jnp.float32)
        counts = routes.group_sizes
        if self.layout is not None:
            counts = self.layout.psum(counts, "batch")
        stats = RoutingStats(counts, routes.scores, routes.experts)
        return mixed.astype(x.dtype).reshape(x.shape), stats

    def place(self, phy2log: Int32[Array, " P"], replicas: Replicas) -> None:
        """From now on, slot p of the stacks holds expert ``phy2log[p]``.

        Sets this layer's Variables: :meth:`~dsv3_jax.model.DeepSeekV3.place_experts` calls it on
        the layers of a copy.
        """
        now = self.replicas
        # A copy of an expert is as good as any: the first.
        source = phy2log if now is None else now.log2phy[phy2log, 0]
        for _, parameter in nnx.to_flat_state(nnx.state(self.experts)):
            value = parameter.get_value()
            lies = None if self.layout is None else value.sharding
            parameter.set_value(jax.jit(physical_experts, out_shardings=lies)(value, source))
        self.replicas = nnx.data(replicas)

    @property
    def places(self) -> int:
        """For experts, on all devices: as many as there are without replicas."""
        return self.experts.gate_proj.weight.shape[0]

    def _mix(
        self, tokens: Float[Array, "M D"], routes: Routes, valid: Bool[Array, " M"] | None
    ) -> Float32[Array, "M D"]:
        """Multiplies (token, expert) pairs, sorted by expert, and sums each token's K results."""
        K = self.config.num_experts_per_tok
        out = self.experts(tokens, routes.order // K, routes.group_sizes)
        # Back in token order, so that every token sums its experts in the same order.
        out = out[routes.inverse].reshape(-1, K, tokens.shape[-1]).astype(jnp.float32)
        if valid is not None:
            out = jnp.where(valid[:, None, None], out, 0.0)
        # HIGHEST: a GPU may otherwise take both in TF32, with 10 bits after the point.
        highest = jax.lax.Precision.HIGHEST
        return jnp.einsum("mkd,mk->md", out, routes.weights, precision=highest)

    def _mix_placed(
        self, tokens: Float[Array, "M D"], routes: Routes, valid: Bool[Array, " M"] | None
    ) -> Float32[Array, "M D"]:
        """The same of experts that lie on several devices or stand in several places, for this
        device's tokens."""
        layout = self.layout
        count = self.experts.gate_proj.weight.shape[0]
        exchange_axes, reduce_axes = (), ()
        if layout is not None:
            count *= layout.num_shards("expert")
            exchange_axes, reduce_axes = layout.exchange_axes, layout.reduce_axes
        experts = routes.experts
        if self.replicas is not None:
            experts = choose_replicas(experts, *self.replicas)
        if valid is not None:
            experts = jnp.where(valid[:, None], experts, count)
        mixed = mix_experts(
            tokens,
            experts,
            routes.weights,
            self.experts,
            num_experts=count,
            exchange_axes=exchange_axes,
            reduce_axes=reduce_axes,
            exchange="all_gather" if layout is None else layout.exchange,
            float8=layout is not None and layout.float8_dispatch,
            combine_dtype=layout.combine_dtype if layout else jnp.float32,
        )
        return mixed if layout is None else layout.psum(mixed, "expert_ffn")

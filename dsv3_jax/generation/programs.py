"""The prefill and decode programs of a model, and the states that they take."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

from dsv3_jax.generation.loop import decode, prefill
from dsv3_jax.generation.program import Program, state_shapes
from dsv3_jax.generation.signature import ModelSignature
from dsv3_jax.generation.state import DecodeState
from dsv3_jax.generation.step_times import StepTimes
from dsv3_jax.kv_cache import CacheSpec, LatentKVCache
from dsv3_jax.model import DeepSeekV3


@dataclasses.dataclass(frozen=True)
class Programs:
    """The two programs of a model, for sequences of up to ``max_len`` tokens."""

    prefill: Program
    """Runs :func:`dsv3_jax.generation.loop.prefill`: ``(state, max_chunks, drafter) -> state``."""

    decode: Program
    """Runs :func:`dsv3_jax.generation.loop.decode`: ``(state, sampling, max_steps, drafter, depth,
    adjustments) -> state``."""

    signature: ModelSignature
    """Properties of the model on which the programs depend."""

    cache_spec: CacheSpec
    """Page arrays of the model's layers, and of the MTP layer that may draft."""

    max_len: int
    """Maximum number of tokens of a sequence."""

    prefill_chunk: int
    """Number of tokens per sequence that one step of ``prefill`` caches."""

    routing_counts: np.ndarray | None
    """Number of tokens that chose each expert, int64 [L_moe, E], summed over all batches so far;
    None if routing is not counted. Written by batches."""

    step_times: StepTimes = dataclasses.field(default_factory=StepTimes)
    """Measured durations of the programs. Written by batches."""

    @classmethod
    def of(
        cls,
        model: DeepSeekV3,
        max_len: int,
        *,
        prefill_chunk: int,
        vocab_size: int,
        count_routing: bool = False,
    ) -> Programs:
        """Creates the programs. They compile when they first run.

        Args:
          vocab_size: ids from here on are padding of the embedding and never selected.
        """
        counts_shape = (len(model.moe_layers()), model.config.n_routed_experts)
        return cls(
            prefill=Program.of(model, functools.partial(prefill, chunk=prefill_chunk), static=(3,)),
            decode=Program.of(
                model, functools.partial(decode, vocab_size=vocab_size), static=(4, 5)
            ),
            signature=ModelSignature.of(model),
            cache_spec=model.cache_spec(mtp=True),
            max_len=max_len,
            prefill_chunk=prefill_chunk,
            routing_counts=np.zeros(counts_shape, np.int64) if count_routing else None,
        )

    @property
    def spans_processes(self) -> bool:
        """Whether the model's mesh contains devices of several processes."""
        mesh = None if self.signature.layout is None else self.signature.layout.mesh
        return isinstance(mesh, jax.sharding.Mesh) and mesh.is_multi_process

    def use(self, model: DeepSeekV3) -> None:
        """Replaces the model's arrays, from the next dispatch on. Nothing is compiled. The previous
        arrays are freed when no other reference to them exists.

        Raises:
          ValueError: the model differs in its config, layout, ``attn_impl``, dtype or modules, or
            its arrays differ in number, shape, dtype or sharding.
        """
        self.signature.check(model)
        leaves = jax.tree.leaves(nnx.state(model))
        for program in (self.prefill, self.decode):
            program.leaves[:] = leaves

    def empty_state(
        self, batch_size: int, *, depth: int = 0, mtp: bool = False, num_top_logprobs: int = 0
    ) -> DecodeState:
        """Creates a state of sequences without tokens, which all count as running.

        Args:
          depth: maximum number of drafts per step. The cache has room for that many tokens beyond
            ``max_len``.
          mtp: whether the model's MTP layer drafts, which needs a cache of its own.
          num_top_logprobs: number of most probable tokens to record at each position.
        """
        signature = self.signature
        spec = self.cache_spec if mtp else dataclasses.replace(self.cache_spec, mtp=())
        cache = LatentKVCache.init(spec, batch_size, self.max_len + depth, layout=signature.layout)
        if self.routing_counts is not None:
            cache = cache.counting_routing(*self.routing_counts.shape)
        return DecodeState.empty(
            cache,
            self.max_len,
            depth=depth,
            num_mtp_inputs=depth + 1 if mtp else 0,
            hidden_size=signature.config.hidden_size,
            dtype=signature.dtype,
            num_top_logprobs=num_top_logprobs,
        )

    def state_shapes(
        self, batch_size: int, **options: Any
    ) -> tuple[list[jax.ShapeDtypeStruct], Any]:
        """Returns shape, dtype and sharding of each array of :meth:`empty_state`, and the state's
        tree structure, without allocating memory. :meth:`Program.lower` takes both."""
        return state_shapes(lambda: self.empty_state(batch_size, **options), self.signature.layout)

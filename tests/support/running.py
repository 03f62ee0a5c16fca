"""Compiled calls of a model. Models of one config share a compiled program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx

from dsv3_jax.config import MTPHidden
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.layers.paged_cache import Form
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.model_io import Aux
from dsv3_jax.offline.generator import Generator


def forward(
    model: DeepSeekV3, tokens: npt.ArrayLike, mtp_hidden: MTPHidden = "post_norm"
) -> tuple[jax.Array, Aux]:
    """Returns `model(tokens, return_aux=True)`, compiled."""
    graph, state = nnx.split(model)
    return _forward(graph, state, jnp.asarray(tokens), mtp_hidden)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _forward(
    graph: nnx.GraphDef, state: nnx.State, tokens: jax.Array, mtp_hidden: MTPHidden
) -> tuple[jax.Array, Aux]:
    return nnx.merge(graph, state)(tokens, return_aux=True, mtp_hidden=mtp_hidden)


def extend(
    model: DeepSeekV3,
    tokens: npt.ArrayLike,
    counts: npt.ArrayLike,
    cache: LatentKVCache,
    form: Form,
) -> tuple[jax.Array, LatentKVCache]:
    """Returns `model.extend`, compiled, with logits instead of hidden states."""
    graph, state = nnx.split(model)
    return _extend(graph, state, jnp.asarray(tokens), jnp.asarray(counts, jnp.int32), cache, form)


@functools.partial(jax.jit, static_argnums=(0, 5))
def _extend(
    graph: nnx.GraphDef,
    state: nnx.State,
    tokens: jax.Array,
    counts: jax.Array,
    cache: LatentKVCache,
    form: Form,
) -> tuple[jax.Array, LatentKVCache]:
    model = nnx.merge(graph, state)
    hidden, cache = model.extend(tokens, counts, cache, form)
    return model.logits(hidden.post_norm), cache


def cached_latents(cache: LatentKVCache, layer: int, sequence: int) -> npt.NDArray[np.float32]:
    """Returns the cached latents [length, C+R] of one sequence."""
    pages = np.asarray(cache.pool.layers[layer]["latent"])[np.asarray(cache.block_tables)[sequence]]
    return pages.reshape(-1, pages.shape[-1])[: int(cache.lengths[sequence])]


def optimized(generator: Generator) -> Generator:
    """Enables LLVM's optimizations for the Generator's programs and returns it.

    The suite disables them (tests/conftest.py). Tests that run a program for a minute are faster
    with them.
    """
    programs_of = generator._programs_of

    def optimized_programs(*args):
        programs = programs_of(*args)
        options = {"xla_backend_optimization_level": "2"}
        programs.compile = lambda lowered, shape: lowered.compile(options)
        return programs

    generator._programs_of = optimized_programs
    return generator

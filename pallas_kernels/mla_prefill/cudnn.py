"""mla_prefill and its gradient by cuDNN's fused attention, on NVIDIA GPUs.

``jax.nn.dot_product_attention`` calls the same kernels, but refuses values narrower than the keys,
and has no gradient for a result that another kernel has computed. So this module binds the
primitives below it. They are private to JAX; where they are missing, cuDNN is refused.

cuDNN adds the gradients of queries in any order, so that equal calls may differ in the last bits.
XLA's flag ``--xla_gpu_deterministic_ops=true`` selects its deterministic kernels.
"""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import target

try:
    from jax._src.cudnn import fused_attention_stablehlo as _fused

    _forward_p: Any = _fused._dot_product_attention_fwd_p_wrapper
    _backward_p: Any = _fused._dot_product_attention_bwd_p_wrapper
    # jax 0.12 has a further parameter.
    _NO_SCORE_MOD: dict[str, Any] = (
        {"score_mod": None}
        if "score_mod" in inspect.signature(_fused.dot_product_attention).parameters
        else {}
    )
except (ImportError, AttributeError):
    _fused: Any = None

_NARROW_VERSION = 91000  # the first cuDNN that takes values narrower than keys


def mla_prefill(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H V"], Float32[Array, "B T H"]]:
    """Implements :func:`pallas_kernels.mla_prefill`, without its gradient."""
    _require(q, k, v, starts)
    k, v = _without_padding(k, lengths), _without_padding(v, lengths)
    out, lse = _forward_p.bind(*_operands(q, k, v, lengths), **_options(scale, lengths),
                               is_training=True)  # fmt: skip
    lse = lse.swapaxes(1, 2)
    if lengths is not None:
        is_empty = (lengths <= 0)[:, None, None]
        out, lse = jnp.where(is_empty[..., None], 0, out), jnp.where(is_empty, -jnp.inf, lse)
    return out, lse


def gradients(
    q: Float[Array, "B T H K"],
    k: Float[Array, "B S H K"],
    v: Float[Array, "B S H V"],
    starts: Int[Array, " B"] | None,
    lengths: Int[Array, " B"] | None,
    out: Float[Array, "B T H V"],
    lse: Float32[Array, "B T H"],
    d_out: Float[Array, "B T H V"],
    d_lse: Float32[Array, "B T H"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T H K"], Float[Array, "B S H K"], Float[Array, "B S H V"]]:
    """Returns the gradients of q, k and v, as :func:`blocked.gradients`."""
    _require(q, k, v, starts)
    if d_lse is not None:
        raise NotImplementedError("has no gradient of the log-sum-exp")
    k, v = _without_padding(k, lengths), _without_padding(v, lengths)
    if lengths is not None:
        is_empty = (lengths <= 0)[:, None, None]
        lse, d_out = jnp.where(is_empty, 0, lse), jnp.where(is_empty[..., None], 0, d_out)
    operands = *_operands(q, k, v, lengths), lse.swapaxes(1, 2), out, d_out
    d_q, d_k, d_v = _backward_p.bind(*operands, **_options(scale, lengths))
    if lengths is not None:
        d_q = jnp.where((lengths <= 0)[:, None, None, None], 0, d_q)
    return d_q, _without_padding(d_k, lengths), _without_padding(d_v, lengths)


def _require(q: jax.Array, k: jax.Array, v: jax.Array, starts: jax.Array | None) -> None:
    """Raises NotImplementedError unless cuDNN takes these arguments."""
    if target.platform() != "gpu":
        raise NotImplementedError(f"runs on NVIDIA GPUs, this is {target.platform()}")
    if _fused is None:
        raise NotImplementedError(f"jax {jax.__version__} has no cuDNN attention where expected")
    try:
        version = _fused.check_cudnn_version()
    except RuntimeError as error:
        raise NotImplementedError("cuDNN is not installed") from error
    generation = target.compute_capability().partition(".")[0]
    if not generation.isdigit() or int(generation) < 8:
        raise NotImplementedError(
            f"runs on NVIDIA GPUs from Ampere on, this is {target.device_kind()}"
        )
    dtypes = {x.dtype.name for x in (q, k, v)}
    if dtypes not in ({"bfloat16"}, {"float16"}):
        raise NotImplementedError(f"takes bfloat16 or float16, got {', '.join(sorted(dtypes))}")
    if starts is not None:
        raise NotImplementedError("takes starts=None only: query t sees the keys up to t")
    if q.shape[:3] != k.shape[:3] or 0 in q.shape:
        raise NotImplementedError(f"takes a key for every query, got {q.shape} and {k.shape}")
    K, V = q.shape[-1], v.shape[-1]
    # cuDNN's documentation, "Attention", has a table of widths by generation.
    is_wide = generation == "10" and (K, V) == (192, 128)
    widest = 256 if generation == "9" else 192 if is_wide else 128
    if K % 8 or V % 8 or not 0 < V <= K <= widest:
        raise NotImplementedError(
            f"takes keys of at most {widest} columns here and values no wider, in multiples of 8,"
            f" got {K} and {V}"
        )
    if K != V and (generation == "8" or version < _NARROW_VERSION):
        raise NotImplementedError(
            "takes values narrower than keys on Hopper and later GPUs, from cuDNN 9.10 on, got"
            f" {K} and {V} on {target.device_kind()} with cuDNN {version}"
        )


def _without_padding(x: jax.Array, lengths: jax.Array | None) -> jax.Array:
    """Zeroes what is past a sequence's length. It may be NaN, and 0 * NaN is NaN."""
    if lengths is None:
        return x
    valid = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(valid[..., None, None], x, 0)


def _operands(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None
) -> tuple[jax.Array, ...]:
    """Returns the operands that both primitives have: q, k, v, bias, lengths of queries and keys,
    their offsets if documents are packed, and page tables of keys and values."""
    unused = jnp.zeros(0, q.dtype)
    if lengths is None:
        return q, k, v, *[unused] * 7
    B, T = q.shape[:2]
    # All queries are valid. Those past a sequence's length see all of its keys.
    queries = jnp.full((B,), T, jnp.int32)
    keys = jnp.clip(lengths, 0, T).astype(jnp.int32)
    return q, k, v, unused, queries, keys, *[unused] * 4


def _options(scale: float, lengths: jax.Array | None) -> dict[str, Any]:
    """Returns the parameters that both primitives have."""
    masks = _fused.MaskType
    return {
        "scale": float(scale),
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # has a bias, and a gradient of it
        "mask_type": masks.CAUSAL if lengths is None else masks.PADDING_CAUSAL,
        "layout": _fused.AttentionLayout.BTNH.value,
        "sliding_window_length": None,
        **_NO_SCORE_MOD,
    }

"""Checks of an engine's model and of settings that contradict each other."""

from __future__ import annotations

import numbers

from dsv3_jax.engine.device.processes import spans_processes
from dsv3_jax.generation.settings import check
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import CacheTiers


def check_model(model: DeepSeekV3, *, is_led: bool = False) -> None:
    """Raises ValueError for a model that the engine cannot run.

    Args:
      is_led: whether one of the processes of its mesh makes the plans.
    """
    if not isinstance(model, DeepSeekV3):
        raise ValueError(f"model: expected a DeepSeekV3, got {type(model).__name__}")
    if model.attn_impl is not None:
        raise ValueError(
            f"model: expected attn_impl None, got {model.attn_impl!r}; the variants are for"
            " comparison in a Generator"
        )
    if spans_processes(model.layout) and not is_led:
        raise ValueError(
            "model: expected a mesh of this process's devices, got one that spans processes; their"
            " schedulers would make different plans, unless process= is a Leader or a Follower"
        )


def check_deterministic(model: DeepSeekV3, *, is_depth_adaptive: bool) -> None:
    """Raises ValueError for what does not give the same bits in any company, as far as we know."""
    if is_depth_adaptive:
        raise ValueError(
            "draft_depth: expected a number with deterministic=True, got 'auto'; the depth depends"
            " on when results are read, and rounding on the depth"
        )
    if model.layout is not None:
        raise ValueError(
            "deterministic: expected a model on one device, got one with a layout; the exchange"
            " of tokens between devices has not been proved to keep every bit"
        )


def check_tiers(tiers: CacheTiers | None, *, deterministic: bool, prefix_cache: bool) -> None:
    """Raises ValueError for settings that contradict tiers."""
    if tiers is None:
        return
    if deterministic:
        raise ValueError(
            "tiers: expected None with deterministic=True; a page of another engine may be rounded"
            " otherwise"
        )
    if not prefix_cache:
        raise ValueError("tiers: expected None with prefix_cache=False; pages are loaded into it")


def check_swap_tokens(swap_tokens: int | None, *, deterministic: bool) -> None:
    """Raises ValueError for a size of host memory that is out of range or would not be used."""
    if swap_tokens is None:
        return
    check("swap_tokens", swap_tokens, "an integer of at least 0", numbers.Integral, 0)
    if not deterministic:
        raise ValueError(
            f"swap_tokens: expected None without deterministic=True, got {swap_tokens};"
            " other engines prefill preempted requests again"
        )

"""An engine's settings, checked, and what follows from them and its model."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.processes import Follower, Leader, check_settings, spans_processes
from dsv3_jax.engine.scheduling.step_plan import SchedulerConfig
from dsv3_jax.generation.drafters import Drafter, DraftPlan
from dsv3_jax.generation.settings import check
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.pages import CacheTiers
from dsv3_jax.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """Arguments of :class:`dsv3_jax.Engine`, and what follows from them."""

    max_len: int
    max_running: int
    cache_tokens: int | None
    page_size: int
    prefix_cache: bool
    max_waiting: int
    deterministic: bool
    swap_tokens: int | None
    tiers: CacheTiers | None
    count_routing: bool
    process: Leader | Follower | None

    plan: DraftPlan
    """The drafter and its depths."""
    buckets: Buckets
    shards: int
    """Number of shards of the batch."""
    vocab_size: int
    """Ids from here on are padding of the embedding and never generated."""

    @classmethod
    def read(
        cls,
        model: DeepSeekV3,
        tokenizer: Tokenizer | None,
        *,
        draft: str | Drafter | None,
        draft_depth: int | str,
        buckets: Buckets | None,
        **settings: Any,
    ) -> EngineSettings:
        """Checks the arguments of an engine.

        Args:
          settings: the fields that are arguments, by name.

        Raises:
          ValueError: one of them is out of range, or two contradict each other or the model.
        """
        process, deterministic = settings["process"], settings["deterministic"]
        tiers, max_running = settings["tiers"], settings["max_running"]
        _check_model(model, is_led=process is not None)
        if process is not None:
            count_routing = settings["count_routing"]
            check_settings(tiers=tiers, deterministic=deterministic, count_routing=count_routing)
        longest = model.config.max_position_embeddings
        expected = f"2 to {longest} (max_position_embeddings)"
        check("max_len", settings["max_len"], expected, numbers.Integral, 2, longest)
        check("max_running", max_running, "an integer of at least 1", numbers.Integral, 1)
        check("page_size", settings["page_size"], "1 or more", numbers.Integral, 1)
        plan = DraftPlan.read(draft, draft_depth, model.config)
        if deterministic:
            _check_deterministic(model, is_depth_adaptive=len(plan.depths) > 1)
        layout = model.layout
        shards = 1 if layout is None else layout.num_shards("batch")
        if max_running % shards:
            raise ValueError(
                f"max_running: expected a multiple of {shards}, the shards of the batch, got"
                f" {max_running}"
            )
        buckets = buckets or Buckets.of_devices(max_running, layout)
        buckets.check(max_running // shards, 1 if layout is None else layout.micro_batches)
        if deterministic:
            buckets = buckets.single()
        _check_swap_tokens(settings["swap_tokens"], deterministic=deterministic)
        prefix_cache = settings["prefix_cache"]
        _check_tiers(tiers, deterministic=deterministic, prefix_cache=prefix_cache)
        vocab_size = model.config.vocab_size
        if tokenizer is not None:
            vocab_size = min(vocab_size, tokenizer.vocab_size)
        return cls(**settings, plan=plan, buckets=buckets, shards=shards, vocab_size=vocab_size)

    @property
    def mtp(self) -> bool:
        """Whether the MTP layer drafts, so that it has a cache."""
        return self.plan.drafter is not None and self.plan.drafter.mtp_hidden is not None

    @property
    def scheduler(self) -> SchedulerConfig:
        """The scheduler's part."""
        return SchedulerConfig(
            max_running=self.max_running // self.shards,
            chunk_tokens=self.buckets.chunk_tokens,
            max_chunks=self.buckets.chunks[-1],
            multi_step_decodes=self.buckets.most_multi_step_decodes,
            max_waiting=self.max_waiting,
            aligned_prefixes=self.deterministic,
        )


def _check_model(model: DeepSeekV3, *, is_led: bool = False) -> None:
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


def _check_deterministic(model: DeepSeekV3, *, is_depth_adaptive: bool) -> None:
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


def _check_tiers(tiers: CacheTiers | None, *, deterministic: bool, prefix_cache: bool) -> None:
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


def _check_swap_tokens(swap_tokens: int | None, *, deterministic: bool) -> None:
    """Raises ValueError for a size of host memory that is out of range or would not be used."""
    if swap_tokens is None:
        return
    check("swap_tokens", swap_tokens, "an integer of at least 0", numbers.Integral, 0)
    if not deterministic:
        raise ValueError(
            f"swap_tokens: expected None without deterministic=True, got {swap_tokens};"
            " other engines prefill preempted requests again"
        )

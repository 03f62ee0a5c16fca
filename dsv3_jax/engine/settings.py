"""An engine's settings, checked, and what follows from them and its model."""

from __future__ import annotations

import dataclasses
import numbers

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
    """Checked settings of an engine: those that follow from its arguments and its model."""

    draft_plan: DraftPlan
    """The drafter and its depths."""
    buckets: Buckets
    scheduler: SchedulerConfig
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
        max_len: int,
        max_running: int,
        page_size: int,
        prefix_cache: bool,
        max_waiting: int,
        deterministic: bool,
        swap_tokens: int | None,
        tiers: CacheTiers | None,
        count_routing: bool,
        process: Leader | Follower | None,
    ) -> EngineSettings:
        """Checks the arguments of an engine. Raises ValueError if one of them is out of range, or
        two contradict each other or the model."""
        _check_model(model, is_led=process is not None)
        if process is not None:
            check_settings(tiers=tiers, deterministic=deterministic, count_routing=count_routing)
        longest = model.config.max_position_embeddings
        expected = f"2 to {longest} (max_position_embeddings)"
        check("max_len", max_len, expected, numbers.Integral, 2, longest)
        check("max_running", max_running, "an integer of at least 1", numbers.Integral, 1)
        check("page_size", page_size, "1 or more", numbers.Integral, 1)
        draft_plan = DraftPlan.read(draft, draft_depth, model.config)
        if deterministic:
            _check_deterministic(model, is_depth_adaptive=len(draft_plan.depths) > 1)
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
        if swap_tokens is not None:
            expected = "an integer of at least 0"
            check("swap_tokens", swap_tokens, expected, numbers.Integral, 0)
            if not deterministic:
                raise ValueError(
                    f"swap_tokens: expected None without deterministic=True, got {swap_tokens};"
                    " other engines prefill preempted requests again"
                )
        if tiers is not None and deterministic:
            raise ValueError(
                "tiers: expected None with deterministic=True; a page of another engine may be"
                " rounded otherwise"
            )
        if tiers is not None and not prefix_cache:
            raise ValueError(
                "tiers: expected None with prefix_cache=False; pages are loaded into it"
            )
        vocab_size = model.config.vocab_size
        if tokenizer is not None:
            vocab_size = min(vocab_size, tokenizer.vocab_size)
        scheduler = SchedulerConfig(
            max_running=max_running // shards,
            chunk_tokens=buckets.chunk_tokens,
            max_chunks=buckets.chunks[-1],
            multi_step_decodes=buckets.most_multi_step_decodes,
            max_waiting=max_waiting,
            aligned_prefixes=deterministic,
        )
        return cls(draft_plan, buckets, scheduler, vocab_size)


def _check_model(model: DeepSeekV3, *, is_led: bool) -> None:
    """Raises ValueError for a model that the engine cannot run. ``is_led``: one process plans."""
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

"""The requests of one call of a Generator, on their way through the engine's loop."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Sequence
from typing import get_args

import numpy as np
from jaxtyping import Int64

from dsv3_jax.engine.device.executor import Executor
from dsv3_jax.engine.device.page_pool import PoolLayout
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.step_input import StepOptions, StepShape
from dsv3_jax.engine.loop import EngineLoop
from dsv3_jax.engine.requests.delivery import output_of
from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest, SchedulerConfig
from dsv3_jax.generation.completion import Completion, Generation, Speculation, Stats
from dsv3_jax.generation.drafters import DraftPlan
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.sampling import SamplingMode
from dsv3_jax.generation.text import Decoder
from dsv3_jax.offline.pace import REFILL_STEPS, OfflinePace
from dsv3_jax.words import counted


class Call:
    """Runs requests in the caller's thread, as many at a time as the programs have slots.

    A request that ends makes room for the next one. The cache has all pages that the slots can
    need, so that no request waits for pages or is preempted, and no prefix is shared.

    Where the programs' sizes are separate, each step runs one of two programs, and the tokens of a
    request do not depend on the others. Otherwise a step both prefills and decodes in the smallest
    program that holds it, and the next one is launched before its results are read.

    Args:
      programs: they have the sizes for a number of slots.
      pace: chooses the steps of each dispatch.
      routing_counts: the tokens that chose each expert are added to it after every dispatch.
      all_modes: whether to compile the programs for requests of every :data:`SamplingMode`.
    """

    def __init__(
        self,
        programs: Programs,
        tokenizer: Decoder | None,
        requests: Sequence[Request],
        plan: DraftPlan,
        pace: OfflinePace,
        routing_counts: Int64[np.ndarray, "L_moe E"] | None = None,
        *,
        all_modes: bool = False,
    ):
        self.pace = pace
        self._routing_counts = routing_counts
        scheduled = [_scheduled(i, request, tokenizer, plan) for i, request in enumerate(requests)]
        self.outputs = [output_of(request) for request in scheduled]
        """The results of the requests so far, in their order."""
        # Every slot has the pages of the longest request.
        one_page = PoolLayout.of(programs.layout, 1, programs.page_size)
        pages = programs.slots_per_shard * programs.max_pages // one_page.token_parts
        pool = dataclasses.replace(one_page, pages_per_device=pages)
        buckets = programs.buckets
        overlap = self._overlap = not buckets.separate
        scheduler = Scheduler(
            SchedulerConfig(
                max_running=programs.slots_per_shard,
                chunk_tokens=buckets.chunk_tokens,
                max_chunks=buckets.chunks[-1],
                multi_step_decodes=buckets.most_multi_step_decodes if overlap else None,
                max_waiting=len(requests),
                separate=buckets.separate,
                refill_steps=1 if overlap else REFILL_STEPS,
            ),
            pool.allocators(lookahead=0, prefix_cache=False),
        )
        prefill, *decodes = _options(programs, requests, all_modes=all_modes)
        state = programs.empty_state(pool.num_pages)
        programs.warm_up(state, _shapes(programs, prefill, decodes, plan))
        self._executor = Executor(
            programs,
            state,
            pool,
            options_of=lambda step: prefill if step.chunks else decodes[0],
            background=overlap,
        )
        self._loop = EngineLoop(scheduler, self._executor, overlap=overlap, pace=pace)
        self._loop.add(*scheduled)

    def step(self) -> bool:
        """Runs one dispatch, and reads its results or those of the one before. Returns False if all
        requests have ended."""
        has_run = self._loop.step()
        assert has_run or all(output.handle.is_done for output in self.outputs), "one was forgotten"
        # Reading the counts waits for the device.
        if not (self._overlap and has_run):
            self._take_routing_counts()
        return has_run

    def decode_each(self, depths: list[int]) -> list[int]:
        """Decodes with each of these depths in turn. Returns those for which the requests were too
        short."""
        for number, depth in enumerate(depths):
            self.pace.depth, steps = depth, self.pace.steps
            while self.pace.steps == steps:
                if not self.step():
                    return depths[max(1, number) :]
        return []

    def close(self) -> None:
        """Frees the memory on the device. Results on the host stay."""
        if self._overlap and self._loop.failure is None:
            self._take_routing_counts()
        self._loop.shutdown(drain=False)

    def _take_routing_counts(self) -> None:
        if self._routing_counts is not None:
            self._routing_counts += np.asarray(self._executor.take_routing_counts().result())

    @property
    def new_tokens(self) -> int:
        """Number of tokens generated so far, for all requests together."""
        return sum(output.num_tokens for output in self.outputs)

    @property
    def non_finite(self) -> list[int]:
        """Numbers of the requests that ended because their logits were not finite."""
        return [
            number
            for number, output in enumerate(self.outputs)
            if isinstance(output.handle.error, NonFiniteLogitsError)
        ]

    def raise_errors(self) -> None:
        """Raises the error of a request other than that of logits that are not finite."""
        for output in self.outputs:
            error = output.handle.error
            if error is not None and not isinstance(error, NonFiniteLogitsError):
                raise error.__cause__ or error

    def completions(self) -> list[Completion]:
        """Returns the completion of each request, as far as it has been generated."""
        return [_completion(output) for output in self.outputs]


def _scheduled(
    number: int, request: Request, tokenizer: Decoder | None, plan: DraftPlan
) -> ScheduledRequest:
    drafter = plan.drafter
    return ScheduledRequest(
        tokens=list(request.prompt),
        max_length=len(request.prompt) + request.max_new_tokens,
        drafts=plan.max_depth,
        arrival=float(number),
        settings=request,
        output=RequestOutput(
            EngineRequest(lambda _: None),  # nobody but the call itself has the handle
            request,
            tokenizer,
            draft=None if drafter is None else drafter.name,
            depth=plan.max_depth,
        ),
    )


def _options(
    programs: Programs, requests: Sequence[Request], *, all_modes: bool
) -> list[StepOptions]:
    """Returns the options of steps that prefill, then those of steps that only decode, of requests
    of ``all_modes`` if so."""
    options = StepOptions.of(requests)
    if not programs.buckets.separate:
        return [options, options]
    # One program prefills for greedy and sampled requests. On a GPU its branch takes as long as
    # many kernels, which counts if each step has a branch or, with drafts, several.
    any_mode = dataclasses.replace(options, sampling=None)
    if programs.platform != "gpu":
        return [any_mode, any_mode]
    others = [mode for mode in get_args(SamplingMode) if mode != options.sampling]
    decodes = [dataclasses.replace(options, sampling=mode) for mode in others if all_modes]
    return [any_mode, options, *decodes]


def _shapes(
    programs: Programs, prefill: StepOptions, decodes: Sequence[StepOptions], plan: DraftPlan
) -> list[StepShape]:
    """Returns the shapes of the programs that a call runs: prefill, and decode for each depth, or
    all sizes of steps that do both."""
    buckets = programs.buckets
    if buckets.separate:
        pairs = itertools.product(plan.depths, decodes)
        shapes = (programs.shape(1, 0, options, depth=d) for d, options in pairs)
        return [programs.shape(0, 1, prefill), *shapes]
    pairs_of_sizes = itertools.product(buckets.decodes, (0, *buckets.chunks), plan.depths)
    return list(dict.fromkeys(programs.shape(B, C, prefill, depth=d) for B, C, d in pairs_of_sizes))


def _completion(output: RequestOutput) -> Completion:
    error = output.handle.error
    if isinstance(error, NonFiniteLogitsError):
        return error.generation[0]
    if output.handle.is_done and error is None:
        return output.handle.result()
    return output.completion("interrupted")


class Tally:
    """Statistics of a call so far, which began at this ``time.perf_counter()``, with ``n`` requests
    per prompt."""

    def __init__(self, call: Call, began: float, n: int = 1):
        self._call = call
        self._began = began
        self._n = n
        self._first_at: float | None = None  # when the first tokens were read
        self._first_tokens = 0
        self._last_at = began

    def update(self) -> None:
        """Takes the time after a dispatch."""
        self._last_at = time.perf_counter()
        if self._first_at is None and (tokens := self._call.new_tokens):
            self._first_at, self._first_tokens = self._last_at, tokens

    def generation(self) -> Generation:
        """Returns a completion for every request. Requests that have not started have no tokens."""
        completions = self._call.completions()
        new_tokens = sum(len(c.tokens) for c in completions)
        first_at = self._first_at or self._began
        later_tokens, later_seconds = new_tokens - self._first_tokens, self._last_at - first_at
        return Generation(
            completions,
            Stats(
                steps=self._call.pace.steps,
                new_tokens=new_tokens,
                time_to_first_token=first_at - self._began,
                seconds=time.perf_counter() - self._began,
                tokens_per_second=later_tokens / later_seconds if later_tokens > 0 else 0.0,
                speculation=Speculation.total([c.speculation for c in completions]),
            ),
        )

    def raise_non_finite(self) -> None:
        """Raises NonFiniteLogitsError if a request ended because its logits were not finite."""
        if not (numbers := self._call.non_finite):
            return
        generation = self.generation()
        completion = generation[numbers[0]]
        others = f" (and {counted(len(numbers) - 1, 'other sequence')})" if numbers[1:] else ""
        raise NonFiniteLogitsError(
            f"prompt {numbers[0] // self._n}{others}: expected finite logits for position "
            f"{completion.prompt_tokens + len(completion.tokens)} ({completion.prompt_tokens} "
            f"prompt and {len(completion.tokens)} generated tokens before it), got NaN or an "
            "infinity; a weight is not finite, or activations overflow",
            generation,
        )

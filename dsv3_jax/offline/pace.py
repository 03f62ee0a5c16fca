"""The sizes of a Generator's programs, and the steps and drafts of their dispatches."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence

from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.scheduling.step_plan import RequestResult, StepPlan
from dsv3_jax.engine.scheduling.step_sizes import StepTimes
from dsv3_jax.generation.depth import AUTO_SECONDS, AUTO_STEPS, DepthChooser
from sharding import Layout

DISPATCH_SECONDS = 0.5
"""Target duration of a dispatch. A dispatch cannot be interrupted, and a stop string ends a
sequence only after it. The host needs about a millisecond between two dispatches."""

MAX_STEPS = 256
"""Most decode steps in a dispatch. Results of a dispatch have room for as many."""

REFILL_STEPS = 8
"""While prompts wait: decode steps during which the slot of a finished request may stay empty. Each
dispatch takes the host a few milliseconds, and a step with few prompts is mostly padding."""


def buckets_of(
    size: int, layout: Layout | None, prefill_chunk: int | None, *, reproducible: bool
) -> Buckets:
    """Returns the sizes of the programs for a batch size of a Generator with these settings. If it
    is reproducible, one program prefills and one decodes, so that a request's tokens do not depend
    on other requests."""
    # Without a size for the last request of a batch, which would be compiled meanwhile.
    default = Buckets.of_devices(size, layout, one_request=False)
    if not reproducible:
        return default
    local_batch = size if layout is None else size // layout.num_shards("batch")
    if prefill_chunk is not None:
        return chunked_buckets(default, local_batch, prefill_chunk)
    multiple = 1 if layout is None else layout.micro_batches
    # A prefill takes about 512 tokens per request of a batch of up to four, and no more in larger
    # batches. Where chunks have no more than 32 tokens, it takes a chunk per request of a batch of
    # up to eight: these are the chunks of CPUs, on which padding costs more.
    tokens = default.chunk_tokens
    chunks = min(local_batch, 8) if tokens <= 32 else min(local_batch, 4) * -(-512 // tokens)
    return _separate(default, local_batch, -(-chunks // multiple) * multiple)


def chunked_buckets(default: Buckets, local_batch: int, prefill_chunk: int) -> Buckets:
    """Returns sizes for prefills of up to ``prefill_chunk`` tokens of every request at once, in
    expanded form."""
    chunked = dataclasses.replace(default, chunk_tokens=prefill_chunk, chunk_form="expanded")
    return _separate(chunked, local_batch, local_batch)


def _separate(default: Buckets, local_batch: int, chunks: int) -> Buckets:
    return dataclasses.replace(
        default,
        decodes=(local_batch,),
        chunks=(chunks,),
        max_steps=MAX_STEPS,
        multi_step_decodes=None,
        separate=True,
    )


class OfflinePace:
    """Lets a dispatch take about DISPATCH_SECONDS, or fewer steps if the text is needed sooner or
    the depth is chosen anew for each dispatch.

    Args:
      chooser: chooses the drafts of each dispatch, from the results of earlier ones.
      times: measured durations of the programs.
      program: identifies the decode program, together with the depth.
      tokens: most tokens per request in a dispatch; None for no limit.
      max_over_processes: returns the maximum of a number over all processes of the mesh, so that
        they make the same choices.
      overlap: whether a dispatch is launched before the results of the one before are read.
      counts_drafts: whether drafts are counted. Those of made-up prompts are not: they show what
        drafts cost, but not how often they are accepted.
      clock: the one with which results are read.
    """

    def __init__(
        self,
        chooser: DepthChooser,
        times: StepTimes,
        program: Hashable,
        *,
        tokens: int | None,
        max_over_processes: Callable[[float], float],
        overlap: bool = False,
        counts_drafts: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._chooser = chooser
        self._times = times
        self._program = program
        self._tokens = tokens
        self._max_over_processes = max_over_processes
        self._overlap = overlap
        self._counts_drafts = counts_drafts
        self._clock = clock
        self._began = clock() if overlap else 0.0
        self.depth: int | None = None
        """Drafts of the next dispatch; None leaves them to the chooser."""
        self.steps = 0
        """Number of decode steps so far."""

    def choose(self, most: int) -> tuple[int, int]:
        """Returns the number of decode steps, from 1 to ``most``, and the drafts in each."""
        depth = self._chooser.choose() if self.depth is None else self.depth
        program = self._program, depth
        if self._tokens is not None:
            steps = max(1, self._tokens // (depth + 1))
        elif self._chooser.is_fixed:
            steps = self._steps_in(DISPATCH_SECONDS, program, default=1)
        else:
            steps, short = (
                self._steps_in(seconds, program, default=AUTO_STEPS)
                for seconds in (DISPATCH_SECONDS, AUTO_SECONDS)
            )
            steps = min(steps, max(short, AUTO_STEPS))
        if not self._overlap:
            self._began = self._clock()
        return min(steps, most), depth

    def _steps_in(self, seconds: float, program: Hashable, *, default: int) -> int:
        """Returns the number of steps, at least 1, that take about so many seconds; ``default`` if
        the program has not been measured."""
        each = self._times.per_step(program)
        return default if each is None else int(max(seconds / max(each, 1e-9), 1))

    def read(self, plan: StepPlan, results: Sequence[RequestResult], now: float) -> None:
        """Takes the results of a dispatch, and the time at which they were read."""
        began = self._began
        if self._overlap:  # the device begins a dispatch when it has ended the one before
            self._began = now
        if plan.chunks:
            self.steps += bool(plan.decodes)
            return
        assert plan.depth is not None, "choose() returns it"
        program = self._program, plan.depth
        seconds = self._max_over_processes(now - began)
        # A first run of a program also loads it. It is no measurement.
        is_measured = self._times.has_run(program)
        decoded = [step for result in results for step in result.steps]
        steps = max((len(result.steps) for result in results), default=0)
        self.steps += steps
        self._times.record(program, steps, seconds)
        positions = range(self._chooser.depths[-1])
        weight = 1 if self._counts_drafts else 0
        self._chooser.observe(
            plan.depth,
            [weight * sum(step.drafted > i for step in decoded) for i in positions],
            [weight * sum(len(step.tokens) > i + 1 for step in decoded) for i in positions],
            steps,
            seconds if is_measured else None,
        )

"""Runs step plans on the device: arguments in, tokens out, with steps in flight between them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dsv3_jax.engine.device.page_packing import RequestCopier, SwappedRequest
from dsv3_jax.engine.device.page_pool import PoolLayout
from dsv3_jax.engine.device.page_transfer import PageTransfer
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import REWIND_SEED, SlotState
from dsv3_jax.engine.device.step import PromptLogprobs, StepOutput
from dsv3_jax.engine.device.step_input import StepInput, StepOptions, StepShape, empty_input
from dsv3_jax.engine.scheduling.step_plan import (
    Chunk,
    PageSave,
    RequestResult,
    ScheduledRequest,
    ShardPlan,
    StepPlan,
    StepTokens,
)
from dsv3_jax.engine.stats import DispatchTimes
from dsv3_jax.generation.completion import NON_FINITE, RUNNING
from dsv3_jax.generation.errors import EngineError
from dsv3_jax.generation.request import Request

_T = TypeVar("_T")

_CLOSE_SECONDS = 30.0
"""Longest time that pages are written to the tiers when the engine ends."""


class _Dispatched(NamedTuple):
    """A step whose results have not been read."""

    plan: StepPlan
    shape: StepShape
    swapped_out: list[SwappedRequest]
    """Copies of the requests that it preempts."""
    output: Future[StepOutput]


class Executor:
    """Dispatches plans and reads their results in the same order.

    Args:
      copier: copies preempted requests, if the scheduler has a swap space.
      transfer: copies pages from and to the tiers, if the scheduler has a store.
      background: whether a thread launches the programs, see :class:`Launcher`.
      options_of: returns the options that serve the requests of a plan; None for those that the
        requests ask for.
    """

    def __init__(
        self,
        programs: Programs,
        state: SlotState,
        pool: PoolLayout,
        *,
        copier: RequestCopier | None = None,
        transfer: PageTransfer | None = None,
        background: bool = False,
        options_of: Callable[[StepPlan], StepOptions] | None = None,
    ):
        self.programs = programs
        self._options_of = options_of or _asked_options
        self.times = DispatchTimes()
        self._launcher = Launcher(state, background=background)
        self._pool = pool
        self._in_flight: deque[_Dispatched] = deque()
        self._copier = copier
        self._transfer = transfer
        self._saving: Future[None] | None = None
        self._replayed: Future[StepOutput] | None = None

    @property
    def dispatches_in_flight(self) -> int:
        """Number of dispatches whose results have not been read."""
        return len(self._in_flight)

    @property
    def seconds_left(self) -> float:
        """Predicted time until the dispatch in flight ends; 0 if there is none, or no forecast."""
        if not self._in_flight:
            return 0.0
        newest = self._in_flight[-1]
        return self.times.seconds_left(newest.shape.name, newest.plan.decode_steps)

    @property
    def max_decode_steps(self) -> int:
        """Most decode steps in a dispatch."""
        return self.programs.buckets.max_steps

    @property
    def compiled_after_warm_up(self) -> int:
        """Number of programs that were compiled while requests were waiting for them."""
        return self.programs.compiled_after_warm_up

    def warm_up(self, directory: str | os.PathLike[str] | None = None) -> None:
        """Compiles or loads the programs of the default options, see :meth:`Programs.warm_up`."""
        self.programs.warm_up(self._launcher.state, directory=directory)

    def dispatch(self, plan: StepPlan) -> None:
        """Launches a plan, or hands it to the thread that does. It reads nothing from the device
        and transfers one array to it. :meth:`wait` raises an error of the launch."""
        shape = self.programs.shape(
            max(len(shard.decodes) for shard in plan.shards),
            max(len(shard.chunks) for shard in plan.shards),
            self._options_of(plan),
            depth=plan.depth,
        )
        buffer, inputs = empty_input(shape, self.programs.slots_per_shard)
        for number, (shard, arguments) in enumerate(zip(plan.shards, inputs, strict=True)):
            self._fill(arguments, number, shard, plan.decode_steps)
            self._fill_adjustments(arguments, shard, shape)
        for swap in plan.swap_outs:
            swap.request.swapped = SwappedRequest()
        swapped_out, swapped_in = (
            [swap.request.swapped for swap in swaps] for swaps in (plan.swap_outs, plan.swap_ins)
        )
        for swap in plan.swap_ins:
            swap.request.swapped = None

        def launch(state: SlotState) -> tuple[SlotState, StepOutput]:
            began = self.times.begin_launch()
            if self._copier is not None:
                for out, copy in zip(plan.swap_outs, swapped_out, strict=True):
                    self._copier.swap_out(state, out.slot, out.pages, copy)
                for back, copy in zip(plan.swap_ins, swapped_in, strict=True):
                    pages = [None if i < back.shared else page for i, page in enumerate(back.pages)]
                    state = self._copier.swap_in(state, back.slot, pages, copy)
            if self._transfer is not None:
                if plan.saves:
                    self._transfer.save(state.pool, plan.saves)
                if plan.loads:
                    pool = self._transfer.write(state.pool, plan.loads)
                    state = dataclasses.replace(state, pool=pool)
            state, output = self.programs(state, buffer, shape)
            for array in jax.tree.leaves(output):
                array.copy_to_host_async()
            self.times.end_launch(began)
            return state, output

        output = self._launcher.launch(launch)
        self._in_flight.append(_Dispatched(plan, shape, swapped_out, output))

    def replay(self, buffer: np.ndarray, shape: StepShape) -> None:
        """Launches a step that the leader of a mesh of processes has planned. Its results are not
        read here, but an error is raised by the next call."""
        if self._replayed is not None and self._replayed.done():
            self._replayed.result()
        self._replayed = self._launcher.launch(lambda state: self.programs(state, buffer, shape))

    def save(self, saves: Sequence[PageSave]) -> Future[None]:
        """Launches copies of pages to the tiers without a step."""

        def launch(state: SlotState) -> tuple[SlotState, None]:
            assert self._transfer is not None
            return state, self._transfer.save(state.pool, saves)

        self._saving = self._launcher.launch(launch)
        return self._saving

    def wait(self) -> tuple[StepPlan, list[RequestResult]]:
        """Waits for the oldest dispatch. Returns its plan, and a result for each request of it."""
        plan, shape, swapped_out, future = self._in_flight.popleft()
        is_late = future.done() and all(x.is_ready() for x in jax.tree.leaves(future.result()))
        output: StepOutput = jax.device_get(future.result())
        self.times.finished(shape.name, plan.decode_steps, is_late=is_late)
        read = StepResults(output)
        results = []
        # First tokens come first: somebody waits for each, while later ones only follow others.
        for number, shard in enumerate(plan.shards):
            first = number * shape.rows + shape.decodes
            for i, chunk in enumerate(shard.chunks):
                prompt = None
                if shape.options.prompt_logprobs and _has_prompt_logprobs(chunk):
                    prompt = read.prompt(number * shape.chunks + i, chunk)
                if chunk.is_last:
                    result = self._result(read, first + i, chunk.request, is_decode=False)
                    results.append(result._replace(prompt=prompt))
                    continue
                is_finite = read.finished[first + i] != NON_FINITE
                end = chunk.start + chunk.count if is_finite else 0
                results.append(RequestResult(chunk.request, [], RUNNING, False, prompt, end))
        for number, shard in enumerate(plan.shards):
            for row, request in enumerate(shard.decodes, number * shape.rows):
                results.append(self._result(read, row, request, is_decode=True))
        for swapped in swapped_out:
            swapped.free_device()
        return plan, results

    def _result(
        self, read: StepResults, row: int, request: ScheduledRequest, *, is_decode: bool
    ) -> RequestResult:
        new_tokens = read.new_tokens(row, top=_settings(request).logprobs > 0)
        return RequestResult(request, new_tokens, read.finished[row], is_decode)

    def take_routing_counts(self) -> Future[jax.Array]:
        """Returns the number of tokens that chose each expert, [L_moe, E], since the last call."""

        def take(state: SlotState) -> tuple[SlotState, jax.Array]:
            counts = state.routing_counts
            assert isinstance(counts, jax.Array), "routing is not counted"
            # The next step donates its argument, so that the counts need an array of their own.
            taken = jnp.copy(counts)
            zeros = jax.device_put(jnp.zeros_like(counts), counts.sharding)
            return dataclasses.replace(state, routing_counts=zeros), taken

        return self._launcher.launch(take)

    def close(self) -> None:
        """Ends the thread that launches programs, and frees the engine's memory on the device.
        Nothing can be dispatched after it. Pages that were to be saved are written first."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving], _CLOSE_SECONDS)
        self._launcher.close()
        if self._transfer is not None:
            self._transfer.close(_CLOSE_SECONDS)
        self._in_flight.clear()

    def _fill(self, inputs: StepInput, number: int, plan: ShardPlan, decode_steps: int) -> None:
        """Writes the plan of a shard into its arguments of a step."""
        arrays: Any = inputs  # NumPy's, on the host
        arrays.steps[0] = decode_steps
        for tables, requests in (
            (arrays.decode_tables, plan.decodes),
            (arrays.chunk_tables, [chunk.request for chunk in plan.chunks]),
        ):
            self._pool.fill_tables(tables, number, [request.pages for request in requests])
        arrays.decode_slots[: len(plan.slots)] = plan.slots
        arrays.max_drafts[: len(plan.drafts)] = plan.drafts
        for i, chunk in enumerate(plan.chunks):
            arrays.chunk_slots[i] = chunk.slot
            arrays.starts[i] = chunk.start
            arrays.counts[i] = chunk.count
            arrays.is_last[i] = chunk.is_last
            if not chunk.is_first:
                continue
            request, settings = chunk.request, _settings(chunk.request)
            arrays.admitted_slots[i] = chunk.slot
            arrays.prompts[i, : len(request.tokens)] = request.tokens
            arrays.lengths[i] = len(request.tokens)
            arrays.limits[i] = request.max_length
            for name in ("temperature", "top_k", "top_p", "min_p"):
                getattr(arrays, name)[i] = getattr(settings, name)
            arrays.seed[i] = (settings.seed + request.rewinds * REWIND_SEED) % 2**32
            arrays.stop_tokens[i, : len(settings.stop_tokens)] = settings.stop_tokens

    def _fill_adjustments(self, inputs: StepInput, plan: ShardPlan, shape: StepShape) -> None:
        """Writes what changes the logits of each request."""
        if not (shape.options.penalties or shape.options.masks):
            return
        arrays: Any = inputs
        rows = [*enumerate(plan.decodes)]
        rows += [(shape.decodes + i, chunk.request) for i, chunk in enumerate(plan.chunks)]
        penalties = inputs.penalties
        for row, request in rows:
            settings = _settings(request)
            if penalties is not None and settings.has_penalties:
                penalties.put(row, settings)
            if settings.allowed is not None:
                arrays.allowed[row] = settings.allowed.words
                arrays.masks_next_only[row] = request.is_serial
        if shape.options.masks:
            arrays.rewinds[: len(plan.rewinds)] = plan.rewinds


def _settings(request: ScheduledRequest) -> Request:
    assert request.settings is not None, "the request has no settings"
    return request.settings


def _asked_options(plan: StepPlan) -> StepOptions:
    prompt_logprobs = any(map(_has_prompt_logprobs, plan.chunks))
    return StepOptions.of(map(_settings, plan.requests), prompt_logprobs=prompt_logprobs)


def _has_prompt_logprobs(chunk: Chunk) -> bool:
    return _settings(chunk.request).prompt_logprobs is not None


class StepResults:
    """The output of a dispatch, on the host.

    Arrays become lists once, since reading a number from an array costs ten times as much.
    """

    def __init__(self, output: StepOutput):
        arrays: Any = output  # NumPy's
        # The arrays have room for the most steps of a dispatch. The executed ones come first.
        executed = np.flatnonzero(arrays.counts.any(axis=1)).max(initial=-1) + 1
        self._counts: list[list[int]] = arrays.counts[:executed].tolist()
        self._tokens: list[list[list[int]]] = arrays.tokens[:executed].tolist()
        self._logprobs: list[list[list[float]]] = arrays.logprobs[:executed].tolist()
        self._drafted: list[list[int]] = arrays.drafted[:executed].tolist()
        self.finished: list[int] = arrays.finished.tolist()
        """RUNNING, STOPPED, FULL or NON_FINITE for each row."""
        self._top = arrays.top_tokens, arrays.top_logprobs
        self._prompt = arrays.prompt

    def new_tokens(self, row: int, *, top: bool) -> list[StepTokens]:
        """Returns the tokens of each step that gave some to a row, and if ``top`` the best ones."""
        return [
            StepTokens(
                self._tokens[step][row][:count],
                self._logprobs[step][row][:count],
                self._drafted[step][row],
                (self._top[0][step, row, :count], self._top[1][step, row, :count]) if top else None,
            )
            for step, counts in enumerate(self._counts)
            if (count := counts[row])
        ]

    def prompt(self, number: int, chunk: Chunk) -> tuple[int, PromptLogprobs]:
        """Returns :attr:`RequestResult.prompt` for the chunk with this number in the step."""
        arrays = [array[number, : chunk.count] for array in self._prompt]
        return chunk.start + 1, PromptLogprobs(*arrays)


class Launcher:
    """Owns the state, and applies functions to it one after the other in the order of their launch.

    A launch can block: XLA's GPU runtime waits for the device where a program has a loop whose
    length is known on the device alone, and a long queue of kernels blocks as well. In a thread it
    does not keep the engine from planning the next step and processing earlier results. Without
    ``background`` each function has run when :meth:`launch` returns.

    Functions may donate the state, so nobody else keeps it.
    """

    def __init__(self, state: SlotState, *, background: bool):
        self.state = state
        """The newest state. A launch under way may delete its arrays; their shapes stay."""
        self._error: BaseException | None = None
        self._is_closed = False
        self._closing = threading.Lock()
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any]] | None]
        self._queue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if background:
            # A daemon, unlike the threads of a pool: while the interpreter waits for threads that
            # read results, the engine goes on. The engine's own thread ends this one.
            self._thread = threading.Thread(target=self._work, name="dsv3-launcher", daemon=True)
            self._thread.start()

    def launch(self, function: Callable[[SlotState], tuple[SlotState, _T]]) -> Future[_T]:
        """Applies a function that takes the state, and returns the next state and a result, which
        the future has. After an error the state may be lost, so all later launches fail."""
        future: Future[_T] = Future()
        with self._closing:  # a launch behind the end of the queue would wait for ever
            if self._is_closed:
                raise _closed()
            if self._thread is not None:
                self._queue.put((future, function))
                return future
        self._run(future, function)
        return future

    def close(self) -> None:
        """Ends the thread after the launch under way, and frees the state. Later launches fail."""
        with self._closing:
            self._is_closed = True
            self._queue.put(None)
        if self._thread is not None:
            self._thread.join()
        for array in jax.tree.leaves(self.state):
            if isinstance(array, jax.Array):
                array.delete()

    def _work(self) -> None:
        """The body of the thread."""
        while (launch := self._queue.get()) is not None:
            with contextlib.suppress(BaseException):  # the future has it, and later ones wait
                self._run(*launch)
            del launch  # or its plan's requests would live until the next one

    def _run(
        self, future: Future[_T], function: Callable[[SlotState], tuple[SlotState, _T]]
    ) -> None:
        if self._is_closed:
            # Not cancelled: `concurrent.futures.wait` would not see that.
            future.set_exception(_closed())
            return
        try:
            if self._error is not None:
                raise EngineError("launch: an earlier one failed") from self._error
            self.state, result = function(self.state)
        except BaseException as error:
            self._error = self._error or error
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)


def _closed() -> EngineError:
    return EngineError("launch: expected one before the shutdown")

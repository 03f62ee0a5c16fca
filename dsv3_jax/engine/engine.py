"""The serving engine: requests join and leave a running batch.

:class:`Engine` reads settings and owns the parts. ``scheduling/`` plans steps and knows no arrays,
``device/`` runs them, ``requests/`` has what was asked and its text, and ``loop.py`` connects them.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from dsv3_jax import compile_cache
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.executor import Executor
from dsv3_jax.engine.device.model_arrays import ModelSignature
from dsv3_jax.engine.device.page_packing import PagePacker, RequestCopier
from dsv3_jax.engine.device.page_pool import PoolLayout
from dsv3_jax.engine.device.page_transfer import PageTransfer
from dsv3_jax.engine.device.processes import Follower, Leader, check_settings
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.loop import EngineLoop
from dsv3_jax.engine.requests.delivery import output_of
from dsv3_jax.engine.requests.grammar import Grammar
from dsv3_jax.engine.requests.intake import Intake, SubmitOptions
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.scheduler import Scheduler
from dsv3_jax.engine.scheduling.step_sizes import LatencyTargets, SlaController
from dsv3_jax.engine.scheduling.stored_pages import SwapSpace
from dsv3_jax.engine.settings import EngineSettings
from dsv3_jax.engine.stats import EngineStats
from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.errors import EngineError
from dsv3_jax.generation.request import Prompt, Request
from dsv3_jax.generation.text import ReasoningMarkers
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.other_names import hints
from dsv3_jax.pages import CacheTiers, PageFormat
from dsv3_jax.tokenizer import Tokenizer


class Engine:
    """Serves requests with continuous batching, chunked prefill and a prefix cache.

    Args:
      model: the model. Its arrays stay with the caller.
      tokenizer: its tokenizer, or None for requests of token ids.
      max_len: most tokens of a request, prompt and completion together.
      max_running: number of slots: most requests that run at a time. Where the layout shards the
        batch, each shard has an equal part of the slots and of the cache.
      cache_tokens: size of the cache in tokens. None takes what fits on the devices.
      page_size: tokens of a cache page. Prefixes are shared by whole pages. The Hopper kernels take
        64 alone.
      prefix_cache: whether prompts reuse cache pages of earlier requests.
      draft: who drafts tokens for the model to verify, as in :meth:`Generator.generate`. A request
        can do without.
      draft_depth: drafts per step, or ``"auto"``: each request then drafts up to four, as many as
        its own acceptance is worth.
      background: whether a thread of the engine's own runs the steps. Otherwise call :meth:`step`.
        With it, Python switches between threads every 0.5 ms (:func:`sys.setswitchinterval`), from
        then on.
      overlap: whether a step is dispatched before the results of the step before it are read.
      buckets: sizes that programs are compiled for, on each shard.
      max_waiting: most requests in the waiting queue.
      deterministic: whether a request's tokens and log-probabilities are the same to the last bit,
        whatever else runs. Every step then runs one program, padded to all slots.
      tiers: host memory, a disk and other sources of cache pages that are no longer on the device.
        Engines with the same weights can share a disk.
      swap_tokens: size of the host memory for preempted requests in deterministic mode, in tokens.
        None takes the size of the cache. It is allocated as it is used.
      count_routing: count the tokens that choose each expert, for :meth:`take_routing_counts`.
      process: the part of this process on a mesh of several processes: a Leader, or a Follower,
        whose engine gets no requests, see :mod:`dsv3_jax.engine.device.processes`.
      targets: latencies to keep. The engine then runs fewer requests, and prefills less in a step,
        than it could, see :class:`dsv3_jax.engine.scheduling.step_sizes.SlaController`.

    Raises:
      ValueError: a setting is out of range, or the model does not fit.
      OSError: the directory of the tier on disk cannot be used.
    """

    @hints
    def __init__(
        self,
        model: DeepSeekV3,
        tokenizer: Tokenizer | None,
        max_len: int = 4096,
        *,
        max_running: int = 64,
        cache_tokens: int | None = None,
        page_size: int = DEFAULT_PAGE_SIZE,
        prefix_cache: bool = True,
        draft: str | Drafter | None = None,
        draft_depth: int | str = 1,
        background: bool = True,
        overlap: bool = True,
        buckets: Buckets | None = None,
        max_waiting: int = 4096,
        deterministic: bool = False,
        swap_tokens: int | None = None,
        tiers: CacheTiers | None = None,
        count_routing: bool = False,
        targets: LatencyTargets | None = None,
        process: Leader | Follower | None = None,
    ):
        self._process = process
        self._counts_routing = count_routing
        settings = EngineSettings.read(
            model,
            tokenizer,
            draft=draft,
            draft_depth=draft_depth,
            buckets=buckets,
            max_len=max_len,
            max_running=max_running,
            page_size=page_size,
            prefix_cache=prefix_cache,
            max_waiting=max_waiting,
            deterministic=deterministic,
            swap_tokens=swap_tokens,
            tiers=tiers,
            count_routing=count_routing,
            process=process,
        )
        compile_cache.enable()
        self.vocab_size = model.config.vocab_size
        """Number of tokens in the mask of a grammar: the rows of the model's embedding."""
        self._signature = ModelSignature.of(model)
        self._programs = programs = Programs(
            model,
            settings.buckets,
            settings.draft_plan,
            num_slots=max_running,
            max_len=max_len,
            page_size=page_size,
            vocab_size=settings.vocab_size,
            count_routing=count_routing,
        )
        mtp = settings.draft_plan.mtp
        most_tokens = max_running * programs.max_pages * page_size
        pool = PoolLayout.fitting(model, cache_tokens, most_tokens, page_size, mtp=mtp)
        state = programs.new_state(pool.num_pages)
        self.compilations = programs.compilations
        """The compilations that steps wait for."""
        if isinstance(process, Leader):
            programs.on_launch = process.send
            process.compilations = self.compilations
        transfer = copier = swaps = None
        if tiers is not None:
            transfer = PageTransfer.of(model, state.pool, pool, tiers, mtp=mtp)
        if deterministic:
            format = PageFormat.of(model.cache_spec(mtp=mtp), page_size)
            copier = RequestCopier(state, PagePacker(state.pool, format, None))
            swaps = [SwapSpace(pool.num_pages if swap_tokens is None else swap_tokens // page_size)]
        self._transfer = transfer
        scheduler = Scheduler(
            settings.scheduler,
            pool.allocators(lookahead=int(mtp), prefix_cache=prefix_cache),
            swaps,
            store=transfer,
            load_seconds=math.inf if tiers is None else tiers.load_seconds,
            load_bytes=math.inf if tiers is None else tiers.most_load_bytes,
        )
        in_thread = background and overlap  # without overlap, every launch is waited for at once
        self._executor = Executor(
            programs, state, pool, copier=copier, transfer=transfer, background=in_thread
        )
        self._loop = EngineLoop(
            scheduler,
            self._executor,
            overlap=overlap,
            controller=targets and SlaController(targets, scheduler.config.limits),
            compilations=self.compilations,
        )
        if transfer is not None:
            transfer.on_load = self._loop.notify
        self._intake = Intake(model.config, tokenizer, settings, max_len, self._loop.cancel)
        self.end_tokens = self._intake.end_tokens
        """End-of-sequence tokens of the model and of the tokenizer."""
        self.first_seed = self._intake.first_seed
        """Seed of the engine's first completion that was submitted without one. It is random, and
        in the log: with it, a run can be repeated by giving each completion its seed."""
        if background:
            self._loop.start()
            # An engine that nobody refers to finishes its requests, and then frees its memory.
            # A finalizer must not wait for a lock, so that a thread closes the loop.
            closer = threading.Thread(target=self._loop.close, name="dsv3-close", daemon=True)
            weakref.finalize(self, closer.start).atexit = False

    def submit(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        timeout: float | None = None,
        draft: bool = True,
        grammar: Grammar | None = None,
        **settings: Any,
    ) -> EngineRequest:
        """Puts a request into the waiting queue and returns at once. Can be called from any thread.

        Args:
          prompt: text, or token ids.
          priority: less is more urgent. Each step of it delays the request as if it had arrived
            ten seconds later.
          timeout: seconds after which the request ends with the finish reason ``timeout``.
          draft: whether the engine's drafter drafts for this request.
          grammar: decides which tokens may come next, and serves this request alone. The request
            then waits for the host after every step. It decodes without drafts if it samples with
            ``top_k``, ``top_p`` or ``min_p``, or if drafts are synthetic.
          settings: settings of :meth:`Generator.generate` for one prompt, except ``n``. Without a
            ``seed``, the i-th such request gets :attr:`first_seed` plus i. ``prompt_logprobs``,
            from 0 to 20, adds the log-probability of every prompt token to the completion, and that
            many of the most probable tokens in its place; such a prompt uses no prefix hits.

        Raises:
          ValueError: the prompt is empty or too long, or a setting is out of range.
          QueueFullError: too many requests are waiting.
          EngineError: the engine failed or was shut down.
        """
        requests = self._intake.read(prompt, settings)
        if len(requests) != 1:
            raise ValueError(
                f"prompt: expected one completion of one prompt, got {len(requests)}; submit_all "
                "takes several"
            )
        grammars = [] if grammar is None else [grammar]
        return self._submit(requests, grammars, SubmitOptions(priority, timeout, draft))[0]

    def submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        priority: int = 0,
        timeout: float | None = None,
        draft: bool = True,
        grammars: Sequence[Grammar] = (),
        n: int = 1,
        skip_special_tokens: bool = True,
        reasoning: ReasoningMarkers | None = None,
        **settings: Any,
    ) -> list[EngineRequest]:
        """Puts requests for ``n`` completions of each prompt into the waiting queue: all, or none
        if it raises. Full cache pages of a prompt are computed once for all its completions.

        Args:
          prompts: one or several, as for :meth:`Generator.generate`. So are ``settings``, which may
            differ between prompts.
          grammars: one for each completion, or none.
          n: completions of each prompt. Those of the first prompt come first.
          skip_special_tokens: leave special tokens out of the text. Parsers of tool calls need
            them; stop strings do not match inside them.
          reasoning: markers of the reasoning with which the texts may begin. No stop string counts
            in it. None: stop strings count from the beginning.

        The other arguments and the errors are those of :meth:`submit`.
        """
        requests = self._intake.read(prompts, {"n": n, **settings})
        options = SubmitOptions(priority, timeout, draft, skip_special_tokens, reasoning)
        return self._submit(requests, grammars, options)

    def _submit(
        self, requests: Sequence[Request], grammars: Sequence[Grammar], options: SubmitOptions
    ) -> list[EngineRequest]:
        if isinstance(self._process, Follower):
            raise EngineError("request: expected the leader's engine, got a follower's")
        scheduled = self._intake.scheduled(requests, grammars, options)
        self._loop.add(*scheduled)
        return [output_of(request).handle for request in scheduled]

    def cancel(self, handle: EngineRequest) -> None:
        """Ends a request within one step. Does nothing if it is at its end."""
        handle.cancel()

    def warm_up(self, directory: str | os.PathLike[str] | None = None) -> float:
        """Compiles the programs of the default options. Returns the seconds it took.

        These are all sizes of steps, greedy or sampled. A step whose requests ask for
        ``logprobs`` of other tokens, penalties, ``logit_bias``, ``min_tokens``, allowed or banned
        tokens, a grammar or ``prompt_logprobs`` has another program, which is compiled when it is
        first needed, while all requests wait. In deterministic mode one program has all options but
        the last.

        Args:
          directory: stores the compiled programs. A later engine with the same model, settings,
            devices and versions loads them instead of compiling; any difference is reported as a
            warning, and the program is compiled again. Loading runs code, so nobody else may be
            able to write to the directory.
        """
        began = time.perf_counter()
        self._executor.warm_up(directory)
        return time.perf_counter() - began

    def follow(self) -> None:
        """Launches the leader's steps until the leader ends, see
        :class:`~dsv3_jax.engine.device.processes.Follower`. Call it after :meth:`warm_up`."""
        assert isinstance(self._process, Follower), "expected an engine with process=Follower(...)"
        self._process.run(self._executor.replay, self.compilations)

    def step(self) -> bool:
        """Runs one turn of the loop: plans and dispatches a step, and reads earlier results.

        Returns False if there was nothing to do. Call it only if the engine has no thread.
        """
        return self._loop.step()

    def stats(self) -> EngineStats:
        """Returns figures of the engine as it is now."""
        stats, transfer = self._loop.stats(), self._transfer
        if transfer is None:
            return stats
        figures = {"tiers": transfer.stats(), "unsaved_pages": transfer.dropped_pages}
        return dataclasses.replace(stats, **figures)

    @property
    def failure(self) -> EngineError | None:
        """The error after which the engine serves no more requests, or None."""
        return self._loop.failure

    @property
    def step_seconds(self) -> float:
        """Seconds since the step under way began, without those of compilations that it waited for;
        0 if there is none."""
        return self._loop.step_seconds

    def fail_if_stuck(self, seconds: float) -> None:
        """Gives up a step that has lasted longer than ``seconds``, without compilations, or a
        compilation that has lasted longer than half an hour: all requests end with an EngineError,
        and so do later ones.

        The engine's thread stays inside the step, so that :meth:`shutdown` may never return. The
        process can only end with :func:`os._exit`.
        """
        self._loop.fail_if_stuck(seconds)

    def use(self, model: DeepSeekV3, *, keep_prefix_cache: bool = False) -> None:
        """Replaces the model by another one with the same config, options and array shapes: new
        weights, or another placement of experts. Nothing is compiled, and no request ends.

        Running requests keep the cache entries that they have, and compute all further ones with
        the new model. Later requests reuse none of these entries. The arrays of the previous model
        are freed when the caller has no reference to them.

        Args:
          keep_prefix_cache: let later requests reuse these entries, because the model computes the
            same as the one before, as it does with its experts in other slots.

        Raises:
          ValueError: the model differs in its config, layout, ``attn_impl``, dtype or quantization,
            or its arrays differ in number, shape, dtype or sharding.
          EngineError: the engine failed or was shut down.
        """
        check_settings(use=None if self._process is None else "another model")
        self._signature.check(model)
        arrays = self._programs.arrays_of(model)  # steps go on meanwhile
        transfer = None if keep_prefix_cache else self._transfer
        identity = transfer and transfer.identity_of(model)

        def change() -> None:
            self._programs.leaves = arrays
            if transfer and identity:
                transfer.identity = identity

        self._loop.between_steps(change, clears_prefix_cache=not keep_prefix_cache)

    def take_routing_counts(self) -> np.ndarray:
        """Returns how many tokens chose each expert, int64 [L_moe, E], since the last call.

        The layers are those of :meth:`DeepSeekV3.moe_layers`; those of MTP layers are 0 unless the
        MTP layer drafts.

        Raises:
          ValueError: the engine does not count.
          EngineError: the engine failed or was shut down.
        """
        if not self._counts_routing:
            raise ValueError("take_routing_counts: expected an engine with count_routing=True")
        counts = self._loop.between_steps(self._executor.take_routing_counts)
        # Steps go on meanwhile, and can be given up if the device is stuck.
        return np.asarray(counts.result(), np.int64)

    def clear_prefix_cache(self, *, tiers: bool = True) -> None:
        """Makes later requests compute their whole prompts again.

        Args:
          tiers: whether they also load no page that was stored in the tiers before. Otherwise only
            the device loses its pages.
        """
        if tiers and self._transfer is not None:
            self._loop.clear_prefix_cache(self._transfer.forget)
        else:
            self._loop.clear_prefix_cache()

    def flush_tiers(self, timeout: float | None = None) -> bool:
        """Waits until the pages of requests that have ended are in the tiers, on the disk too.
        Returns False after ``timeout`` seconds, or when the step under way ends if that is later.

        Raises:
          EngineError: the engine failed or was shut down.
        """
        if self._transfer is None:
            return True
        end = None if timeout is None else time.monotonic() + timeout
        launched = self._loop.save_pages()
        if not concurrent.futures.wait([launched], timeout).done:
            return False
        launched.result()
        return self._transfer.flush(None if end is None else max(end - time.monotonic(), 0.0))

    @property
    def page_transfer(self) -> PageTransfer:
        """The stored pages, for other engines with the same identity. Needs tiers."""
        if self._transfer is None:
            raise ValueError("tiers: expected an engine that has some, got one without")
        return self._transfer

    def check_integrity(self) -> None:
        """Raises AssertionError if pages, slots or queues contradict each other."""
        self._loop.check_integrity()

    def shutdown(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Stops taking requests, and ends.

        Args:
          drain: whether running and waiting requests are finished first; otherwise they are
            cancelled. If a step waits for a program to be compiled, which cannot be interrupted,
            the engine then ends after that, in the background; the end of Python waits for it.
          timeout: seconds to wait for them. Those that are left are cancelled.
        """
        self._loop.shutdown(drain=drain, timeout=timeout, abandons_compilations=not drain)
        if isinstance(self._process, Leader):
            self._process.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> Literal[False]:
        self.shutdown(drain=kind is None)
        return False

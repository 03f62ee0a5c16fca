"""The Generator: completes prompts with a few compiled programs."""

from __future__ import annotations

import contextlib
import inspect
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dsv3_jax import compile_cache, words
from dsv3_jax.engine.device.model_arrays import ModelArrays, ModelSignature
from dsv3_jax.engine.device.processes import spans_processes
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.step_input import StepOptions
from dsv3_jax.engine.scheduling.step_sizes import StepTimes
from dsv3_jax.generation.completion import Generation, Piece
from dsv3_jax.generation.depth import DepthChooser
from dsv3_jax.generation.drafters import Drafter, DraftPlan
from dsv3_jax.generation.errors import Interrupted
from dsv3_jax.generation.request import Prompt, Request, RequestReader
from dsv3_jax.generation.settings import DEFAULT_NEW_TOKENS, check
from dsv3_jax.interrupts import DeferredInterrupt
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.call import Call, Tally
from dsv3_jax.offline.pace import OfflinePace, buckets_of
from dsv3_jax.other_names import check_arguments, hints
from dsv3_jax.tokenizer import Tokenizer
from sharding.distributed import max_over_processes

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Generator:
    """Generates text with a model, many tokens per dispatch.

    It runs the programs of an :class:`~dsv3_jax.engine.Engine` in the caller's thread. All shapes
    are static. A call takes the next of ``batch_sizes`` that holds its requests, or the largest,
    whose requests then make room for the others as they end. For each batch size that is used, one
    program that prefills and one that decodes are compiled; two others when ``logprobs``, penalties
    (or biases, or ``min_tokens``), or allowed (or banned) tokens are first asked for; and the same
    for each drafter and depth. On GPUs, another program decodes when a call first has a request
    with a temperature, and when one of these has a filter. After that nothing compiles again, for
    any prompts and settings.

    The tokens of a request depend only on the request: its randomness comes from its own seed, and
    sequences of a batch do not influence each other. Programs of different batch sizes may round
    differently. A single entry in ``batch_sizes`` avoids that too. On GPUs, the last digit of a
    log-probability can depend on whether another request of the call has a temperature or a filter.

    Args:
      model: its arrays are not modified. :meth:`use` replaces the model.
      tokenizer: None if prompts are token ids; completions then have no text.
      max_len: maximum number of tokens of a sequence, prompt and completion together. It determines
        the size of the cache.
      batch_sizes: numbers of requests at a time to compile for. Of more prompts than the largest,
        each starts when another has ended. If a mesh shards the batch, sizes are rounded up to
        multiples of its number of shards.
      prefill_chunk: number of prompt tokens of every request in one forward pass. By default a
        pass has chunks of some of them, see :mod:`dsv3_jax.offline.call`.
      reproducible: whether a request's tokens never depend on the other requests, as above. False
        is meant for the throughput of many prompts, and takes the sizes of an Engine's programs. A
        step then prefills some requests while others decode, few requests run in small programs,
        and the host works during a step. Programs round differently, so that another token may
        follow where two are almost equally probable.
      stride: number of tokens between two checks of the text, for stop strings and streaming.
      count_routing: count the tokens that choose each expert, for :meth:`take_routing_counts`.

    Raises:
      ValueError: ``max_len`` exceeds the model's ``max_position_embeddings``, or another argument
        is invalid.
    """

    @hints
    def __init__(
        self,
        model: DeepSeekV3,
        tokenizer: Tokenizer | None,
        max_len: int = 4096,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        prefill_chunk: int | None = None,
        reproducible: bool = True,
        stride: int = 16,
        count_routing: bool = False,
    ):
        if not isinstance(model, DeepSeekV3):
            raise ValueError(f"model: expected a DeepSeekV3, got {type(model).__name__}")
        required = ("encode", "decode", "vocab_size", "eos_token_id", "special_token_id")
        if tokenizer is not None and not all(hasattr(tokenizer, name) for name in required):
            got = type(tokenizer).__name__
            raise ValueError(f"tokenizer: expected a dsv3_jax.Tokenizer or None, got {got}")
        longest = model.config.max_position_embeddings
        expected = f"2 to {longest} (max_position_embeddings)"
        integer = numbers.Integral
        check("max_len", max_len, expected, integer, 2, longest)
        if not isinstance(batch_sizes, Sequence):
            raise ValueError(
                f"batch_sizes: expected a sequence of sizes, such as (1, 4), got {batch_sizes!r}"
            )
        if not batch_sizes:
            raise ValueError("batch_sizes: expected sizes of at least 1, got none")
        for size in batch_sizes:
            check("batch_sizes", size, "sizes of at least 1", integer, 1)
        check("stride", stride, "an integer of at least 1", integer, 1)
        if prefill_chunk is not None:
            check("prefill_chunk", prefill_chunk, "an integer of at least 1", integer, 1)
            if not reproducible:
                raise ValueError(
                    f"prefill_chunk: expected None with reproducible=False, got {prefill_chunk}"
                )
        compile_cache.enable()
        self.tokenizer = tokenizer
        self.max_len = max_len
        layers = words.counted(len(model.layers), "layer")
        self._model_description = f"{model.config.model_type} model of {layers} in {model.dtype}"
        # If a mesh shards the batch, all shards must be equal.
        shards = 1 if model.layout is None else model.layout.batch_multiple
        self.batch_sizes = tuple(sorted({-(-size // shards) * shards for size in batch_sizes}))
        self.stride = stride
        self._prefill_chunk = prefill_chunk
        self._reproducible = reproducible
        self._reader = RequestReader(model.config, tokenizer, max_len)
        self._vocab_size = model.config.vocab_size
        if tokenizer is not None:
            self._vocab_size = min(self._vocab_size, tokenizer.vocab_size)
        self._signature = ModelSignature.of(model)
        self._spans_processes = spans_processes(model.layout)
        if self._spans_processes and not reproducible:
            raise ValueError(
                "reproducible: expected True on a mesh of several processes, got False"
            )
        self._arrays = ModelArrays.of(model)
        self._programs: dict[tuple[int, Drafter | None, int], Programs] = {}
        self._step_times = StepTimes()
        self._choosers: dict[tuple[DraftPlan, int], DepthChooser] = {}
        self._routing_counts: np.ndarray | None = None
        if count_routing:
            shape = len(model.moe_layers()), model.config.n_routed_experts
            self._routing_counts = np.zeros(shape, np.int64)

    def __repr__(self) -> str:
        sizes = ", ".join(map(str, self.batch_sizes))
        return (
            f"Generator({self._model_description}, {self.tokenizer!r}, max_len={self.max_len},"
            f" batch_sizes=({sizes}))"
        )

    @hints
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int | None] | None = DEFAULT_NEW_TOKENS,
        temperature: float | Sequence[float] = 0.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] | None = None,
        n: int = 1,
        stop: str | Sequence[str | Sequence[str]] = (),
        stop_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
        ignore_eos: bool | Sequence[bool] = False,
        logprobs: int | Sequence[int] = 0,
        presence_penalty: float | Sequence[float] = 0.0,
        frequency_penalty: float | Sequence[float] = 0.0,
        repetition_penalty: float | Sequence[float] = 1.0,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
        min_tokens: int | Sequence[int] = 0,
        allowed_tokens: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
        banned_tokens: Sequence[int] | Sequence[Sequence[int]] = (),
        draft: str | Drafter | None = None,
        draft_depth: int | Literal["auto"] = 1,
        progress: Callable[[int], object] | None = None,
    ) -> Generation:
        """Completes every prompt.

        Each setting except ``n``, ``draft``, ``draft_depth`` and ``progress`` is one value for all
        prompts, or a sequence with one value per prompt.

        Args:
          prompts: text or token ids; one prompt, or several of different lengths. Text is encoded
            with the special tokens that its tokenizer adds.
          max_new_tokens: maximum length of a completion. The default of 64 is reduced if less room
            is left in ``max_len``; for another number that is an error. None means all the room.
          temperature: 0 is greedy. Otherwise ``top_k``, ``top_p`` and ``min_p`` apply, in this
            order.
          seed: equal seeds give equal tokens for equal prompts, alone or in any batch. None gives
            the i-th completion of the call the seed i, so that equal prompts differ.
          n: number of completions per prompt. Those of the first prompt come first. The j-th one
            has the prompt's seed plus j, modulo 2**32.
          stop: strings that end a request when they appear. The text is cut before them. A sequence
            of sequences has different ones for each prompt.
          stop_tokens: token ids that end a request, in addition to the model's end-of-sequence
            tokens. A sequence of sequences has different ones for each prompt.
          ignore_eos: continue after the model's end-of-sequence tokens.
          logprobs: number of most probable tokens to report at each position, at most 20. The
            logprob of the generated token itself is always reported. Both are the model's own,
            before all settings below.
          presence_penalty: subtracted from the logit of each token that the completion contains;
            from -2 to 2.
          frequency_penalty: subtracted once for every time that the completion contains it; from
            -2 to 2.
          repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that
            the prompt or the completion contains; 1 changes nothing.
          logit_bias: numbers from -100 to 100 that are added to the logits of up to 300 tokens.
          min_tokens: number of tokens before which a completion does not end with an
            end-of-sequence or stop token, nor with a stop string that begins before.
          allowed_tokens: the only token ids that may be generated. End-of-sequence tokens are no
            exception. None allows all.
          banned_tokens: token ids that are never generated, even if they are allowed.
          draft: proposes tokens. The model checks several of them in one step. None (no
            speculation), ``"mtp"`` (the model's own MTP layer), ``"ngram"`` (prompt look-up), or a
            Drafter. Greedy tokens stay the same. Sampled tokens keep their distribution, but a seed
            gives other tokens than without drafts. ``"synthetic:RATE"`` accepts drafts at that
            rate regardless of the model, to measure speed; its text is not the model's.
          draft_depth: maximum number of drafts per step, 1 to 4. ``"auto"`` chooses it from the
            acceptance and the cost measured so far, and may choose 0. The tokens of a seed then
            also depend on these measurements.
          progress: called after each dispatch, about twice a second, or after each step without
            ``reproducible``, with the number of tokens generated so far for all prompts together.

        Raises:
          ValueError: a prompt is empty, too long or contains an id out of range, or a setting is
            invalid.
          Interrupted: Ctrl-C was pressed, at most about half a second earlier. The exception, a
            KeyboardInterrupt, contains the completions so far.
          NonFiniteLogitsError: the model computed NaN or an infinity, which ends the whole call.
            The exception, a ValueError, contains the completions so far.
        """
        began = time.perf_counter()
        requests = self.requests(
            prompts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            n=n,
            stop=stop,
            stop_tokens=stop_tokens,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            repetition_penalty=repetition_penalty,
            logit_bias=logit_bias,
            min_tokens=min_tokens,
            allowed_tokens=allowed_tokens,
            banned_tokens=banned_tokens,
            draft=draft,
            draft_depth=draft_depth,
            progress=progress,
        )
        plan = self._plan({"draft": draft, "draft_depth": draft_depth})
        with DeferredInterrupt() as interrupts, self._call(requests, plan) as call:
            tally = Tally(call, began, n)
            try:
                while call.step():
                    tally.update()
                    if progress is not None:
                        progress(call.new_tokens)
                    call.raise_errors()
                    tally.raise_non_finite()
                    # An interrupt stops all processes of a mesh. Otherwise some would wait forever.
                    in_any_process = (
                        self._spans_processes and max_over_processes(interrupts.is_made) > 0
                    )
                    interrupts.deliver(in_other_process=in_any_process)
            except KeyboardInterrupt:
                raise Interrupted(tally.generation()) from None
            return tally.generation()

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
        """Completes one prompt piece by piece, ``stride`` tokens at a time.

        Accepts the settings of :meth:`generate` except ``progress``, with an ``n`` of 1. A piece
        never ends inside a character or inside the beginning of a stop string. The concatenation of
        all pieces is the text that :meth:`generate` returns. Without a tokenizer, pieces have
        tokens but no text. Settings are checked when this method is called, not when the first
        piece is read.
        """
        requests = self.requests(prompt, **settings)
        plan = self._plan(settings)
        if (n := settings.get("n", 1)) != 1:
            raise ValueError(f"n: expected 1 in a stream, got {n}")
        if (progress := settings.get("progress")) is not None:
            raise ValueError(
                f"progress: expected None in a stream, whose pieces show it, got {progress!r:.80}"
            )
        if len(requests) != 1:
            raise ValueError(f"stream: expected one prompt, got {len(requests)}")

        def pieces() -> Iterator[Piece]:
            began, position = time.perf_counter(), 0
            with self._call(requests, plan, tokens=self.stride) as call:
                tally, handle = Tally(call, began), call.outputs[0].handle
                while call.step():
                    tally.update()
                    call.raise_errors()
                    fresh = handle.pieces_from(position)
                    yield from fresh
                    position += len(fresh)
                    tally.raise_non_finite()

        return pieces()

    def warm_up(
        self,
        batch_size: int = 1,
        *,
        logprobs: int = 0,
        draft: str | Drafter | None = None,
        draft_depth: int | Literal["auto"] = 1,
    ) -> float:
        """Compiles the programs for ``batch_size`` requests (prompts times ``n``), with any
        temperatures and filters. Returns seconds.

        For the depth ``"auto"`` it also measures the cost of every depth.
        """
        began = time.perf_counter()
        settings = {"logprobs": logprobs, "draft": draft, "draft_depth": draft_depth}
        requests = self.requests(
            [[0]] * batch_size, max_new_tokens=None, ignore_eos=True, **settings
        )
        plan = self._plan(settings)
        # To measure its cost, a depth runs a second time after its compilation.
        left = [d for d in plan.depths for _ in range(1 if len(plan.depths) == 1 else 2)]
        while left:
            with self._call(requests[: self.batch_sizes[-1]], plan, is_warm_up=True) as call:
                left = call.decode_each(left)
        return time.perf_counter() - began

    def use(self, model: DeepSeekV3) -> None:
        """Replaces the model by another one with the same config, options and array shapes.

        An example is a model with another placement of experts
        (:meth:`~dsv3_jax.model.DeepSeekV3.place_experts`). Nothing is compiled. The model may be
        replaced between the pieces of a stream too. The arrays of the previous model are freed when
        the caller has no reference to them.

        Raises:
          ValueError: the model differs in its config, layout, ``attn_impl``, dtype or quantization,
            or its arrays differ in number, shape, dtype or sharding.
        """
        self._signature.check(model)
        self._arrays = ModelArrays.of(model)
        for programs in self._programs.values():
            programs.leaves = self._arrays.leaves

    def take_routing_counts(self) -> np.ndarray:
        """Returns how many tokens chose each expert since the last call, int64 [L_moe, E].

        The MoE layers of the MTP layers come last. :meth:`sharding.Placement.balanced` takes such
        counts as loads.

        Raises:
          ValueError: this Generator was created without ``count_routing``.
        """
        if self._routing_counts is None:
            raise ValueError("count_routing: expected True in the constructor, got False")
        taken = self._routing_counts.copy()
        self._routing_counts[...] = 0
        return taken

    def requests(self, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[Request]:
        """Checks the arguments of a call of :meth:`generate`, and returns its requests.

        Raises:
          ValueError: a prompt or setting is invalid, as in :meth:`generate`.
          TypeError: there is no such setting.
        """
        signature = inspect.signature(self.generate)
        try:
            signature.bind(prompts, **settings)
        except TypeError:
            check_arguments(settings, signature.parameters)
            raise
        self._plan(settings)
        if (progress := settings.get("progress")) is not None and not callable(progress):
            raise ValueError(f"progress: expected a function or None, got {progress!r:.80}")
        call_settings = ("draft", "draft_depth", "progress")
        request_settings = {n: v for n, v in settings.items() if n not in call_settings}
        return self._reader.read(prompts, **request_settings)

    def _plan(self, settings: Mapping[str, Any]) -> DraftPlan:
        draft, depth = settings.get("draft"), settings.get("draft_depth", 1)
        return DraftPlan.read(draft, depth, self._signature.config)

    @contextlib.contextmanager
    def _call(
        self,
        requests: Sequence[Request],
        plan: DraftPlan,
        *,
        tokens: int | None = None,
        is_warm_up: bool = False,
    ) -> Iterator[Call]:
        """Returns a new call, whose memory on the device is freed at the end of the block.

        Args:
          tokens: most tokens per request in a dispatch; None for no limit, except where stop
            strings are to be noticed.
          is_warm_up: the requests are made up. Their drafts and expert choices are not counted.
        """
        size = next((s for s in self.batch_sizes if s >= len(requests)), self.batch_sizes[-1])
        if tokens is None and any(request.stop for request in requests):
            tokens = self.stride
        options = StepOptions.of(requests)
        pace = OfflinePace(
            self._choosers.setdefault((plan, size), DepthChooser(plan.depths)),
            self._step_times,
            (size, plan, options),
            tokens=tokens,
            max_over_processes=max_over_processes if self._spans_processes else float,
            overlap=not self._reproducible,
            counts_drafts=not is_warm_up,
        )
        counts = None if is_warm_up else self._routing_counts
        programs = self._programs_of(size, plan)
        call = Call(programs, self.tokenizer, requests, plan, pace, counts, all_modes=is_warm_up)
        try:
            yield call
        finally:
            call.close()

    def _programs_of(self, size: int, plan: DraftPlan) -> Programs:
        """Returns the programs for a batch size and a drafter. They compile when they are used."""
        key = (size, plan.drafter, plan.max_depth)
        if key not in self._programs:
            layout, chunk = self._signature.layout, self._prefill_chunk
            self._programs[key] = Programs(
                self._arrays.model(self._arrays.leaves),
                buckets_of(size, layout, chunk, reproducible=self._reproducible),
                plan,
                num_slots=size,
                max_len=self.max_len,
                page_size=DEFAULT_PAGE_SIZE,
                vocab_size=self._vocab_size,
                count_routing=self._routing_counts is not None,
                arrays=self._arrays,
            )
        return self._programs[key]

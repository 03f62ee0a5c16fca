"""The Generator: completes prompts with a few compiled programs."""

from __future__ import annotations

import inspect
import itertools
import numbers
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dsv3_jax.generation.batch import Batch
from dsv3_jax.generation.completion import Generation, Piece
from dsv3_jax.generation.depth import DepthChooser
from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.errors import Interrupted
from dsv3_jax.generation.interruption import InterruptsDeferred
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.request import Prompt, Request, RequestReader
from dsv3_jax.generation.settings import DEFAULT_NEW_TOKENS, check
from dsv3_jax.generation.tally import Tally, non_finite_error
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from sharding.distributed import max_over_processes

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Generator:
    """Generates text with a model, many tokens per dispatch.

    All shapes are static. A call pads its batch to the next of ``batch_sizes``. For each batch size
    that is used, one prefill and one decode program are compiled; another decode program when
    ``logprobs``, penalties (or biases, or ``min_tokens``), or allowed (or banned) tokens are first
    asked for; and the same for each drafter and depth. After that nothing compiles again, for any
    prompts and settings.

    The tokens of a request depend only on the request: its randomness comes from its own seed, and
    sequences of a batch do not influence each other. Programs of different batch sizes may round
    differently. A single entry in ``batch_sizes`` avoids that too.

    Args:
      model: its arrays are not modified. :meth:`use` replaces the model.
      tokenizer: None if prompts are token ids; completions then have no text.
      max_len: maximum number of tokens of a sequence, prompt and completion together. It determines
        the size of the cache.
      batch_sizes: batch sizes to compile for. More prompts than the largest run in several batches.
        If a mesh shards the batch, sizes are rounded up to multiples of its number of shards.
      prefill_chunk: number of prompt tokens per sequence in one forward pass. The default is 512;
        on a CPU it is 32, because padding of a chunk costs more there than another pass.
      stride: number of tokens between two checks of the text, for stop strings and streaming.
      count_routing: count the tokens that choose each expert, for :meth:`take_routing_counts`.

    Raises:
      ValueError: ``max_len`` exceeds the model's ``max_position_embeddings``, or another argument
        is invalid.
    """

    def __init__(
        self,
        model: DeepSeekV3,
        tokenizer: Tokenizer | None,
        max_len: int = 4096,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        prefill_chunk: int | None = None,
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
        if prefill_chunk is None:
            prefill_chunk = 32 if jax.default_backend() == "cpu" else 512
        check("prefill_chunk", prefill_chunk, "an integer of at least 1", integer, 1)
        check("stride", stride, "an integer of at least 1", integer, 1)
        self.tokenizer = tokenizer
        self.max_len = max_len
        # If a mesh shards the batch, all shards must be equal.
        shards = 1 if model.layout is None else model.layout.batch_multiple
        self.batch_sizes = tuple(sorted({-(-size // shards) * shards for size in batch_sizes}))
        self.stride = stride
        self._reader = RequestReader(model.config, tokenizer, max_len)
        vocab_size = model.config.vocab_size
        if tokenizer is not None:
            vocab_size = min(vocab_size, tokenizer.vocab_size)
        self._programs = Programs.of(
            model,
            max_len,
            prefill_chunk=prefill_chunk,
            vocab_size=vocab_size,
            count_routing=count_routing,
        )
        self._choosers: dict[tuple[DraftPlan, int], DepthChooser] = {}

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
          progress: called after each dispatch, about twice a second, with the number of tokens
            generated so far for all prompts together.

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
        tally = Tally(requests, began, n)
        with InterruptsDeferred() as interrupts:

            def after_dispatch() -> None:
                if progress is not None:
                    progress(tally.new_tokens)
                # An interrupt stops all processes of a mesh. Otherwise some would wait forever.
                in_any_process = (
                    self._programs.spans_processes and max_over_processes(interrupts.is_pending) > 0
                )
                interrupts.deliver(in_other_process=in_any_process)

            try:
                self._run(requests, plan, tally, after_dispatch)
            except KeyboardInterrupt:
                raise Interrupted(tally.generation()) from None
        return tally.generation()

    def _run(
        self,
        requests: Sequence[Request],
        plan: DraftPlan,
        tally: Tally,
        after_dispatch: Callable[[], None],
    ) -> None:
        """Runs all requests, batch by batch, and adds each batch to ``tally``."""
        largest = self.batch_sizes[-1]
        for first in range(0, len(requests), largest):
            batch = self._batch(
                requests[first : first + largest], plan, after_dispatch=after_dispatch
            )
            tally.begin(batch)
            try:
                batch.prefill()
                batch.advance(1)
                tally.record_first_tokens()
                while batch.is_running and not batch.non_finite:
                    batch.advance(self.stride if batch.has_stop_strings else None)
            finally:
                # Frees the cache before the next batch allocates one, even if a traceback still
                # refers to this batch.
                batch.free()
                tally.end()
            if batch.non_finite:
                raise non_finite_error(batch, tally, first)

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
            tally = Tally(requests, time.perf_counter())
            batch = self._batch(requests, plan)
            tally.begin(batch)
            tracker = batch.trackers[0]
            num_sent = 0
            batch.prefill()
            batch.advance(1)
            while True:
                is_finished = not batch.is_running and not batch.non_finite
                reason = batch.finish_reason(0) if is_finished else None
                text = tracker.piece(final=is_finished)
                new_tokens = tracker.tokens[num_sent:]
                if text or is_finished or (new_tokens and self.tokenizer is None):
                    logprobs = batch.logprobs(0, num_sent, len(tracker.tokens))
                    yield Piece(text, new_tokens, reason, *logprobs)
                    num_sent = len(tracker.tokens)
                if is_finished:
                    return
                if batch.non_finite:
                    batch.free()
                    tally.end()
                    raise non_finite_error(batch, tally, 0)
                batch.advance(self.stride)

        return pieces()

    def warm_up(
        self,
        batch_size: int = 1,
        *,
        logprobs: int = 0,
        draft: str | Drafter | None = None,
        draft_depth: int | Literal["auto"] = 1,
    ) -> float:
        """Compiles the programs for ``batch_size`` requests (prompts times ``n``). Returns seconds.

        For the depth ``"auto"`` it also measures the cost of every depth.
        """
        began = time.perf_counter()
        settings = {"logprobs": logprobs, "draft": draft, "draft_depth": draft_depth}
        requests = self.requests(
            [[0]] * batch_size, max_new_tokens=None, ignore_eos=True, **settings
        )
        plan, largest = self._plan(settings), self.batch_sizes[-1]
        # To measure its cost, a depth runs a second time after its compilation.
        runs = [1] if len(plan.depths) == 1 else [None, None]
        for size in {min(batch_size, largest), batch_size % largest} - {0}:
            batch: Batch | None = None
            for depth, tokens in itertools.product(plan.depths, runs):
                if batch is None or not batch.is_running:
                    batch = None  # frees its cache before the next one is allocated
                    batch = self._batch(requests[:size], plan, is_warm_up=True)
                    batch.prefill()
                batch.advance(tokens, depth=depth)
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
        self._programs.use(model)

    def take_routing_counts(self) -> np.ndarray:
        """Returns how many tokens chose each expert since the last call, int64 [L_moe, E].

        The MoE layers of the MTP layers come last. :meth:`sharding.Placement.balanced` takes such
        counts as loads.

        Raises:
          ValueError: this Generator was created without ``count_routing``.
        """
        counts = self._programs.routing_counts
        if counts is None:
            raise ValueError("count_routing: expected True in the constructor, got False")
        taken = counts.copy()
        counts[...] = 0
        return taken

    def requests(self, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[Request]:
        """Checks the arguments of a call of :meth:`generate`, and returns its requests.

        Raises:
          ValueError: a prompt or setting is invalid, as in :meth:`generate`.
          TypeError: there is no such setting.
        """
        inspect.signature(self.generate).bind(prompts, **settings)
        self._plan(settings)
        progress = settings.get("progress")
        if progress is not None and not callable(progress):
            raise ValueError(f"progress: expected a function or None, got {progress!r:.80}")
        call_settings = ("draft", "draft_depth", "progress")
        request_settings = {n: v for n, v in settings.items() if n not in call_settings}
        return self._reader.read(prompts, **request_settings)

    def _plan(self, settings: Mapping[str, Any]) -> DraftPlan:
        draft, depth = settings.get("draft"), settings.get("draft_depth", 1)
        return DraftPlan.read(draft, depth, self._programs.signature.config)

    def _batch(self, requests: Sequence[Request], plan: DraftPlan, **options: Any) -> Batch:
        size = next(size for size in self.batch_sizes if size >= len(requests))
        chooser = self._choosers.setdefault((plan, size), DepthChooser(plan.depths))
        return Batch(self._programs, self.tokenizer, requests, size, plan, chooser, **options)

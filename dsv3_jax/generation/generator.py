"""The Generator: prompts in, completions out, a few compiled programs in between."""

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
from dsv3_jax.generation.tally import Tally, non_finite
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from sharding.distributed import max_over_processes

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Generator:
    """Generates from a model, many tokens a dispatch.

    Every shape is static: a call pads its batch to the next of ``batch_sizes`` and compiles, once,
    one prefill and one decode program for it, and one more decode program when it first asks for
    ``logprobs``; so it does for every drafter and depth. After that nothing compiles again,
    whatever the prompts and settings.

    A request's tokens depend on the request alone: its randomness comes from its own seed, and its
    row never mixes with others. Programs of different batch sizes may round differently, though; a
    single entry in ``batch_sizes`` rules that out too.

    Args:
      tokenizer: None takes and gives token ids only.
      max_len: most tokens a row, prompt and completion together; a static size of the cache.
      batch_sizes: batches to compile for; more prompts than the largest run in several batches. On
        a mesh that splits the batch, the next multiples of its parts.
      prefill_chunk: prompt tokens a row that go through the model at a time. Default 512, on a CPU
        32: there a chunk's padding costs more than another pass.
      stride: tokens between looks at the text, for stop strings and streaming.
      count_routing: count the tokens that choose each expert, for :meth:`take_routing_counts`.

    Raises:
      ValueError: ``max_len`` exceeds what the model's positions reach, or a setting is wrong.
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
        wanted = ("encode", "decode", "vocab_size", "eos_token_id", "special_token_id")
        if tokenizer is not None and not all(hasattr(tokenizer, name) for name in wanted):
            got = type(tokenizer).__name__
            raise ValueError(f"tokenizer: expected a dsv3_jax.Tokenizer or None, got {got}")
        reach = model.config.max_position_embeddings
        integer = numbers.Integral
        expected = f"2 to {reach} (max_position_embeddings)"
        check("max_len", max_len, expected, integer, 2, reach)
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
        # On a mesh every device that holds rows of its own has as many.
        parts = 1 if model.layout is None else model.layout.batch_multiple
        self.batch_sizes = tuple(sorted({-(-size // parts) * parts for size in batch_sizes}))
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
        draft: str | Drafter | None = None,
        draft_depth: int | Literal["auto"] = 1,
        progress: Callable[[int], object] | None = None,
    ) -> Generation:
        """Completes every prompt.

        All settings but ``n``, ``draft``, ``draft_depth`` and ``progress`` are one value for all
        prompts, or a sequence with one for each.

        Args:
          prompts: text, or token ids; one, or several of different lengths. Text is encoded with
            the special tokens its tokenizer adds.
          max_new_tokens: most tokens of a completion. The default, 64, takes the room that is left
            in ``max_len`` where that is less; another number has to fit. None takes all the room.
          temperature: 0 is greedy. Then ``top_k``, ``top_p`` and ``min_p`` apply, in this order.
          seed: equal seeds give equal tokens for equal prompts, alone or in any batch. None: the
            i-th completion of the call has seed i, so that equal prompts differ.
          n: completions a prompt, run as that many prompts would be: the first prompt's come
            first. The j-th has the prompt's seed plus j, modulo 2**32.
          stop: ends a request where one of these strings appears, and cuts the text before it. For
            each prompt its own: a sequence of sequences.
          stop_tokens: end a request beside the model's own end-of-sequence tokens. For each prompt
            its own: a sequence of sequences.
          ignore_eos: go on past the model's own end-of-sequence tokens.
          logprobs: how many of the most probable tokens to report at each position (at most 20).
            The chosen token's own logprob always comes.
          draft: who guesses tokens ahead for the model to check several at once: None (nobody),
            ``"mtp"`` (the model's own MTP layer), ``"ngram"`` (prompt look-up), or a Drafter.
            Greedy tokens stay the same, drawn ones keep their distribution; a seed gives other
            tokens than without. ``"synthetic:RATE"`` accepts drafts at that rate whatever the
            model says: for measuring speed alone, its text is not the model's.
          draft_depth: most tokens guessed at a time, 1 to 4; ``"auto"`` follows the acceptance and
            the cost measured so far, and may leave off. Then a seed's tokens also depend on them.
          progress: called after each dispatch, about twice a second, with the number of tokens that
            all prompts have generated so far.

        Raises:
          ValueError: a prompt is empty, too long or has an id out of range, or a setting is wrong.
          Interrupted: Ctrl-C, within about half a second on the device; it carries the completions
            so far. A KeyboardInterrupt.
          NonFiniteLogitsError: the model computed NaN or an infinity. It ends all sequences of the
            call, and carries the completions so far. A ValueError.
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
            draft=draft,
            draft_depth=draft_depth,
            progress=progress,
        )
        plan = self._plan({"draft": draft, "draft_depth": draft_depth})
        tally = Tally(requests, began, n)
        with InterruptsDeferred() as interrupts:

            def between() -> None:
                if progress is not None:
                    progress(tally.new_tokens)
                # All processes of a mesh, or those that go on would wait for the others.
                anywhere = (
                    self._programs.spans_processes and max_over_processes(interrupts.pending) > 0
                )
                interrupts.deliver(elsewhere=anywhere)

            try:
                self._run(requests, plan, tally, between)
            except KeyboardInterrupt:
                raise Interrupted(tally.generation()) from None
        return tally.generation()

    def _run(
        self,
        requests: Sequence[Request],
        plan: DraftPlan,
        tally: Tally,
        between: Callable[[], None],
    ) -> None:
        """Runs all requests, batch by batch, and adds each batch to ``tally``."""
        largest = self.batch_sizes[-1]
        for at in range(0, len(requests), largest):
            batch = self._batch(requests[at : at + largest], plan, between=between)
            tally.begin(batch)
            try:
                batch.prefill()
                batch.advance(1)
                tally.has_first_tokens()
                while batch.running and not batch.broken:
                    batch.advance(self.stride if batch.watches_text else None)
            finally:
                # Before the next batch has its own cache, and though a traceback may hold this one.
                batch.free()
                tally.end()
            if batch.broken:
                raise non_finite(batch, tally, at)

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
        """The completion of one prompt, piece by piece, ``stride`` tokens at a time.

        Takes the settings of :meth:`generate` but ``progress``, and no ``n`` but 1. A piece never
        ends inside a character or inside what may become a stop string; joined, the pieces are
        generate's text. Without a tokenizer pieces hold tokens alone. Settings are checked at the
        call, before the first piece.
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
            sent = 0
            batch.prefill()
            batch.advance(1)
            while True:
                reason = None if batch.running or batch.broken else batch.finish_reason(0)
                text = tracker.piece(final=reason is not None)
                fresh = tracker.tokens[sent:]
                if text or reason is not None or (fresh and self.tokenizer is None):
                    yield Piece(text, fresh, reason)
                    sent = len(tracker.tokens)
                if reason is not None:
                    return
                if batch.broken:
                    batch.free()
                    tally.end()
                    raise non_finite(batch, tally, 0)
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
        """Compiles what a batch of that size needs (prompts times ``n``), and measures depths where
        "auto" is to choose among them; seconds it took."""
        began = time.perf_counter()
        settings = {"logprobs": logprobs, "draft": draft, "draft_depth": draft_depth}
        requests = self.requests(
            [[0]] * batch_size, max_new_tokens=None, ignore_eos=True, **settings
        )
        plan, largest = self._plan(settings), self.batch_sizes[-1]
        # To be chosen among, a depth runs twice: with its compilation, and to be measured.
        runs = [1] if len(plan.depths) == 1 else [None, None]
        for size in {min(batch_size, largest), batch_size % largest} - {0}:
            batch: Batch | None = None
            for depth, tokens in itertools.product(plan.depths, runs):
                if batch is None or not batch.running:
                    batch = None  # frees its cache before the next one is made
                    batch = self._batch(requests[:size], plan, warms_up=True)
                    batch.prefill()
                batch.advance(tokens, depth=depth)
        return time.perf_counter() - began

    def use(self, model: DeepSeekV3) -> None:
        """Continues with another model of the same config, options and arrays' shapes, such as one
        whose experts were placed anew (:meth:`~dsv3_jax.model.DeepSeekV3.place_experts`), also
        between the pieces of a stream. Nothing is compiled. The arrays of the model used so far are
        freed when the caller no longer holds them.

        Raises:
          ValueError: the model differs in its config, layout, ``attn_impl``, dtype or quantization,
            or its arrays differ in number, shape, dtype or sharding.
        """
        self._programs.use(model)

    def take_routing_counts(self) -> np.ndarray:
        """Tokens that chose each expert since the last call, int64 [L, E]: of the MoE layers in
        order, those of MTP layers last, as :meth:`sharding.Placement.balanced` takes loads.

        Raises:
          ValueError: this Generator was made without ``count_routing``.
        """
        counts = self._programs.routing_counts
        if counts is None:
            raise ValueError("count_routing: expected True when the Generator was made, got False")
        taken = counts.copy()
        counts[...] = 0
        return taken

    def requests(self, prompts: Prompt | Sequence[Prompt], **settings: Any) -> list[Request]:
        """The checked requests behind a call of :meth:`generate` with these arguments.

        Raises:
          ValueError: as generate would, and TypeError for a setting that it does not have.
        """
        inspect.signature(self.generate).bind(prompts, **settings)
        self._plan(settings)
        progress = settings.get("progress")
        if progress is not None and not callable(progress):
            raise ValueError(f"progress: expected a function or None, got {progress!r:.80}")
        of_a_call = ("draft", "draft_depth", "progress")
        of_a_request = {n: v for n, v in settings.items() if n not in of_a_call}
        return self._reader.read(prompts, **of_a_request)

    def _plan(self, settings: Mapping[str, Any]) -> DraftPlan:
        draft, depth = settings.get("draft"), settings.get("draft_depth", 1)
        return DraftPlan.read(draft, depth, self._programs.model_config)

    def _batch(self, requests: Sequence[Request], plan: DraftPlan, **options: Any) -> Batch:
        size = next(size for size in self.batch_sizes if size >= len(requests))
        chooser = self._choosers.setdefault((plan, size), DepthChooser(plan.depths))
        return Batch(self._programs, self.tokenizer, requests, size, plan, chooser, **options)

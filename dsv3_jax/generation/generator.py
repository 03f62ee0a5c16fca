"""The Generator: prompts in, completions out, a few compiled programs in between."""

from __future__ import annotations

import inspect
import itertools
import numbers
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dsv3_jax.generation.batch import Batch
from dsv3_jax.generation.completion import Completion, Generation, Piece, Speculation, Stats
from dsv3_jax.generation.depth import DepthChooser
from dsv3_jax.generation.drafters import Drafter
from dsv3_jax.generation.plan import DraftPlan
from dsv3_jax.generation.programs import Programs
from dsv3_jax.generation.request import Prompt, Request, RequestReader, check
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer

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
        reach = model.config.max_position_embeddings
        integer = numbers.Integral
        expected = f"2 to {reach} (max_position_embeddings)"
        check("max_len", max_len, expected, integer, 2, reach)
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
        parts = 1 if model.layout is None else model.layout.row_multiple
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
        max_new_tokens: int | Sequence[int] = 64,
        temperature: float | Sequence[float] = 0.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        draft: str | Drafter | None = None,
        draft_depth: int | Literal["auto"] = 1,
    ) -> Generation:
        """Completes every prompt.

        Args:
          prompts: text, or token ids; one, or several of different lengths. Text is encoded with
            the special tokens its tokenizer adds.
          max_new_tokens: and the other settings up to ``seed``: one value for all prompts, or one
            for each.
          temperature: 0 is greedy. Then ``top_k``, ``top_p`` and ``min_p`` apply, in this order.
          seed: equal seeds give equal tokens for equal prompts, alone or in any batch.
          stop: ends a request where one of these strings appears, and cuts the text before it.
          stop_tokens: end a request beside the model's own end-of-sequence tokens.
          ignore_eos: go on past the model's own end-of-sequence tokens.
          logprobs: how many of the most probable tokens to report at each place (at most 20). The
            chosen token's own logprob always comes.
          draft: who guesses tokens ahead for the model to check several at once: None (nobody),
            ``"mtp"`` (the model's own MTP layer), ``"ngram"`` (prompt look-up), or a Drafter.
            Greedy tokens stay the same, drawn ones keep their distribution; a seed gives other
            tokens than without. ``"synthetic:RATE"`` accepts drafts at that rate whatever the
            model says: for measuring speed alone, its text is not the model's.
          draft_depth: most tokens guessed at a time, 1 to 4; ``"auto"`` follows the acceptance and
            the cost measured so far, and may leave off. Then a seed's tokens also depend on them.

        Raises:
          ValueError: a prompt is empty, too long or has an id out of range, or a setting is wrong.
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
            stop=stop,
            stop_tokens=stop_tokens,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            draft=draft,
            draft_depth=draft_depth,
        )
        plan = self._plan({"draft": draft, "draft_depth": draft_depth})
        completions: list[Completion] = []
        first: float | None = None
        steps, later_tokens, later_seconds = 0, 0, 0.0
        largest = self.batch_sizes[-1]
        for at in range(0, len(requests), largest):
            batch = self._batch(requests[at : at + largest], plan)
            batch.advance(1)
            first_done = time.perf_counter()
            first = first_done - began if first is None else first
            first_tokens = sum(len(t.tokens) for t in batch.trackers)
            while batch.running:
                batch.advance(self.stride if batch.watches_text else None)
            later_seconds += time.perf_counter() - first_done
            later_tokens += sum(len(t.tokens) for t in batch.trackers) - first_tokens
            steps += batch.steps
            completions += batch.completions()
        return Generation(
            completions,
            Stats(
                steps=steps,
                new_tokens=sum(len(c.tokens) for c in completions),
                time_to_first_token=first or 0.0,
                seconds=time.perf_counter() - began,
                tokens_per_second=later_tokens / later_seconds if later_tokens > 0 else 0.0,
                speculation=Speculation.total([c.speculation for c in completions]),
            ),
        )

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
        """The completion of one prompt, piece by piece, ``stride`` tokens at a time.

        Takes the settings of :meth:`generate`. A piece never ends inside a character or inside what
        may become a stop string; joined, the pieces are generate's text. Settings are checked at
        the call, before the first piece.
        """
        requests = self.requests(prompt, **settings)
        plan = self._plan(settings)
        if len(requests) != 1:
            raise ValueError(f"stream: expected one prompt, got {len(requests)}")

        def pieces() -> Iterator[Piece]:
            batch = self._batch(requests, plan)
            tracker = batch.trackers[0]
            sent = 0
            batch.advance(1)
            while True:
                reason = None if batch.running else batch.finish_reason(0)
                text = tracker.piece(final=reason is not None)
                if text or reason is not None:
                    yield Piece(text, tracker.tokens[sent:], reason)
                    sent = len(tracker.tokens)
                if reason is not None:
                    return
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
        """Compiles what a batch of that size needs, and measures depths where "auto" is to choose
        among them; seconds it took."""
        began = time.perf_counter()
        settings = {"logprobs": logprobs, "draft": draft, "draft_depth": draft_depth}
        requests = self.requests(
            [[0]] * batch_size, max_new_tokens=self.max_len, ignore_eos=True, **settings
        )
        plan, largest = self._plan(settings), self.batch_sizes[-1]
        # To be chosen among, a depth runs twice: with its compilation, and to be measured.
        runs = [1] if len(plan.depths) == 1 else [None, None]
        for size in {min(batch_size, largest), batch_size % largest} - {0}:
            batch = self._batch(requests[:size], plan)
            for depth, tokens in itertools.product(plan.depths, runs):
                if not batch.running:
                    batch = self._batch(requests[:size], plan)
                batch.advance(tokens, depth=depth)
        return time.perf_counter() - began

    def use(self, model: DeepSeekV3) -> None:
        """Goes on with another model of the same arrays, such as one whose experts were placed
        anew (:meth:`~dsv3_jax.model.DeepSeekV3.place_experts`), also between the pieces of a
        stream. Nothing is compiled.

        Raises:
          ValueError: its arrays differ in number, shape, dtype or place.
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
        of_a_request = {n: v for n, v in settings.items() if n not in ("draft", "draft_depth")}
        return self._reader.read(prompts, **of_a_request)

    def _plan(self, settings: Mapping[str, Any]) -> DraftPlan:
        draft, depth = settings.get("draft"), settings.get("draft_depth", 1)
        return DraftPlan.read(draft, depth, self._programs.model_config)

    def _batch(self, requests: Sequence[Request], plan: DraftPlan) -> Batch:
        size = next(size for size in self.batch_sizes if size >= len(requests))
        chooser = self._choosers.setdefault((plan, size), DepthChooser(plan.depths))
        return Batch(self._programs, self.tokenizer, requests, size, plan, chooser)

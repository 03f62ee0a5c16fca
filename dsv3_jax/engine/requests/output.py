"""One request's results on the host: tokens, text, log-probabilities, counts of drafts."""

from __future__ import annotations

import dataclasses

from dsv3_jax.engine.device.step import PromptLogprobs
from dsv3_jax.engine.device.step_results import NewTokens
from dsv3_jax.engine.errors import RequestError
from dsv3_jax.engine.requests.grammar import GrammarTracker
from dsv3_jax.engine.requests.request import EngineRequest, PromptRecord
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest
from dsv3_jax.generation.completion import (
    Completion,
    FinishReason,
    Generation,
    Speculation,
    Stats,
)
from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.results import FINISH_REASONS, Results
from dsv3_jax.generation.stop_scope import ReasoningMarkers, StopScope
from dsv3_jax.generation.text import Decoder, TextTracker
from dsv3_jax.tokenizer import SpecialTokenDecoder


class RequestOutput:
    """Turns a request's steps into text, pieces and its completion.

    Args:
      draft: name of the drafter, or None.
      depth: most drafts per step.
      reasoning: markers of the reasoning, in which no stop string counts; None if stop strings
        count from the beginning.
    """

    def __init__(
        self,
        handle: EngineRequest,
        request: Request,
        scheduled: ScheduledRequest,
        decoder: Decoder | None,
        *,
        draft: str | None,
        depth: int,
        grammar: GrammarTracker | None = None,
        reasoning: ReasoningMarkers | None = None,
    ):
        self.handle = handle
        self.scheduled = scheduled
        self.request = request
        self.grammar = grammar
        self._has_decoder = decoder is not None
        self._tracker = TextTracker(decoder, request.stop, request.min_tokens)
        self._scope: StopScope | None = None
        if decoder is not None and request.stop:
            is_special = isinstance(decoder, SpecialTokenDecoder)
            opaque = decoder.opaque_tokens(request.stop) if is_special else ()
            if reasoning is not None or opaque:
                self._scope = StopScope(self._tracker, decoder, reasoning, opaque)
        self._results = Results()
        self._prompt: PromptRecord | None = None
        if request.prompt_logprobs is not None:
            self._prompt = PromptRecord(len(request.prompt), request.prompt_logprobs)
            handle.prompt_record = self._prompt
        self._draft = draft
        self._drafted = [0] * depth
        self._accepted = [0] * depth
        self._steps = 0
        self._streamed = 0  # tokens in the pieces so far

    @property
    def num_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self._tracker.tokens) if self._scope is None else self._scope.num_tokens

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string has appeared."""
        return self._tracker.stopped

    def add(self, step: NewTokens, *, is_decode: bool) -> None:
        """Adds the tokens of one step: a decode step, or the prefill that ended the prompt."""
        if self.is_stopped:
            return
        self._results.add(step.logprobs)
        if step.top is not None:
            self._results.add_top(self.request.logprobs, *step.top)
        position = self.num_tokens
        (self._scope or self._tracker).extend(step.tokens)
        if is_decode:
            # The last token of a step is the model's own.
            self.handle.accepted_drafts += range(position, position + len(step.tokens) - 1)
            self._steps += 1
            for j in range(step.drafted):
                self._drafted[j] += 1
            for j in range(len(step.tokens) - 1):
                self._accepted[j] += 1

    def add_prompt(self, position: int, chunk: PromptLogprobs) -> None:
        """Adds the log-probabilities of prompt tokens from ``position`` on."""
        if self._prompt is not None:
            self._prompt.add(position, chunk)

    def stream(self) -> None:
        """Delivers the text that later tokens cannot change."""
        text = self._tracker.piece(final=False)
        if text or (not self._has_decoder and len(self._tracker.tokens) > self._streamed):
            self._deliver(text)

    def finish(self, finished: int) -> None:
        """Delivers the rest of the text and the completion, for a value of ``finished``."""
        self._end_scope()
        self.end("stop" if self.is_stopped else FINISH_REASONS[finished])

    def end(self, reason: FinishReason) -> None:
        """Delivers the rest of the text and the completion."""
        self._end_scope()
        self._deliver(self._tracker.piece(final=True), self.completion(reason))

    def _end_scope(self) -> None:
        if self._scope is not None:
            self._scope.end()

    def _deliver(self, text: str, completion: Completion | None = None) -> None:
        """Delivers text with all tokens since the piece before it."""
        begin, end = self._streamed, len(self._tracker.tokens)
        self._streamed = end
        logprobs = self._results.between(begin, end, self.request)
        self.handle.deliver(text, self._tracker.tokens[begin:end], *logprobs, completion)

    def fail(self, error: Exception) -> None:
        """Ends the request with an error of its own."""
        failure = RequestError(f"request: {error}")
        failure.__cause__ = error
        self.handle.fail(failure)

    def fail_non_finite(self) -> None:
        """Ends the request with an error that carries its tokens so far."""
        self._end_scope()
        completion = self.completion("error")
        length = completion.prompt_tokens + len(completion.tokens)
        message = (
            f"request: expected finite logits for position {length} ({completion.prompt_tokens} "
            f"prompt and {len(completion.tokens)} generated tokens before it), got NaN or an "
            "infinity; a weight is not finite, or activations overflow"
        )
        stats = Stats(self._steps, len(completion.tokens), 0.0, 0.0, 0.0, completion.speculation)
        self.handle.fail(NonFiniteLogitsError(message, Generation([completion], stats)))

    def completion(self, reason: FinishReason) -> Completion:
        """Returns the completion with the tokens so far."""
        completion = self._results.completion(
            self.request, self._tracker, reason, self._speculation()
        )
        completion = dataclasses.replace(completion, cached_tokens=self.scheduled.cached_tokens)
        if self._prompt is None:
            return completion
        return dataclasses.replace(
            completion,
            prompt_logprobs=self._prompt.logprobs,
            prompt_top_logprobs=self._prompt.top_logprobs,
        )

    def _speculation(self) -> Speculation | None:
        if self._draft is None:
            return None
        return Speculation(
            draft=self._draft,
            steps=self._steps,
            tokens=self._steps + sum(self._accepted),
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
        )

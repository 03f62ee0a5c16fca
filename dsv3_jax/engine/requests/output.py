"""One request's results on the host: tokens, text, log-probabilities, counts of drafts."""

from __future__ import annotations

import numpy as np

from dsv3_jax.engine.requests.grammar import GrammarTracker
from dsv3_jax.engine.requests.request import EngineRequest, PromptRecord
from dsv3_jax.engine.scheduling.step_plan import End, RequestResult, StepTokens
from dsv3_jax.generation.completion import (
    FINISH_REASONS,
    NON_FINITE,
    RUNNING,
    Completion,
    FinishReason,
    Generation,
    Speculation,
    Stats,
    TopLogprobs,
)
from dsv3_jax.generation.errors import EngineError, NonFiniteLogitsError, RequestError
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.text import Decoder, ReasoningMarkers, StopScope, TextTracker
from dsv3_jax.tokenizer import SpecialTokenDecoder

# A sampled token was possible, so that its log-probability must not be reported as -inf.
_LEAST = float(np.finfo(np.float32).min)


class RequestOutput:
    """Turns a request's results into text, pieces and its completion. One thread at a time.

    Args:
      draft: name of the drafter, or None.
      depth: most drafts per step.
      grammar: decides which tokens may come next. It is kept here for ``Delivery``, which asks it.
      reasoning: markers of the reasoning, in which no stop string counts; None if stop strings
        count from the beginning.
    """

    def __init__(
        self,
        handle: EngineRequest,
        request: Request,
        decoder: Decoder | None,
        *,
        draft: str | None = None,
        depth: int = 0,
        grammar: GrammarTracker | None = None,
        reasoning: ReasoningMarkers | None = None,
    ):
        self.handle = handle
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
        self._logprobs: list[float] = []
        self._top_logprobs: list[TopLogprobs] = []
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

    def add(self, result: RequestResult) -> None:
        """Adds a result, up to a stop string, and streams its text if the request goes on."""
        if result.prompt is not None and self._prompt is not None:
            self._prompt.add(*result.prompt)
        for step in result.steps:
            if not self.is_stopped:
                self._add(step, is_decode=result.is_decode)
        if result.finished == RUNNING and not self.is_stopped:
            text = self._tracker.piece(final=False)
            if text or (not self._has_decoder and len(self._tracker.tokens) > self._streamed):
                self._deliver(text)

    def _add(self, step: StepTokens, *, is_decode: bool) -> None:
        """Adds the tokens of one step: a decode step, or the prefill that ended the prompt."""
        self._logprobs += [max(logprob, _LEAST) for logprob in step.logprobs]
        if step.top is not None:
            for ids, values in zip(*step.top, strict=True):
                is_possible = np.isfinite(values)  # ids that pad the embedding have -inf
                is_possible[self.request.logprobs :] = False
                pairs = zip(ids[is_possible].tolist(), values[is_possible].tolist(), strict=True)
                self._top_logprobs.append(list(pairs))
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

    def end(self, end: End, cached_tokens: int = 0) -> None:
        """Delivers the rest of the text and the completion, or an error."""
        if isinstance(end, EngineError):
            self.handle.fail(end)
        elif isinstance(end, BaseException):
            failure = RequestError(f"request: {end}")
            failure.__cause__ = end
            self.handle.fail(failure)
        else:
            is_finite = end != NON_FINITE or self.is_stopped
            if self._scope is not None:
                self._scope.end()
            if not is_finite:
                self._fail_non_finite(cached_tokens)
                return
            reason = end
            if isinstance(reason, int):
                reason = "stop" if self.is_stopped else FINISH_REASONS[reason]
            text = self._tracker.piece(final=True)
            self._deliver(text, self.completion(reason, cached_tokens))

    def _deliver(self, text: str, completion: Completion | None = None) -> None:
        """Delivers text with all tokens since the piece before it."""
        begin, end = self._streamed, len(self._tracker.tokens)
        self._streamed = end
        tokens = self._tracker.tokens[begin:end]
        self.handle.deliver(text, tokens, *self._logprobs_between(begin, end), completion)

    def _logprobs_between(
        self, begin: int, end: int
    ) -> tuple[list[float], list[TopLogprobs] | None]:
        top = self._top_logprobs[begin:end] if self.request.logprobs else None
        return self._logprobs[begin:end], top

    def _fail_non_finite(self, cached_tokens: int) -> None:
        """Ends the request with an error that carries its tokens so far."""
        completion = self.completion("error", cached_tokens)
        length = completion.prompt_tokens + len(completion.tokens)
        message = (
            f"request: expected finite logits for position {length} ({completion.prompt_tokens} "
            f"prompt and {len(completion.tokens)} generated tokens before it), got NaN or an "
            "infinity; a weight is not finite, or activations overflow"
        )
        stats = Stats(self._steps, len(completion.tokens), 0.0, 0.0, 0.0, completion.speculation)
        self.handle.fail(NonFiniteLogitsError(message, Generation([completion], stats)))

    def completion(self, reason: FinishReason, cached_tokens: int = 0) -> Completion:
        """Returns the completion with the tokens so far."""
        tokens = list(self._tracker.tokens)
        logprobs, top_logprobs = self._logprobs_between(0, len(tokens))
        prompt = self._prompt
        return Completion(
            text=self._tracker.text,
            tokens=tokens,
            logprobs=logprobs,
            finish_reason=reason,
            prompt_tokens=len(self.request.prompt),
            top_logprobs=top_logprobs,
            speculation=self._speculation(),
            cached_tokens=cached_tokens,
            prompt_logprobs=None if prompt is None else prompt.logprobs,
            prompt_top_logprobs=None if prompt is None else prompt.top_logprobs,
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

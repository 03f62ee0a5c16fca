"""Reads what callers ask for, and prepares what the loop needs to serve it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

from dsv3_jax.config import ModelConfig
from dsv3_jax.engine.requests.grammar import Grammar, GrammarTracker, allows_drafts
from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.requests.request import EngineRequest
from dsv3_jax.engine.scheduling.step_plan import ScheduledRequest
from dsv3_jax.engine.settings import EngineSettings
from dsv3_jax.generation.depth import DraftDepth
from dsv3_jax.generation.request import Prompt, Request, RequestReader, TokenMask
from dsv3_jax.generation.text import Decoder, ReasoningMarkers
from dsv3_jax.tokenizer import SpecialTokenDecoder, Tokenizer

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class SubmitOptions:
    """Options that all requests of one submission share."""

    priority: int = 0
    timeout: float | None = None
    draft: bool = True
    skip_special_tokens: bool = True
    reasoning: ReasoningMarkers | None = None


class Intake:
    """Reads requests and checks them. ``cancel`` is called with one that its holder cancels."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        settings: EngineSettings,
        max_len: int,
        cancel: Callable[[ScheduledRequest], None],
    ):
        self._tokenizer = tokenizer
        self._reader = RequestReader(config, tokenizer, max_len)
        self._selectable = TokenMask.of(config.vocab_size, range(settings.vocab_size))
        self._draft_plan = settings.draft_plan
        # A deterministic engine has one program, which reports no log-probabilities of prompts.
        self._deterministic = settings.scheduler.aligned_prefixes
        self._cancel = cancel
        self.first_seed = secrets.randbelow(2**32)
        """Seed of the first completion without one; the next ones count on from it, modulo 2**32.
        Random, so that no two engines sample the same texts."""
        logger.info("completions without a seed have the seeds from %d on", self.first_seed)
        self._seeds = itertools.count(self.first_seed)
        self.end_tokens = self._reader.end_tokens

    def read(self, prompts: Prompt | Sequence[Prompt], settings: dict[str, Any]) -> list[Request]:
        """Returns a request for each completion. Without a seed, each gets the next one."""
        requests = self._reader.read(prompts, **settings)
        if self._deterministic and any(r.prompt_logprobs is not None for r in requests):
            raise ValueError(
                "prompt_logprobs: expected None with deterministic=True; the log-probabilities of"
                " prompts need another program"
            )
        if settings.get("seed") is not None:
            return requests
        return [dataclasses.replace(r, seed=next(self._seeds) % 2**32) for r in requests]

    def scheduled(
        self, requests: Sequence[Request], grammars: Sequence[Grammar], options: SubmitOptions
    ) -> list[ScheduledRequest]:
        """Returns what the loop serves: each with its settings and its output."""
        if grammars and len(grammars) != len(requests):
            raise ValueError(
                f"grammars: expected {len(requests)}, one for each completion, or none; got "
                f"{len(grammars)}"
            )
        for grammar in grammars:
            if not isinstance(grammar, Grammar):
                raise ValueError(
                    "grammar: expected an object with mask() and accept(token), got "
                    f"{type(grammar).__name__}"
                )
        if len(set(map(id, grammars))) < len(grammars):
            raise ValueError("grammar: expected another object for each completion, got one twice")
        decoder: Decoder | None = self._tokenizer
        if self._tokenizer is not None and not options.skip_special_tokens:
            decoder = SpecialTokenDecoder(self._tokenizer)
        return [
            self._scheduled(request, grammar, decoder, options)
            for request, grammar in zip(requests, grammars or [None] * len(requests), strict=True)
        ]

    def _scheduled(
        self,
        request: Request,
        grammar: Grammar | None,
        decoder: Decoder | None,
        options: SubmitOptions,
    ) -> ScheduledRequest:
        drafter = self._draft_plan.drafter if options.draft else None
        if grammar is not None and drafter is not None and not allows_drafts(request, drafter):
            drafter = None
        depth, is_adaptive = self._draft_plan.max_depth, len(self._draft_plan.depths) > 1
        now = time.monotonic()
        scheduled = ScheduledRequest(
            tokens=list(request.prompt),
            max_length=len(request.prompt) + request.max_new_tokens,
            drafts=0 if drafter is None else depth,
            depth=DraftDepth(depth) if drafter is not None and is_adaptive else None,
            priority=options.priority,
            arrival=now,
            deadline=math.inf if options.timeout is None else now + options.timeout,
            is_serial=grammar is not None,
            reuses_prefix=request.prompt_logprobs is None,
            settings=request,
        )
        tracker = None if grammar is None else GrammarTracker(grammar, request, self._selectable)
        scheduled.output = RequestOutput(
            EngineRequest(lambda _: self._cancel(scheduled)),
            request,
            decoder,
            draft=None if drafter is None else drafter.name,
            depth=depth,
            grammar=tracker,
            reasoning=options.reasoning,
        )
        return scheduled

"""The options of a step that decide which program runs: those that its requests ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from dsv3_jax.generation.request import Request
from dsv3_jax.generation.sampling import SamplingMode


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a step that another program computes."""

    sampling: SamplingMode | None = "greedy"
    """The program serves requests of this kind. None lets the program read the temperatures."""
    top_logprobs: bool = False
    """Whether some requests ask for the most probable tokens."""
    penalties: bool = False
    """Whether some requests have penalties, biases or ``min_tokens``."""
    masks: bool = False
    """Whether some requests may not generate all tokens."""
    prompt_logprobs: bool = False
    """Whether some chunks need the log-probabilities of their tokens."""

    @classmethod
    def of(cls, requests: Iterable[Request], *, prompt_logprobs: bool = False) -> StepOptions:
        """Returns the options that serve all of these requests."""
        requests = list(requests)
        return cls(
            sampling=_sampling_mode(requests),
            top_logprobs=any(r.logprobs for r in requests),
            penalties=any(r.has_penalties for r in requests),
            masks=any(r.allowed is not None for r in requests),
            prompt_logprobs=prompt_logprobs,
        )


def _sampling_mode(requests: list[Request]) -> SamplingMode:
    sampled = [request for request in requests if request.temperature]
    if not sampled:
        return "greedy"
    return "sampled" if any(request.has_filters for request in sampled) else "unfiltered"

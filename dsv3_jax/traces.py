"""Request traces that serving is measured with, made from fixed seeds.

Prompt and output lengths are log-normal, as in public chat traces, or fixed, and arrivals are
Poisson. In the ``prefixed`` trace every prompt begins with one of eight shared prefixes, as system
prompts do. The same arguments always give the same trace, so that several engines can be measured
with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

_SPECIAL_IDS = 10  # ids at both ends of a vocabulary that prompts avoid: most are special tokens
_FAMILY_SEED = 10**6  # first seed of shared prefixes, after those of requests


@dataclasses.dataclass(frozen=True)
class TracedRequest:
    """One request of a trace, without the ids of its prompt."""

    prompt_tokens: int
    output_tokens: int  # tokens to generate, whatever the model predicts
    unit_arrival: float
    """Arrival time at a rate of one request per second. At rate r it arrives r times earlier."""
    prefix: int = 0  # tokens at the beginning of the prompt that its family shares
    family: int = -1  # number of the shared prefix, or -1


@dataclasses.dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival."""

    name: str
    seed: int
    requests: tuple[TracedRequest, ...]

    def prompt(self, index: int, vocab_size: int) -> list[int]:
        """Returns the prompt of a request as token ids. They depend on the trace, the index and the
        vocabulary alone, and avoid the first and last ten ids. Raises ValueError if there are no
        others."""
        if vocab_size <= 2 * _SPECIAL_IDS:
            raise ValueError(
                f"vocab_size: expected more than {2 * _SPECIAL_IDS} ids, got {vocab_size}"
            )
        request = self.requests[index]

        def ids(seed: int, count: int) -> np.ndarray:
            random = np.random.default_rng([self.seed, seed])
            return random.integers(_SPECIAL_IDS, vocab_size - _SPECIAL_IDS, count)

        prompt = ids(index, request.prompt_tokens)
        if request.prefix:
            prompt[: request.prefix] = ids(_FAMILY_SEED + request.family, request.prefix)
        return prompt.tolist()


def chat(count: int = 768, seed: int = 11) -> Trace:
    """Returns prompts of 16 to 4,096 tokens (median 400) with outputs of 8 to 1,024 (median 200).
    Nothing is shared."""
    random = np.random.default_rng(seed)
    prompts = _lognormal(random, count, median=400, sigma=0.9, least=16, most=4096)
    outputs = _lognormal(random, count, median=200, sigma=0.7, least=8, most=1024)
    arrivals = _arrivals(random, count)
    return Trace("chat", seed, tuple(map(TracedRequest, prompts, outputs, arrivals)))


def prefixed(count: int = 512, seed: int = 12, families: int = 8, prefix: int = 1536) -> Trace:
    """Returns prompts that begin with one of ``families`` prefixes of ``prefix`` tokens and
    continue with 16 to 600 tokens of their own. Outputs have 8 to 400 tokens. Both medians are 100.
    """
    random = np.random.default_rng(seed)
    family = random.integers(0, families, count).tolist()
    own = _lognormal(random, count, median=100, sigma=0.6, least=16, most=600)
    outputs = _lognormal(random, count, median=100, sigma=0.6, least=8, most=400)
    arrivals = _arrivals(random, count)
    return Trace(
        "prefixed",
        seed,
        tuple(
            TracedRequest(prefix + tokens, output, arrival, prefix, number)
            for tokens, output, arrival, number in zip(own, outputs, arrivals, family, strict=True)
        ),
    )


def fixed(prompt_tokens: int, output_tokens: int, count: int = 1000, seed: int = 13) -> Trace:
    """Returns requests of equal lengths. Nothing is shared."""
    arrivals = _arrivals(np.random.default_rng(seed), count)
    requests = (TracedRequest(prompt_tokens, output_tokens, arrival) for arrival in arrivals)
    return Trace("fixed", seed, tuple(requests))


TRACES: dict[str, Callable[[], Trace]] = {"chat": chat, "prefixed": prefixed}


def _lognormal(
    random: np.random.Generator, count: int, *, median: float, sigma: float, least: int, most: int
) -> list[int]:
    values = median * np.exp(sigma * random.standard_normal(count))
    return np.clip(np.rint(values), least, most).astype(int).tolist()


def _arrivals(random: np.random.Generator, count: int) -> list[float]:
    # Six decimals, so that a trace written to JSON is the same trace.
    return [round(float(t), 6) for t in np.cumsum(random.exponential(1, count))]

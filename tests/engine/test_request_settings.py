"""What a request of the engine can ask, and that others do not notice."""

from __future__ import annotations

from typing import Any

import pytest

from dsv3_jax.engine import Engine
from dsv3_jax.generation.completion import Completion
from dsv3_jax.generation.generator import Generator
from tests.engine.conftest import MAX_LEN
from tests.engine.test_engine import make, run, trace

# One kind of program serves all of them: each has a penalty or a bias, and a mask.
REQUESTS: list[dict[str, Any]] = [
    {"presence_penalty": -2.0, "frequency_penalty": 0.3, "banned_tokens": [9]},
    {"repetition_penalty": 0.4, "allowed_tokens": range(60)},
    {"logit_bias": {9: 3.0, 10: -100.0}, "banned_tokens": range(100, 160)},
    {"min_tokens": 9, "ignore_eos": False, "banned_tokens": [11]},
    {"allowed_tokens": [5, 33, 64, 159], "frequency_penalty": 1.0},
    {"repetition_penalty": 0.3, "frequency_penalty": -0.5, "banned_tokens": [5]},
]

Asked = tuple[list[int], int, dict[str, Any]]


def asked(count: int, **settings: Any) -> list[Asked]:
    """Prompts, numbers of new tokens and settings."""
    return [
        (t.prompt, max(t.max_new_tokens, 9), {"ignore_eos": True, **REQUESTS[i % 6], **settings})
        for i, t in enumerate(trace(count, seed=3))
        if len(t.prompt) <= MAX_LEN - 9
    ]


def check(engine: Engine, generator: Generator, requests: list[Asked]) -> list[Completion]:
    """Compares the engine's completions with the Generator's, and returns them."""
    handles = [engine.submit(p, max_new_tokens=new, **settings) for p, new, settings in requests]
    run(engine)
    completions = [handle.result(0) for handle in handles]
    for got, (prompt, new, settings) in zip(completions, requests, strict=True):
        (want,) = generator.generate([prompt], max_new_tokens=new, **settings)
        assert got.tokens == want.tokens, settings
        assert got.finish_reason == want.finish_reason
        assert got.logprobs == pytest.approx(want.logprobs, abs=2e-5)
    return completions


def test_tokens_are_those_of_the_generator(tiny_mtp, alone):
    prompts = [[5, 6, 7, 8], [9, 10], [30, 31, 32], [7, 7, 7]]
    new = [12, 20, 9, 15]
    settings = [{"ignore_eos": True, **REQUESTS[i]} for i in range(4)]
    check(make(tiny_mtp), alone, list(zip(prompts, new, settings, strict=True)))


@pytest.mark.slow
def test_with_preemptions_and_drafts(tiny_mtp, alone):
    """Every position counts the drafts before it."""
    engine = make(tiny_mtp, draft="mtp", cache_tokens=16 * 9, page_size=16)
    completions = check(engine, alone, asked(14))
    assert engine.stats().preemptions > 0
    assert sum(sum(c.speculation.accepted) for c in completions) > 0


@pytest.mark.slow
def test_requests_without_adjustments_beside_others(tiny_mtp, alone):
    """Steps with them, and later steps without, run in different programs."""
    engine = make(tiny_mtp)
    plain: Asked = ([5, 6, 7], 30, {"ignore_eos": True})
    penalized: Asked = ([5, 6, 7], 12, {"ignore_eos": True, "presence_penalty": -2.0})
    check(engine, alone, [plain])
    programs = engine._executor.programs
    assert not any(shape.penalties or shape.mask_words for shape in programs._compiled)
    check(engine, alone, [plain, penalized])
    assert any(shape.penalties and not shape.mask_words for shape in programs._compiled)

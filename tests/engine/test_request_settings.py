"""Settings of a request of the engine, which other requests do not notice."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any

import numpy as np
import pytest

from dsv3_jax.engine import Engine, QueueFullError, RequestError
from dsv3_jax.engine.requests.delivery import output_of
from dsv3_jax.generation.completion import Completion
from dsv3_jax.offline.generator import Generator
from tests.engine.conftest import MAX_LEN
from tests.engine.test_engine import make, run, trace
from tests.support.running import forward

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


@pytest.mark.slow
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
    assert sum(sum(c.speculation.accepted) for c in completions if c.speculation) > 0


@pytest.mark.slow
def test_requests_without_adjustments_beside_others(tiny_mtp, alone):
    """Steps with them, and later steps without, run in different programs."""
    engine = make(tiny_mtp)
    plain: Asked = ([5, 6, 7], 30, {"ignore_eos": True})
    penalized: Asked = ([5, 6, 7], 12, {"ignore_eos": True, "presence_penalty": -2.0})
    check(engine, alone, [plain])
    programs = engine._executor.programs
    assert not any(shape.options.penalties or shape.options.masks for shape in programs._compiled)
    check(engine, alone, [plain, penalized])
    assert any(shape.options.penalties and not shape.options.masks for shape in programs._compiled)


class TestPromptLogprobs:
    @pytest.mark.slow
    def test_those_of_a_forward_pass(self, tiny_mtp):
        """In several chunks, twice, since a prefix hit would leave some out."""
        engine = make(tiny_mtp, page_size=16)
        prompt = [*range(5, 45)]
        settings = {"max_new_tokens": 3, "ignore_eos": True}
        first = engine.submit(prompt, prompt_logprobs=3, **settings)
        run(engine)
        again = engine.submit(prompt, prompt_logprobs=0, **settings)
        plain = engine.submit(prompt, **settings)
        single = engine.submit([9], prompt_logprobs=2, **settings)
        run(engine)
        logits = np.asarray(forward(tiny_mtp, [prompt])[0])[0].astype(np.float64)
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        want = log_p[np.arange(39), prompt[1:]]
        for handle in (first, again):
            got: Any = handle.result(0).prompt_logprobs
            assert got[0] is None
            np.testing.assert_allclose(got[1:], want, atol=2e-5)
            assert handle.result(0).cached_tokens == 0
        top: Any = first.result(0).prompt_top_logprobs
        assert top[0] is None
        order = np.argsort(-log_p[:-1], axis=-1)[:, :3]
        assert [[token for token, _ in pairs] for pairs in top[1:]] == order.tolist()
        values = [[value for _, value in pairs] for pairs in top[1:]]
        np.testing.assert_allclose(values, np.take_along_axis(log_p[:-1], order, 1), atol=2e-5)
        assert again.result(0).prompt_top_logprobs == [None, *[[]] * 39]
        assert plain.result(0).prompt_logprobs is None
        assert plain.result(0).cached_tokens == 32
        assert single.result(0).prompt_logprobs == [None]
        tokens = [handle.result(0).tokens for handle in (first, again, plain)]
        assert tokens[0] == tokens[1] == tokens[2]

    @pytest.mark.slow
    def test_with_preemptions_and_drafts(self, tiny_mtp):
        engine = make(tiny_mtp, draft="mtp", cache_tokens=16 * 9, page_size=16)
        prompts = [[(7 * i + j) % 150 + 2 for j in range(30 + 9 * i)] for i in range(4)]
        settings = {"prompt_logprobs": 1, "max_new_tokens": 30, "ignore_eos": True}
        handles = engine.submit_all(prompts, **settings)
        run(engine)
        assert engine.stats().preemptions > 0
        for handle, prompt in zip(handles, prompts, strict=True):
            logits = np.asarray(forward(tiny_mtp, [prompt])[0])[0].astype(np.float64)
            log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            want = log_p[np.arange(len(prompt) - 1), prompt[1:]]
            got: Any = handle.result(0).prompt_logprobs
            np.testing.assert_allclose(got[1:], want, atol=2e-5)

    def test_the_generator_has_none(self, alone, tiny_mtp):
        with pytest.raises(TypeError, match="prompt_logprobs"):
            alone.generate([[5]], prompt_logprobs=1)
        with pytest.raises(ValueError, match="prompt_logprobs: expected an integer from 0 to 20"):
            make(tiny_mtp).submit([5], prompt_logprobs=21)


class TestSubmitAll:
    @pytest.mark.slow
    def test_completions_of_a_prompt_share_its_pages(self, tiny_mtp, alone):
        """All are admitted in the same step, and the full pages are prefilled once."""
        engine = make(tiny_mtp, page_size=16)
        prompt = [*range(5, 45)]  # two pages and eight tokens
        handles = engine.submit_all([prompt], n=3, max_new_tokens=4, ignore_eos=True)
        run(engine)
        completions = [handle.result(0) for handle in handles]
        assert [c.cached_tokens for c in completions] == [0, 32, 32]
        assert engine.stats().prompt_tokens == 40 + 8 + 8
        (want,) = alone.generate([prompt], max_new_tokens=4, ignore_eos=True)
        assert [c.tokens for c in completions] == [want.tokens] * 3

    @pytest.mark.slow
    def test_each_prompt_has_its_settings_and_seed(self, tiny_mtp, alone):
        engine = make(tiny_mtp, page_size=16)
        settings: dict[str, Any] = {
            "max_new_tokens": [3, 5],
            "temperature": 0.9,
            "seed": [7, 40],
            "ignore_eos": True,
        }
        prompts = [[5, 6], [7, 8, 9]]
        handles = engine.submit_all(prompts, n=2, **settings)
        run(engine)
        wanted = alone.generate(prompts, n=2, **settings)
        assert [h.result(0).tokens for h in handles] == [c.tokens for c in wanted]

    def test_all_or_none(self, tiny_mtp):
        engine = make(tiny_mtp, max_waiting=3, cache_tokens=64, page_size=16)
        with pytest.raises(ValueError, match="requests: expected at most 3"):
            engine.submit_all([[5], [6]], n=2, max_new_tokens=8)
        with pytest.raises(ValueError, match="request: expected at most 64 tokens"):
            engine.submit_all([[5], [6] * 60], max_new_tokens=[2, 30])
        with pytest.raises(ValueError, match="temperature: expected"):
            engine.submit_all([[5], [6]], temperature=[0.0, -1.0])
        engine.submit_all([[5], [6]], max_new_tokens=8)
        with pytest.raises(QueueFullError, match="expected fewer than 2 requests, got 2"):
            engine.submit_all([[5], [6]], max_new_tokens=8)
        assert engine.stats().waiting == 2
        with pytest.raises(ValueError, match="got 2; submit_all takes several"):
            engine.submit([5], n=2)

    @pytest.mark.slow
    def test_requests_without_seeds_differ(self, tiny_mtp):
        engine = make(tiny_mtp)
        a = engine.submit_all([5], n=2, temperature=2.0, max_new_tokens=8)
        b = engine.submit([5], temperature=2.0, max_new_tokens=8)
        run(engine)
        assert len({tuple(h.result(0).tokens) for h in (*a, b)}) == 3

    def test_engines_begin_with_different_seeds(self, tiny_mtp, monkeypatch, caplog):
        """Neither two replicas nor one before and after a restart sample the same texts. With the
        seeds that the log shows, a run can be repeated."""
        caplog.set_level(logging.INFO, "dsv3_jax.engine.requests.intake")
        settings = {"temperature": 2.0, "max_new_tokens": 8, "ignore_eos": True}
        engines = [make(tiny_mtp) for _ in range(2)]
        assert engines[0].first_seed != engines[1].first_seed
        lines = [
            r.getMessage() for r in caplog.records if r.name == "dsv3_jax.engine.requests.intake"
        ]
        for line, engine in zip(lines, engines, strict=True):
            assert line == f"completions without a seed have the seeds from {engine.first_seed} on"
        handles = engines[0].submit_all([[5], [6]], n=2, **settings)
        handles.append(engines[0].submit([5], **settings))
        seeds = [(engines[0].first_seed + i) % 2**32 for i in range(5)]
        again = [
            engines[1].submit(prompt, seed=seed, **settings)
            for prompt, seed in zip([[5], [5], [6], [6], [5]], seeds, strict=True)
        ]
        fresh = engines[1].submit_all([[5], [6]], n=2, **settings)
        for engine in engines:
            run(engine)
        texts = [[h.result(0).tokens for h in each] for each in (handles, again, fresh)]
        assert texts[0] == texts[1]
        assert texts[2] != texts[0][:4]
        monkeypatch.setattr(secrets, "randbelow", lambda count: count - 1)
        read = make(tiny_mtp)._intake.read([[5]], {"n": 3})
        assert [request.seed for request in read] == [2**32 - 1, 0, 1]


class TestIsolation:
    def test_a_tokenizer_that_fails_on_one_request(self, tiny_mtp, alone, monkeypatch):
        engine = make(tiny_mtp)
        good, bad = [engine.submit(p, max_new_tokens=6, ignore_eos=True) for p in ([5], [9, 9])]
        outputs = map(output_of, engine._loop._scheduler.unfinished)
        (output,) = (each for each in outputs if each.handle is bad)
        monkeypatch.setattr(output._tracker, "extend", lambda tokens: 1 / 0)
        run(engine)
        with pytest.raises(RequestError, match="division by zero"):
            bad.result(0)
        (want,) = alone.generate([[5]], max_new_tokens=6, ignore_eos=True)
        assert good.result(0).tokens == want.tokens

    def test_a_reader_whose_event_loop_is_closed(self, tiny_mtp):
        engine = make(tiny_mtp)
        request = engine.submit([5, 6], max_new_tokens=5, ignore_eos=True)

        async def begin() -> Any:
            pieces: Any = aiter(request)
            step = anext(pieces)
            step.send(None)  # until it waits for the first piece
            return pieces, step

        loop = asyncio.new_event_loop()
        unfinished = loop.run_until_complete(begin())
        loop.close()
        run(engine)
        assert len(request.result(0).tokens) == 5
        del unfinished

"""Grammars: tokens that may come next depend on those before, and nobody else notices."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.engine import Engine, RequestError
from dsv3_jax.engine.device.state import REWIND_SEED, SlotRows
from dsv3_jax.engine.device.step_input import StepOptions, empty_input
from dsv3_jax.engine.requests.grammar import GrammarTracker
from dsv3_jax.generation.completion import FULL, RUNNING, STOPPED
from dsv3_jax.generation.request import TokenMask
from dsv3_jax.model import DeepSeekV3
from tests.engine.conftest import BUCKETS
from tests.engine.test_engine import make, run
from tests.generation.test_lossless import load_small
from tests.support.running import forward

W = 160
EVEN, ODD, END = [*range(20, 40, 2)], [*range(21, 41, 2)], 1


class Alternating:
    """Even and odd tokens in turn. After ``length`` of them the text has to end with END."""

    vocab_size, sets = W, (EVEN, ODD)

    def __init__(self, length: int):
        self.length = length
        self.tokens: list[int] = []

    def mask(self) -> np.ndarray:
        if len(self.tokens) == self.length:
            return TokenMask.of(self.vocab_size, [END]).words
        # Signed integers, as llguidance has them.
        return TokenMask.of(self.vocab_size, self.sets[len(self.tokens) % 2]).words.view(np.int32)

    def accept(self, token: int) -> None:
        assert token in self.sets[len(self.tokens) % 2]
        self.tokens.append(token)


class Failing(Alternating):
    """Fails after ``length`` tokens: when they are accepted, or when the next mask is needed."""

    def __init__(self, length: int, where: str):
        super().__init__(length)
        self.where = where

    def mask(self) -> np.ndarray:
        if len(self.tokens) == self.length:
            if self.where == "mask":
                raise KeyError("no such rule")
            empty = TokenMask.of(W, []).words
            return empty if self.where == "empty" else empty[:2]
        return super().mask()

    def accept(self, token: int) -> None:
        super().accept(token)
        if self.where == "accept" and len(self.tokens) == self.length:
            raise KeyError("no such rule")


PLAIN = [([5, 6, 7], 20), ([9], 30), ([3] * 40, 14)]


def submit_plain(engine: Engine):
    return [engine.submit(p, max_new_tokens=new, ignore_eos=True) for p, new in PLAIN]


@pytest.fixture(scope="module")
def engine(tiny_mtp) -> Engine:
    return make(tiny_mtp)


@pytest.fixture(scope="module")
def plain_tokens(alone) -> list[list[int]]:
    prompts, new = map(list, zip(*PLAIN, strict=True))
    return [c.tokens for c in alone.generate(prompts, max_new_tokens=new, ignore_eos=True)]


@pytest.mark.slow
def test_tokens_follow_the_grammar_beside_other_requests(engine, plain_tokens, alone):
    plain = submit_plain(engine)
    grammars = [Alternating(7), Alternating(0), Alternating(50)]
    settings = {"stop_tokens": [END], "max_new_tokens": 12}
    handles = engine.submit_all([[5, 6, 7], [8], [9, 9]], grammars=grammars, **settings)
    run(engine)
    assert [handle.result(0).tokens for handle in plain] == plain_tokens
    completions = [handle.result(0) for handle in handles]
    for completion, grammar in zip(completions, grammars, strict=True):
        assert completion.tokens[:-1] == grammar.tokens
        assert (completion.tokens[-1] == END) == (completion.finish_reason == "stop")
    assert [len(c.tokens) for c in completions] == [8, 1, 12]
    assert [c.finish_reason for c in completions] == ["stop", "stop", "length"]
    # The first token is the most probable even one.
    (first,) = alone.generate([[5, 6, 7]], max_new_tokens=1, allowed_tokens=EVEN)
    assert completions[0].tokens[0] == first.tokens[0]


@pytest.mark.parametrize("where", ["mask", "empty", "size", "accept"])
@pytest.mark.parametrize("length", [0, 3])
def test_a_failing_grammar_ends_its_request_alone(engine, plain_tokens, where, length):
    if where == "accept" and not length:
        length = 1  # nothing is accepted before
    plain = submit_plain(engine)
    broken = engine.submit([5, 6], max_new_tokens=9, grammar=Failing(length, where))
    waiting = engine.submit([5, 6], max_new_tokens=9, grammar=Alternating(9))
    run(engine)
    message = {
        "mask": "no such rule",
        "accept": "no such rule",
        "empty": f"expected a token that may come after {length} new ones, got none",
        "size": r"mask: expected 5 integers of 32 bits, got uint32 \(2,\)",
    }
    with pytest.raises(RequestError, match=message[where]) as error:
        broken.result(0)
    assert error.value.__cause__ is not None
    assert [handle.result(0).tokens for handle in plain] == plain_tokens
    assert len(waiting.result(0).tokens) == 9
    assert engine.stats().cache_usage == 0.0


@pytest.mark.slow
def test_with_preemptions_and_drafts_of_others(tiny_mtp, plain_tokens):
    engine = make(tiny_mtp, draft="mtp", cache_tokens=16 * 9, page_size=16)
    plain = submit_plain(engine)
    handles = [
        engine.submit([5] * (20 * i + 3), max_new_tokens=40, grammar=Alternating(60), min_tokens=2)
        for i in range(3)
    ]
    run(engine)
    assert [handle.result(0).tokens for handle in plain] == plain_tokens
    for handle in handles:
        tokens = handle.result(0).tokens
        assert len(tokens) == 40
        assert all(token in [EVEN, ODD][i % 2] for i, token in enumerate(tokens))
        assert sum(handle.result(0).speculation.drafted) > 30
    assert engine.stats().preemptions > 0


class OfSix(Alternating):
    """Few tokens are allowed, so that some drafts are accepted."""

    vocab_size, sets = 32, ([2, 4, 6], [3, 5, 7])


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> DeepSeekV3:
    return load_small(tmp_path_factory.mktemp("small"), OfSix.vocab_size)


def make_small(model: DeepSeekV3, **options) -> Engine:
    return Engine(model, None, 48, max_running=4, background=False, buckets=BUCKETS, **options)


@pytest.fixture
def refused(monkeypatch) -> list[int]:
    """Numbers of tokens that grammars refuse."""
    counts: list[int] = []
    accept = GrammarTracker.accept

    def counting(self, tokens, *, ends):
        count = accept(self, tokens, ends=ends)
        counts.append(len(tokens) - count)
        return count

    monkeypatch.setattr(GrammarTracker, "accept", counting)
    return counts


FEW_PAGES = {"cache_tokens": 56}
DRAFTING = [
    {},
    # Refused tokens are on the device while a request is preempted.
    pytest.param(FEW_PAGES, marks=pytest.mark.slow),
    pytest.param(FEW_PAGES | {"deterministic": True}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", DRAFTING)
def test_greedy_tokens_with_drafts(small, refused, options):
    """They are the most probable ones that the grammar allows, by a whole forward pass."""
    engine = make_small(small, draft="ngram", draft_depth=2, page_size=4, **options)
    prompts = [[2, 3, 5, 6, 2, 3], [7], [0, 4, 4, 4, 1, 2, 3, 4, 5, 6], [2, 3]]
    grammars = [OfSix(50), OfSix(9), OfSix(50)]
    settings = {"max_new_tokens": 24, "stop_tokens": [END], "ignore_eos": True}
    handles = engine.submit_all(prompts[:3], grammars=grammars, **settings)
    handles.append(engine.submit(prompts[3], max_new_tokens=24, ignore_eos=True))
    run(engine)
    completions = [handle.result(0) for handle in handles]
    assert [len(c.tokens) for c in completions] == [24, 10, 24, 24]
    padded = np.zeros((4, 34), np.int32)
    for row, prompt, completion in zip(padded, prompts, completions, strict=True):
        row[: len(prompt) + len(completion.tokens)] = [*prompt, *completion.tokens]
    logits = np.asarray(jax.nn.log_softmax(forward(small, padded)[0]))
    for b, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        for i, token in enumerate(completion.tokens):
            values = logits[b, len(prompt) - 1 + i]
            allowed = np.array(OfSix.sets[i % 2] if b < 3 else range(32))
            if token != END:
                assert token == allowed[np.argmax(values[allowed])]
            assert completion.logprobs[i] == pytest.approx(values[token], abs=1e-5)
    assert sum(sum(c.speculation.accepted) for c in completions[:3]) > 0
    assert sum(refused) > 0
    assert bool(engine.stats().preemptions) == ("cache_tokens" in options)


def test_no_drafts_where_filters_need_the_mask(small):
    engine = make_small(small, draft="ngram")
    for settings, has_drafts in (
        ({"temperature": 1.0, "top_p": 0.9}, False),
        ({"temperature": 1.0, "top_k": 3}, False),
        ({"temperature": 1.0, "min_p": 0.1}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.0, "top_p": 0.9}, True),
    ):
        handle = engine.submit([2, 3, 2], grammar=OfSix(1), max_new_tokens=1, **settings)
        run(engine)
        assert (handle.result(0).speculation is not None) == has_drafts


def test_refusals(engine):
    with pytest.raises(ValueError, match=r"grammar: expected an object with mask\(\) and accept"):
        engine.submit([5], grammar=object())
    same = Alternating(3)
    with pytest.raises(ValueError, match="another object for each completion, got one twice"):
        engine.submit_all([5], n=2, grammars=[same, same])
    with pytest.raises(ValueError, match="grammars: expected 2, one for each completion, or none"):
        engine.submit_all([5], n=2, grammars=[same])
    assert engine.stats().waiting == 0


def test_rewind_changes_its_requests_alone(small):
    """Slots 1 and 3 of four lose one and two tokens. They run on, with another seed."""
    engine = make_small(small, draft="mtp", draft_depth=2)
    shape = engine._executor.programs.shape(4, 0, StepOptions(masks=True))
    rows = jnp.arange(4)
    state = dataclasses.replace(
        engine._executor._launcher.state,
        lengths=10 + rows,
        finished=jnp.array([RUNNING, STOPPED, FULL, RUNNING]),
        num_mtp_inputs=jnp.array([1, 3, 2, 3]),
    )
    _, (inputs,) = empty_input(shape, 4)
    inputs.decode_slots[:3] = [2, 3, 1]
    inputs.rewinds[:3] = [0, 2, 1]
    rewound = state.rewind(jax.tree.map(jnp.asarray, inputs), SlotRows(None))
    assert rewound.lengths.tolist() == [10, 10, 12, 11]
    assert rewound.finished.tolist() == [RUNNING, RUNNING, FULL, RUNNING]
    assert rewound.num_mtp_inputs.tolist() == [1, 2, 2, 1]
    assert rewound.sampling.seed.tolist() == [0, REWIND_SEED, 0, REWIND_SEED]
    others = ("tokens", "limits", "mtp_inputs")
    for name in others:
        np.testing.assert_array_equal(getattr(rewound, name), getattr(state, name))

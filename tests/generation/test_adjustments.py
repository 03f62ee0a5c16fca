"""Penalties, biases and excluded tokens, against a loop in NumPy over whole forward passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.adjustments import Adjustments, adjust_logits
from dsv3_jax.generation.request import Request, TokenMask
from tests.generation.packing import adjustments_of, empty_penalties

PROMPT = [5, 6, 7, 8, 5]
# Random weights repeat nothing by themselves, so that penalties reward repetition here.
SETTINGS: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": -1.5},
    "repetition": {"repetition_penalty": 0.2},
    "bias": {"logit_bias": {9: 3.0, 10: -100.0, 31: 2.5}},
    "allowed": {"allowed_tokens": [1, 33, 64, 65, 151], "banned_tokens": [64]},
    "banned": {"banned_tokens": [*range(20), *range(40, 120)]},
    "all": {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.7,
        "repetition_penalty": 0.6,
        "logit_bias": {9: 1.0, 21: 2.0},
        "banned_tokens": range(100, 160),
    },
}


def adjusted(
    logits: np.ndarray,
    generated: list[int],
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: dict[int, float] | None = None,
    allowed_tokens: Any = None,
    banned_tokens: Any = (),
    prompt: list[int] = PROMPT,
) -> np.ndarray:
    """The definition in the module's docstring, one token at a time."""
    counts = Counter(generated)
    result = logits.astype(np.float64)
    for i, x in enumerate(result):
        x += (logit_bias or {}).get(i, 0.0)
        if i in prompt or counts[i]:
            x = x / repetition_penalty if x > 0 else x * repetition_penalty
        x -= frequency_penalty * counts[i] + presence_penalty * (counts[i] > 0)
        if i in banned_tokens or (allowed_tokens is not None and i not in allowed_tokens):
            x = -np.inf
        result[i] = x
    return result


def greedy(forward, vocab_size: int, new: int, **settings: Any) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(new):
        logits = forward(tokens)[-1][:vocab_size]
        tokens.append(int(np.argmax(adjusted(logits, tokens[len(PROMPT) :], **settings))))
    return tokens[len(PROMPT) :]


def test_greedy_tokens_of_every_setting(bare, forward):
    """All settings in one batch, next to a request without any."""
    names = list(SETTINGS)
    plain = greedy(forward, 160, 12)
    for first in range(0, len(names), 3):
        chosen = names[first : first + 3]
        columns: dict[str, list[Any]] = {
            "presence_penalty": [SETTINGS[n].get("presence_penalty", 0) for n in chosen],
            "frequency_penalty": [SETTINGS[n].get("frequency_penalty", 0) for n in chosen],
            "repetition_penalty": [SETTINGS[n].get("repetition_penalty", 1) for n in chosen],
            "logit_bias": [SETTINGS[n].get("logit_bias") for n in chosen],
            "allowed_tokens": [SETTINGS[n].get("allowed_tokens", range(160)) for n in chosen],
            "banned_tokens": [SETTINGS[n].get("banned_tokens", ()) for n in chosen],
        }
        nothing = [0, 0, 1, None, range(160), ()]
        columns = {k: [*v, zero] for (k, v), zero in zip(columns.items(), nothing, strict=True)}
        prompts = [PROMPT] * (len(chosen) + 1)
        out = bare.generate(prompts, max_new_tokens=12, ignore_eos=True, **columns)
        for name, completion in zip(chosen, out, strict=False):
            want = greedy(forward, 160, 12, **SETTINGS[name])
            assert completion.tokens == want, name
            assert want != plain, f"{name} changes nothing"
        assert out[-1].tokens == plain


def test_log_probabilities_are_the_models_own(bare, forward):
    (completion,) = bare.generate([PROMPT], max_new_tokens=3, ignore_eos=True, **SETTINGS["all"])
    logits = forward([*PROMPT, *completion.tokens])[len(PROMPT) - 1 : -1].astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    want = log_p[np.arange(3), completion.tokens]
    np.testing.assert_allclose(completion.logprobs, want, atol=2e-5)


@pytest.mark.slow
def test_min_tokens_excludes_stop_tokens(bare):
    (free,) = bare.generate([PROMPT], max_new_tokens=12, ignore_eos=True)
    stop = free.tokens[2]
    settings = {"max_new_tokens": 12, "stop_tokens": [stop], "ignore_eos": True}
    assert len(bare.generate([PROMPT], **settings)[0].tokens) == 3
    (later,) = bare.generate([PROMPT], min_tokens=3, **settings)
    assert later.tokens[:2] == free.tokens[:2]
    assert stop not in later.tokens[:3]
    (exact,) = bare.generate([PROMPT], min_tokens=2, **settings)
    assert exact.tokens == free.tokens[:3]
    assert exact.finish_reason == "stop"


@pytest.mark.slow
def test_min_tokens_ignores_stop_strings_that_begin_before(generator):
    (free,) = generator.generate("ab", max_new_tokens=10, ignore_eos=True)
    stop = free.text[1]
    first = free.text.index(stop)
    for min_tokens in range(11):
        settings = {"stop": stop, "min_tokens": min_tokens, "ignore_eos": True}
        (got,) = generator.generate("ab", max_new_tokens=10, **settings)
        head = len(generator.tokenizer.decode(free.tokens[:min_tokens]).rstrip("\ufffd"))
        position = free.text.find(stop, max(head, first))
        assert got.text == (free.text if position < 0 else free.text[:position])


class TestDrafts:
    """Position t counts the drafts before it."""

    W, K = 40, 3

    @pytest.mark.slow
    def test_greedy_tokens_are_those_without_drafts(self, bare):
        settings = {
            "presence_penalty": [0.5, -2.0, 0.0, 0.0],
            "frequency_penalty": [-0.5, 0.0, 0.0, 1.0],
            "repetition_penalty": [1.0, 0.5, 1.0, 0.7],
            "min_tokens": [0, 0, 5, 9],
            "max_new_tokens": 30,
        }
        prompts = [PROMPT, [9, 8, 7], PROMPT * 2, [11]]
        plain = bare.generate(prompts, **settings)
        drafted = bare.generate(prompts, draft="ngram", draft_depth=2, **settings)
        assert [c.tokens for c in drafted] == [c.tokens for c in plain]
        assert drafted.stats.accepted > 0

    def test_equal_to_appending_them(self):
        random = np.random.default_rng(0)
        prompts = [[3, 4], [5, 6, 7]]
        requests = [
            Request(tuple(prompts[0]), frequency_penalty=0.5, presence_penalty=1.0, min_tokens=2),
            Request(
                tuple(prompts[1]),
                repetition_penalty=1.7,
                logit_bias=((6, -4.0),),
                allowed=TokenMask.of(self.W, banned=[8, 39]),
            ),
        ]
        known = [[3, 4, 9, 9], [5, 6, 7, 9, 8]]
        drafts = np.array([[9, 2, 2], [5, 9, 9]], np.int32)
        logits = random.standard_normal((2, self.K + 1, self.W)).astype(np.float32) * 3
        tokens = np.full((2, 8), 11, np.int32)  # 11 past the length must not count
        for row, ids in enumerate(known):
            tokens[row, : len(ids)] = ids
        adjustments = adjustments_of(requests, self.W)
        stops = np.array([[7, -1], [1, -1]], np.int32)
        got = np.asarray(
            jax.jit(adjust_logits)(
                jnp.array(logits),
                adjustments,
                jnp.array(tokens),
                jnp.array([4, 5], jnp.int32),
                jnp.array(stops),
                jnp.array(drafts),
            )
        )
        for row, request in enumerate(requests):
            for t in range(self.K + 1):
                generated = [*known[row][len(prompts[row]) :], *drafts[row, :t].tolist()]
                want = adjusted(
                    logits[row, t],
                    generated,
                    presence_penalty=request.presence_penalty,
                    frequency_penalty=request.frequency_penalty,
                    repetition_penalty=request.repetition_penalty,
                    logit_bias=dict(request.logit_bias),
                    banned_tokens=[8, 39] if row else [7] if len(generated) < 2 else [],
                    prompt=prompts[row],
                )
                np.testing.assert_allclose(got[row, t], want, rtol=1e-5, atol=1e-5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"presence_penalty": 2.1}, r"presence_penalty: expected a number in \[-2, 2\], got"),
            ({"frequency_penalty": "1"}, "frequency_penalty: expected a number"),
            ({"repetition_penalty": 0}, "repetition_penalty: expected a number"),
            ({"min_tokens": 5}, "min_tokens: expected at most max_new_tokens, 4, got 5"),
            ({"min_tokens": -1}, "min_tokens: expected an integer of at least 0, got -1"),
            ({"logit_bias": [1.0]}, "logit_bias: expected a mapping from ids to biases, got 1.0"),
            ({"logit_bias": {160: 1.0}}, "logit_bias: expected token ids from 0 to 159, got 160"),
            ({"logit_bias": {"5": 1.0}}, "logit_bias: expected token ids of at least 0, got '5'"),
            ({"logit_bias": {5: 101}}, r"logit_bias: expected biases in \[-100, 100\], got 101"),
            (
                {"logit_bias": dict.fromkeys(range(301), 1)},
                "logit_bias: expected at most 300 tokens, got 301",
            ),
            ({"allowed_tokens": []}, "allowed_tokens: expected at least one token"),
            ({"allowed_tokens": 5}, "allowed_tokens: expected token ids, got 5"),
            ({"banned_tokens": [160]}, "banned_tokens: expected token ids from 0 to 159, got 160"),
            ({"banned_tokens": range(160)}, "banned_tokens: expected at least one token"),
            (
                {"allowed_tokens": [9, 10], "banned_tokens": [9], "stop_tokens": [10]}
                | {"min_tokens": 1},
                "allowed_tokens: expected at least one token that may be generated, other than",
            ),
        ],
        ids=str,
    )
    def test_by_name(self, bare, settings, message):
        with pytest.raises(ValueError, match=message):
            bare.requests([PROMPT], **({"max_new_tokens": 4} | settings))

    def test_ids_that_only_pad_the_embedding(self, generator):
        size = generator.tokenizer.vocab_size
        with pytest.raises(ValueError, match="allowed_tokens: expected at least one token"):
            generator.requests("ab", allowed_tokens=[size])
        generator.requests("ab", allowed_tokens=[size - 1])

    def test_grammar_needs_an_engine(self, bare):
        with pytest.raises(TypeError, match="grammar"):
            bare.generate([PROMPT], grammar=object())


class TestTokenMask:
    def test_bits(self):
        mask = TokenMask.of(70, [0, 33, 69], [33])
        assert mask.words.tolist() == [1, 0, 1 << 5]
        assert mask
        assert not mask.without([0, 69])
        assert mask == TokenMask.of(70, [69, 0])
        assert mask & TokenMask.of(70, [0]) == TokenMask.of(70, [0])

    def test_all_but_a_few_does_not_reach_past_the_vocabulary(self):
        assert TokenMask.of(33, banned=[0]).words.tolist() == [2**32 - 2, 1]


def test_min_tokens_counts_the_drafts_before_a_position():
    """With three tokens known and a minimum of four, the first of two positions excludes the stop
    token."""
    penalties = empty_penalties(1)
    penalties.min_lengths[0] = 4
    adjusted = adjust_logits(
        jnp.zeros((1, 2, 8)),
        Adjustments(jax.tree.map(jnp.asarray, penalties)),
        jnp.array([[1, 2, 3, 0]]),
        jnp.array([3]),
        jnp.array([[5, -1]]),
        jnp.array([[6]]),
    )
    assert np.isneginf(adjusted[0, :, 5]).tolist() == [True, False]
    assert np.isfinite(np.delete(adjusted, 5, axis=2)).all()

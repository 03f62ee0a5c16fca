"""The end of requests: position, finish reason, text and tokens."""

import sys

import pytest

from dsv3_jax.generation.completion import Completion
from tests.generation.fragments import (
    EOS,
    FRAGMENTS,
    MAX_LEN,
    TURN,
    VOCAB_SIZE,
    as_text,
    letters,
    stop_by_hand,
)

PROMPT = letters("say something")
LONG = {"max_new_tokens": 60, "temperature": 1.0, "ignore_eos": True}
STRIDES = (1, 5, 16)


@pytest.fixture(scope="module")
def endless(generator) -> list[Completion]:
    """Completions for the seeds 0 to 15 without any stop token."""
    seeds = range(16)
    runs = list(generator.generate([PROMPT] * len(seeds), seed=seeds, **LONG))
    assert {run.finish_reason for run in runs} == {"length"}
    assert {len(run.tokens) for run in runs} == {60}
    return runs


def find_token(runs: list[Completion], token: int) -> tuple[int, int]:
    """Returns a seed whose completion contains the token, not near its ends, and its position."""
    return next(
        (seed, run.tokens.index(token))
        for seed, run in enumerate(runs)
        if token in run.tokens[3:-3] and token not in run.tokens[:3]
    )


def test_text_is_what_the_tokens_spell(endless):
    for run in endless:
        assert run.text == as_text(run.tokens)
        assert len(run.logprobs) == len(run.tokens)
    assert any(token < 3 for run in endless for token in run.tokens), "no special token to hide"


class TestTokens:
    def test_end_of_sequence(self, generator, endless):
        seed, position = find_token(endless, EOS)
        settings = LONG | {"ignore_eos": False, "seed": seed}
        out = generator.generate(PROMPT, **settings)[0]
        assert out.tokens == endless[seed].tokens[: position + 1]
        assert out.logprobs == endless[seed].logprobs[: position + 1]
        assert out.finish_reason == "stop"
        assert out.text == as_text(out.tokens[:-1])
        assert "eos" not in out.text

    def test_the_tokenizer_may_name_another_one(self, generator, endless, monkeypatch):
        token = endless[0].tokens[7]
        monkeypatch.setattr(generator.tokenizer, "eos_token_id", token)
        out = generator.generate(PROMPT, **LONG | {"ignore_eos": False, "seed": 0})[0]
        ends = [i for i, t in enumerate(endless[0].tokens) if t in (EOS, token)]
        assert out.tokens == endless[0].tokens[: ends[0] + 1]
        assert out.finish_reason == "stop"
        assert generator.generate(PROMPT, **LONG, seed=0)[0] == endless[0]

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_stop_tokens(self, generator, endless, ignore_eos):
        tokens = endless[3].tokens
        stop_tokens = [tokens[20], tokens[9], tokens[30]]
        ends = {*stop_tokens, *(() if ignore_eos else (EOS,))}
        position = next(i for i, token in enumerate(tokens) if token in ends)
        assert position > 0
        settings = LONG | {"ignore_eos": ignore_eos, "seed": 3}
        out = generator.generate(PROMPT, stop_tokens=stop_tokens, **settings)[0]
        assert out.tokens == tokens[: position + 1]
        assert out.text == as_text(out.tokens)  # a token that is not special has text
        assert out.finish_reason == "stop"

    def test_the_maximum_number_of_stop_tokens(self, generator, endless):
        tokens = endless[1].tokens
        absent = [i for i in range(3, VOCAB_SIZE) if i not in tokens[:11]][:7]
        out = generator.generate(PROMPT, stop_tokens=[*absent, tokens[10]], seed=1, **LONG)[0]
        assert out.tokens == tokens[: tokens.index(tokens[10]) + 1]

    def test_a_token_of_the_prompt_does_not_stop(self, generator, endless):
        used = set(endless[2].tokens)
        unused = [i for i in range(3, VOCAB_SIZE) if i not in used][:3]
        prompt = [*PROMPT, EOS, *PROMPT]
        plain = generator.generate(prompt, max_new_tokens=9, ignore_eos=True)[0]
        assert not {EOS, *unused} & set(plain.tokens), "this test needs another prompt"
        out = generator.generate(prompt, max_new_tokens=9, stop_tokens=[EOS, *unused])[0]
        assert out == plain

    def test_on_the_last_token_allowed(self, generator, endless):
        tokens = endless[4].tokens
        position = next(i for i in range(5, 60) if tokens[i] not in tokens[:i])
        settings = LONG | {"max_new_tokens": position + 1, "seed": 4}
        out = generator.generate(PROMPT, stop_tokens=[tokens[position]], **settings)[0]
        assert out.tokens == tokens[: position + 1]
        assert out.finish_reason == "stop"


class TestLength:
    def test_one_token(self, generator, endless):
        out = generator.generate(PROMPT, **LONG | {"max_new_tokens": 1}, seed=5)[0]
        assert out.tokens == endless[5].tokens[:1]
        assert out.finish_reason == "length"

    def test_room_in_the_cache(self, generator):
        """None takes all of it. So does the default if less than 64 tokens are left."""
        prompt = [(3 * i) % 150 for i in range(MAX_LEN - 9)]
        settings = LONG | {"max_new_tokens": None}
        out = generator.generate([prompt, PROMPT], **settings)
        assert [len(c.tokens) for c in out] == [9, MAX_LEN - len(PROMPT)]
        assert [c.finish_reason for c in out] == ["length", "length"]
        del settings["max_new_tokens"]
        by_default = generator.generate([prompt, PROMPT], **settings)
        assert [len(c.tokens) for c in by_default] == [9, 64]
        assert by_default[0] == out[0]
        mixed = generator.generate([prompt, PROMPT], **settings, max_new_tokens=[None, 3])
        assert [len(c.tokens) for c in mixed] == [9, 3]

    @pytest.mark.parametrize("limit", [10, 64, 10_000, sys.maxsize, 10**30])
    def test_more_than_the_room_is_refused(self, generator, limit):
        """Otherwise a completion would end early with the finish reason "length"."""
        prompt = [(3 * i) % 150 for i in range(MAX_LEN - 9)]
        for value in (limit, [limit, 5]):
            with pytest.raises(ValueError, match="max_new_tokens: expected at most 9 ") as error:
                generator.generate([prompt, PROMPT], **LONG | {"max_new_tokens": value})
            assert f"less a prompt of {MAX_LEN - 9} tokens" in str(error.value)
            assert str(error.value).endswith(f"got {limit}")

    def test_a_length_for_each_prompt(self, generator, endless):
        lengths = [1, 33, 7, 2]
        settings = LONG | {"max_new_tokens": lengths, "seed": range(4)}
        out = generator.generate([PROMPT] * 4, **settings)
        for n, got, whole in zip(lengths, out, endless, strict=False):
            assert got.tokens == whole.tokens[:n]
            assert got.logprobs == whole.logprobs[:n]
            assert got.text == as_text(got.tokens)


def inside_a_token(tokens: list[int]) -> str:
    """Returns the middle of a long token."""
    return next(FRAGMENTS[t] for t in tokens[4:] if FRAGMENTS[t].endswith(b"s "))[1:3].decode()


def spanning_two(tokens: list[int]) -> str:
    text = as_text(tokens)
    at = len(as_text(tokens[:8]).rstrip("\ufffd"))
    return text[at - 1 : at + 2]


def spanning_many(tokens: list[int]) -> str:
    return as_text(tokens)[10:22]


def never(tokens: list[int]) -> str:
    return as_text(tokens)[20:27] + "!"


def in_the_first(tokens: list[int]) -> str:
    return next(c for c in as_text(tokens[:1]) if c.isalpha())


STOPS = {
    "inside a token": (inside_a_token,),
    "across two": (spanning_two,),
    "across many": (spanning_many,),
    "never": (never,),
    "in the first": (in_the_first,),
    "several": (never, spanning_many, spanning_two, inside_a_token),
    "one inside another": (spanning_many, lambda tokens: spanning_many(tokens)[3:6]),
}


class TestStrings:
    @pytest.mark.parametrize("stride", STRIDES)
    @pytest.mark.parametrize("kind", STOPS)
    def test_against_stopping_by_hand(self, generator, endless, monkeypatch, kind, stride):
        monkeypatch.setattr(generator, "stride", stride)
        checked = 0
        for seed in (0, 6, 7, 8):
            tokens = endless[seed].tokens
            if kind == "in the first" and not any(c.isalpha() for c in as_text(tokens[:1])):
                continue
            stop = [make(tokens) for make in STOPS[kind]]
            text, expected = stop_by_hand(tokens, stop)
            out = generator.generate(PROMPT, stop=stop, seed=seed, **LONG)
            assert out[0].text == text, stop
            assert out[0].tokens == expected
            assert out[0].logprobs == endless[seed].logprobs[: len(expected)]
            stopped = len(expected) < len(tokens)
            assert out[0].finish_reason == ("stop" if stopped else "length")
            assert stopped == (kind != "never")
            # The text is checked after the first token, that of the prefill, then every stride.
            assert len(expected) <= out.stats.steps + 1 <= len(expected) + stride - 1
            assert not any(s in out[0].text for s in stop)
            checked += 1
        assert checked >= 2

    @pytest.mark.parametrize("stride", STRIDES)
    def test_sequences_stop_independently(self, generator, endless, monkeypatch, stride):
        """A sequence that has stopped does not influence the others."""
        monkeypatch.setattr(generator, "stride", stride)
        stop = ("ka", "é", "ns")
        expected = [stop_by_hand(run.tokens, stop) for run in endless[:7]]
        assert len({len(tokens) for _, tokens in expected}) > 3
        out = generator.generate([PROMPT] * 7, stop=stop, seed=range(7), **LONG)
        assert [(c.text, c.tokens) for c in out] == expected
        for got, whole in zip(out, endless, strict=False):
            assert got.logprobs == whole.logprobs[: len(got.tokens)]

    @pytest.mark.parametrize("stop", ["<turn>", ("zzz", "<turn>")])
    def test_a_special_token(self, generator, endless, stop):
        """Text does not contain special tokens, so the request ends at its id."""
        seed, position = find_token(endless, TURN)
        assert "zzz" not in endless[seed].text
        out = generator.generate(PROMPT, stop=stop, seed=seed, **LONG)[0]
        assert out.tokens == endless[seed].tokens[: position + 1]
        assert out.text == as_text(out.tokens)
        assert out.finish_reason == "stop"

    def test_end_of_sequence_by_name(self, generator, endless):
        seed, position = find_token(endless, EOS)
        out = generator.generate(PROMPT, stop="<eos>", seed=seed, **LONG)[0]
        assert out.tokens == endless[seed].tokens[: position + 1]
        assert out.finish_reason == "stop"

    def test_on_the_last_token_allowed(self, generator, endless):
        stop = spanning_two(endless[0].tokens)
        text, tokens = stop_by_hand(endless[0].tokens, [stop])
        settings = LONG | {"max_new_tokens": len(tokens), "seed": 0}
        out = generator.generate(PROMPT, stop=stop, **settings)[0]
        assert (out.text, out.tokens, out.finish_reason) == (text, tokens, "stop")
        settings["max_new_tokens"] -= 1
        out = generator.generate(PROMPT, stop=stop, **settings)[0]
        assert (out.tokens, out.finish_reason) == (tokens[:-1], "length")
        assert out.text == as_text(tokens[:-1]), "the beginning of a stop string stays in the text"

    def test_the_prompt_is_not_searched(self, generator):
        plain = generator.generate("say something", max_new_tokens=5)[0]
        assert "something" not in plain.text
        assert generator.generate("say something", max_new_tokens=5, stop="something")[0] == plain

    def test_text_prompts_begin_with_bos(self, generator):
        out = generator.generate(["say something", PROMPT, [0, *PROMPT]], max_new_tokens=10)
        assert [c.prompt_tokens for c in out] == [14, 13, 14]
        assert out[0] == out[2]
        assert out[0].tokens != out[1].tokens


class TestStats:
    def test_of_one_batch(self, generator):
        settings = LONG | {"max_new_tokens": [3, 20, 11]}
        out = generator.generate([PROMPT] * 3, **settings)
        assert out.stats.steps == 19  # after the first tokens
        assert out.stats.new_tokens == sum(len(c.tokens) for c in out) == 34
        assert out.stats.drafted == out.stats.accepted == 0
        assert out.stats.acceptance_rate == 0.0
        assert 0 < out.stats.time_to_first_token < out.stats.seconds
        # 31 tokens after the first of each sequence, in less time than the whole call.
        assert out.stats.tokens_per_second > 31 / out.stats.seconds

    def test_of_more_prompts_than_slots(self, generator):
        settings = LONG | {"max_new_tokens": [3, 20, 11, 1, 5, 6]}
        stats = generator.generate([PROMPT] * 6, **settings).stats
        assert stats.steps == 19
        assert stats.new_tokens == 46

    def test_of_single_tokens(self, generator):
        stats = generator.generate(PROMPT, max_new_tokens=1).stats
        assert (stats.steps, stats.new_tokens) == (0, 1)
        assert stats.tokens_per_second == 0.0

    def test_generation_is_a_sequence(self, generator):
        out = generator.generate([PROMPT, [5]], max_new_tokens=2)
        assert len(out) == 2
        assert list(out) == [out[0], out[1]] == [*out[:1], out[-1]]
        with pytest.raises(IndexError):
            out[2]

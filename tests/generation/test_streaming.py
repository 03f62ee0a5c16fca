"""Streamed pieces compared with the completion of generate."""

import copy
import pickle

import pytest

from dsv3_jax.generation.completion import Piece
from tests.generation.fragments import MAX_LEN, as_text, letters, watch_dispatches

PROMPT = letters("tell me")
STRIDES = (1, 2, 7, 16, MAX_LEN)


def check_pieces(pieces, expected):
    """Checks that the concatenated pieces are the completion."""
    assert "".join(pieces) == "".join(p.text for p in pieces) == expected.text
    assert [t for piece in pieces for t in piece.tokens] == expected.tokens
    assert [value for piece in pieces for value in piece.logprobs] == expected.logprobs
    if expected.top_logprobs is None:
        assert all(piece.top_logprobs is None for piece in pieces)
    else:
        assert [top for piece in pieces for top in piece.top_logprobs] == expected.top_logprobs
    assert [p.finish_reason for p in pieces] == [None] * (len(pieces) - 1) + [
        expected.finish_reason
    ]
    assert all(pieces[:-1]), "every piece but the last must have text"
    assert not any(p.endswith("\ufffd") for p in pieces[:-1])


@pytest.mark.parametrize("stride", STRIDES)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 80},
        {"max_new_tokens": None, "temperature": 1.0, "ignore_eos": True, "seed": 1},
        {"max_new_tokens": 60, "temperature": 2.0, "seed": 2},
        {"max_new_tokens": 60, "temperature": 2.0, "seed": 3, "stop_tokens": range(30, 37)},
    ],
    ids=str,
)
def test_equals_generate(generator, monkeypatch, settings, stride):
    expected = generator.generate(PROMPT, **settings)[0]
    monkeypatch.setattr(generator, "stride", stride)
    pieces = list(generator.stream(PROMPT, **settings))
    check_pieces(pieces, expected)
    # The first piece has one token, the others at most `stride` tokens.
    assert len(pieces) <= 1 + -(-len(expected.tokens) // stride)


@pytest.mark.parametrize("stride", STRIDES)
def test_stop_strings(generator, monkeypatch, stride):
    settings = {"max_new_tokens": 70, "temperature": 1.0, "ignore_eos": True}
    ends = set()
    for seed in range(6):
        text = generator.generate(PROMPT, seed=seed, **settings)[0].text
        # A string that appears, and strings that appear only in part.
        nearly = [text[at : at + 4] + "!" for at in range(0, 60, 9)]
        stop = [text[40 + seed : 43 + seed], *nearly]
        if any("\ufffd" in s for s in stop[:1]):
            continue
        expected = generator.generate(PROMPT, seed=seed, stop=stop, **settings)[0]
        with monkeypatch.context() as patch:
            patch.setattr(generator, "stride", stride)
            pieces = list(generator.stream(PROMPT, seed=seed, stop=stop, **settings))
        assert "".join(pieces) == expected.text
        assert [t for piece in pieces for t in piece.tokens] == expected.tokens
        assert pieces[-1].finish_reason == expected.finish_reason
        ends.add(expected.finish_reason)
        assert expected.text in text
        # No piece contains the beginning of the stop string that ended the text.
        for n in range(len(pieces)):
            assert text.startswith("".join(pieces[:n]))
            assert len("".join(pieces[:n])) <= len(expected.text)
    assert "stop" in ends


def test_pieces_come_while_it_goes_on(generator, monkeypatch):
    monkeypatch.setattr(generator, "stride", 4)
    pieces = list(generator.stream(PROMPT, max_new_tokens=60, ignore_eos=True, temperature=1.0))
    assert len(pieces) > 10


class TestLaziness:
    @pytest.fixture
    def dispatches(self, generator, monkeypatch) -> list[int]:
        """Decode steps of all dispatches so far; 0 for a prefill."""
        asked: list[int] = []
        watch_dispatches(
            monkeypatch, lambda plan: asked.append(0 if plan.chunks else plan.decode_steps)
        )
        monkeypatch.setattr(generator, "stride", 3)
        return asked

    def test_nothing_runs_before_it_is_asked_for(self, generator, dispatches):
        stream = generator.stream(PROMPT, max_new_tokens=50, ignore_eos=True)
        assert dispatches == []
        assert next(stream).finish_reason is None
        assert set(dispatches) == {0}
        asked = len(dispatches)
        next(stream)
        assert len(dispatches) > asked
        assert set(dispatches) == {0, 3}

    def test_nothing_runs_after_it_is_closed(self, generator, dispatches):
        stream = generator.stream(PROMPT, max_new_tokens=50, ignore_eos=True)
        next(stream)
        asked = len(dispatches)
        stream.close()
        assert next(stream, None) is None
        assert len(dispatches) == asked

    def test_nor_after_the_last_piece(self, generator, dispatches):
        pieces = list(generator.stream(PROMPT, max_new_tokens=8, ignore_eos=True))
        assert pieces[-1].finish_reason == "length"
        assert dispatches == [0, 3, 3, 1]  # the first token comes with the prefill

    def test_settings_are_checked_at_the_call(self, generator, dispatches):
        with pytest.raises(ValueError, match="temperature"):
            generator.stream(PROMPT, temperature=-1.0)
        assert dispatches == []


def test_streams_side_by_side(generator, monkeypatch):
    monkeypatch.setattr(generator, "stride", 2)
    settings = {"max_new_tokens": 30, "temperature": 1.0, "ignore_eos": True}
    streams = [generator.stream(PROMPT, seed=seed, **settings) for seed in range(3)]
    collected: list[list] = [[], [], []]
    for _ in range(40):
        for pieces, stream in zip(collected, streams, strict=True):
            pieces += [piece for piece in [next(stream, None)] if piece is not None]
        generator.generate(PROMPT, max_new_tokens=2)
    for seed, pieces in enumerate(collected):
        check_pieces(pieces, generator.generate(PROMPT, seed=seed, **settings)[0])


@pytest.mark.slow
def test_top_logprobs(generator):
    settings = {"max_new_tokens": 9, "logprobs": 2, "ignore_eos": True}
    pieces = list(generator.stream(PROMPT, **settings))
    check_pieces(pieces, generator.generate(PROMPT, **settings)[0])


def test_a_single_prompt_in_a_list(generator):
    pieces = list(generator.stream([PROMPT], max_new_tokens=9, seed=[4], temperature=[1.0]))
    expected = generator.generate(PROMPT, max_new_tokens=9, seed=4, temperature=1.0)[0]
    check_pieces(pieces, expected)


def test_without_a_tokenizer(bare, monkeypatch):
    monkeypatch.setattr(bare, "stride", 4)
    pieces = list(bare.stream(PROMPT, max_new_tokens=9, ignore_eos=True))
    assert [len(p.tokens) for p in pieces] == [1, 4, 4]
    assert [p.text for p in pieces] == [""] * 3
    assert [p.finish_reason for p in pieces] == [None, None, "length"]
    expected = bare.generate(PROMPT, max_new_tokens=9, ignore_eos=True)[0]
    assert [t for piece in pieces for t in piece.tokens] == expected.tokens
    assert expected.text == ""


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda piece: pickle.loads(pickle.dumps(piece))]
)
def test_pieces_can_be_copied(duplicate):
    piece = Piece("some text", [3, 4], "stop", [-0.5, -1.0], [[(3, -0.5)], [(5, -0.1)]])
    got = duplicate(piece)
    assert type(got) is Piece
    assert (got, got.text, got.tokens, got.finish_reason) == (piece, "some text", [3, 4], "stop")
    assert (got.logprobs, got.top_logprobs) == (piece.logprobs, piece.top_logprobs)
    assert (got.tokens is piece.tokens) == (duplicate is copy.copy)


@pytest.mark.slow
class TestDemo:
    """Streaming from a trained model with its tokenizer."""

    PROMPTS = ("def fibonacci(n):\n", "# ½ café 日本 🎉\nimport ")

    @pytest.mark.parametrize(
        ("stop", "stride"), [((), 1), (("\n\n", "return"), 3), (("    r", "port"), 16)]
    )
    def test_equals_generate(self, demo, monkeypatch, stop, stride):
        monkeypatch.setattr(demo, "stride", stride)
        settings = {"max_new_tokens": 50, "stop": stop}
        out = demo.generate(self.PROMPTS, **settings)
        for prompt, expected in zip(self.PROMPTS, out, strict=True):
            check_pieces(list(demo.stream(prompt, **settings)), expected)
            assert expected.text == demo.tokenizer.decode(expected.tokens)[: len(expected.text)]
            assert not any(s in expected.text for s in stop)

    def test_characters_of_several_tokens(self, demo, monkeypatch):
        """The temperature is high enough that the model writes incomplete characters."""
        monkeypatch.setattr(demo, "stride", 1)
        settings = {"max_new_tokens": 120, "temperature": 5.0, "seed": 3, "ignore_eos": True}
        expected = demo.generate("🎉", **settings)[0]
        assert "\ufffd" in expected.text
        check_pieces(list(demo.stream("🎉", **settings)), expected)


def test_this_tokenizer_decodes_as_python_does(generator, tokenizer):
    """Python's decoder is therefore a valid reference in the other tests."""
    settings = {"max_new_tokens": 80, "temperature": 3.0, "ignore_eos": True}
    for run in generator.generate([PROMPT] * 8, seed=range(8), **settings):
        assert tokenizer.decode(run.tokens) == as_text(run.tokens)
        assert "\ufffd" in run.text
        assert any(c in run.text for c in "é€")

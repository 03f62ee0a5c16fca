"""TextTracker: stop strings, and characters that several tokens share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.generation.text import TextTracker
from dsv3_jax.tokenizer import Tokenizer
from tests.generation.fragments import FRAGMENTS, VOCAB_SIZE, as_text, stop_by_hand


class Bytes:
    """A decoder whose tokens are bytes: 0 to 255."""

    def decode(self, ids: Sequence[int], /) -> str:
        return bytes(ids).decode("utf-8", "replace")


class Words:
    """A decoder whose tokens are the given strings."""

    def __init__(self, *words: str):
        self.words = words

    def decode(self, ids: Sequence[int], /) -> str:
        return "".join(self.words[i] for i in ids)


class Counting(Bytes):
    """Counts the tokens that it decodes."""

    decoded = 0

    def decode(self, ids: Sequence[int], /) -> str:
        self.decoded += len(ids)
        return super().decode(ids)


class Stripping:
    """A decoder that drops a space at the beginning, like those of some checkpoints."""

    def decode(self, ids: Sequence[int], /) -> str:
        return as_text(ids).removeprefix(" ")


def extend_all(tracker: TextTracker, tokens: Sequence[int], stride: int) -> list[str]:
    """Adds ``stride`` tokens at a time, as the Generator does, and returns the pieces."""
    pieces = []
    for at in range(0, len(tokens), stride):
        tracker.extend(list(tokens[at : at + stride]))
        pieces.append(tracker.piece(final=at + stride >= len(tokens)))
        if tracker.stopped:
            break
    return pieces


STRIDES = (1, 2, 3, 7, 1000)


class TestPieces:
    @pytest.mark.parametrize("stride", STRIDES)
    @pytest.mark.parametrize(
        "text", ["plain", "naïve café", "日本語とEnglish", "👩‍👩‍👧 und 🎉🎉", "e\u0301\u200d", ""]
    )
    def test_characters_come_whole(self, text, stride):
        tracker = TextTracker(Bytes(), ())
        pieces = extend_all(tracker, text.encode(), stride)
        assert "".join(pieces) == tracker.text == text
        assert not any("\ufffd" in piece for piece in pieces)

    def test_a_character_comes_with_its_last_byte(self):
        tracker = TextTracker(Bytes(), ())
        assert extend_all(tracker, "a€😀b".encode(), 1) == ["a", "", "", "€", "", "", "", "😀", "b"]

    @pytest.mark.parametrize("stride", STRIDES)
    def test_broken_bytes(self, stride):
        """Invalid bytes become U+FFFD as soon as no later token can complete them. No piece except
        the last ends with U+FFFD."""
        data = b"\xffa\xe2\x82b\xf0\x9f\x98\xc3\xa9\x80\x80c\xe2\x82"
        tracker = TextTracker(Bytes(), ())
        pieces = extend_all(tracker, data, stride)
        assert "".join(pieces) == tracker.text == data.decode("utf-8", "replace")
        assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])

    @pytest.mark.parametrize("stride", STRIDES)
    def test_random_bytes(self, stride):
        rng = np.random.default_rng(stride)
        for _ in range(30):
            data = bytes(rng.choice([*b"ab", *"é€😀".encode()], 40).astype(np.uint8))
            tracker = TextTracker(Bytes(), ("ab", "é"))
            pieces = extend_all(tracker, data, stride)
            assert "".join(pieces) == tracker.text
            assert "ab" not in tracker.text
            assert "é" not in tracker.text
            tracker = TextTracker(Bytes(), ())
            pieces = extend_all(tracker, data, stride)
            assert "".join(pieces) == tracker.text == data.decode("utf-8", "replace")
            assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])

    def test_without_a_tokenizer(self):
        tracker = TextTracker(None, ())
        assert extend_all(tracker, [5, 6, 7], 2) == ["", ""]
        assert tracker.tokens == [5, 6, 7]


class TestDelayedText:
    def test_the_beginning_of_a_stop_string(self):
        tracker = TextTracker(Bytes(), ("END",))
        assert extend_all(tracker, b"the EN route ENDs", 1) == [
            *("t", "h", "e", " ", "", "", "EN ", "r", "o", "u", "t", "e", " ", "", "", "")
        ]
        assert tracker.text == "the EN route "
        assert tracker.stopped

    def test_the_final_piece_has_all_text(self):
        tracker = TextTracker(Bytes(), ("END",))
        assert extend_all(tracker, b"the EN", 1) == ["t", "h", "e", " ", "", "EN"]
        assert not tracker.stopped

    def test_a_stop_string_that_repeats_its_own_beginning(self):
        tracker = TextTracker(Bytes(), ("aab",))
        assert extend_all(tracker, b"aaaabaab", 1) == ["", "", "a", "a", ""]
        assert tracker.text == "aa"

    def test_the_longest_of_several_beginnings(self):
        tracker = TextTracker(Bytes(), ("xyz", "wxyq"))
        assert extend_all(tracker, b"wxyv", 1) == ["", "", "", "wxyv"]

    def test_inside_a_character_of_the_stop_string(self):
        tracker = TextTracker(Bytes(), ("a€",))
        assert extend_all(tracker, "a€b".encode(), 1) == ["", "", "", ""]
        assert tracker.text == ""
        tracker = TextTracker(Bytes(), ("a€",))
        assert extend_all(tracker, "a₭".encode(), 1) == ["", "", "", "a₭"]


class TestStopping:
    @pytest.mark.parametrize("stride", STRIDES)
    @pytest.mark.parametrize(
        ("words", "stop", "text", "count"),
        [
            (("one", " two", " three"), ("tw",), "one ", 2),  # inside a token
            (("one", " two", " three"), ("e tw",), "on", 2),  # across two
            (("a", "b", "c", "d"), ("bcd",), "a", 4),  # across three
            (("stop here", " and on"), ("stop",), "", 1),  # in the first token
            (
                ("ab", "cd", "ef"),
                ("cd", "ab"),
                "",
                1,
            ),  # several stop strings: the first in the text
            (("xx", "abcd", "ef"), ("cd", "bc"), "xxa", 2),  # both in one token: the leftmost
            (("xx", "abcd", "ef"), ("zz", "cde"), "xxab", 3),
            (
                ("x", "y"),
                ("xy", "x"),
                "",
                1,
            ),  # one is a prefix of the other: the shorter is complete
            # The second stop string is complete while the first one is still incomplete.
            (("1", "abc", "d", "e"), ("abcde", "c"), "1ab", 2),
            (("Fin", "\n", "\n", "more"), ("\n\n",), "Fin", 3),
            (("no", "thing", " here"), ("nowhere",), "nothing here", 3),
        ],
    )
    def test_cuts_text_and_tokens(self, words, stop, text, count, stride):
        tracker = TextTracker(Words(*words), stop)
        pieces = extend_all(tracker, range(len(words)), stride)
        assert "".join(pieces) == tracker.text == text
        assert tracker.tokens == list(range(count))
        assert tracker.stopped == (count < len(words) or "nowhere" not in stop)

    def test_random_tokens(self):
        """All strides give the result of a check after every token."""
        rng = np.random.default_rng(0)
        stopped = 0
        for _ in range(150):
            tokens = rng.integers(3, VOCAB_SIZE, 25).tolist()
            stop = _substrings(rng, as_text(rng.permutation(tokens).tolist()), as_text(tokens))
            text, expected = stop_by_hand(tokens, stop)
            stopped += len(expected) < len(tokens)
            for stride in STRIDES:
                tracker = TextTracker(Fragments(), stop)
                pieces = extend_all(tracker, tokens, stride)
                assert (tracker.text, tracker.tokens) == (text, expected), (tokens, stop, stride)
                assert "".join(pieces) == text
        assert 50 < stopped < 150

    @pytest.mark.parametrize("words", [(3, VOCAB_SIZE), (0, 40), (29, 35)])
    @pytest.mark.parametrize("decoder", ["fragments", "stripping"])
    def test_long_texts(self, words, decoder):
        """Texts longer than the tail equal the text of all tokens decoded at once."""
        rng = np.random.default_rng(words)
        tokens = rng.integers(*words, 700).tolist()
        made = Fragments() if decoder == "fragments" else Stripping()
        for stride in (1, 16, 333, 1000):
            tracker = TextTracker(made, ())
            pieces = extend_all(tracker, tokens, stride)
            assert tracker.text == "".join(pieces) == made.decode(tokens)
            assert not any(piece.endswith("\ufffd") for piece in pieces[:-1])
        text = made.decode(tokens)
        at = int(rng.integers(len(text) // 2, len(text) - 20))
        stop = [s for s in (text[at : at + 9], text[at - 30 : at - 18]) if "\ufffd" not in s]
        want = None
        for stride in (1, 16, 333, 1000):
            tracker = TextTracker(made, stop)
            pieces = extend_all(tracker, tokens, stride)
            got = ("".join(pieces), tracker.text, tracker.tokens)
            assert got[0] == got[1]
            assert got == (want := want or got)
        if stop and decoder == "fragments":
            assert want[1:] == stop_by_hand(tokens, stop)

    @pytest.mark.parametrize("name", ["demo", "fragments"])
    def test_text_equals_decoding_all_tokens(self, name, tokenizer):
        """Random tokens of real tokenizers, including special ones and parts of characters."""
        if name == "demo":
            tokenizer = Tokenizer(Path(dsv3_jax.__file__).parent / "demo")
        rng = np.random.default_rng(1)
        for stride in (1, 5, 64, 500):
            # Ids below 300 are special tokens and single bytes, most of them not a character.
            limits = rng.choice([min(300, tokenizer.vocab_size), tokenizer.vocab_size], 1000)
            tokens = rng.integers(0, limits).tolist()
            tracker = TextTracker(tokenizer, ())
            for end in range(stride, len(tokens) + stride, stride):
                tracker.extend(tokens[end - stride : end])
                if end % 100 < stride:
                    assert tracker.text == tokenizer.decode(tokens[:end])
            assert tracker.text == tokenizer.decode(tokens)

    @pytest.mark.parametrize("stop", [(), ("no such thing",)])
    def test_tokens_are_decoded_a_bounded_number_of_times(self, stop):
        counts = []
        for length in (2_000, 8_000):
            decoder = Counting()
            text = ("naïve 日本 🎉 " * length)[:length].encode()
            tracker = TextTracker(decoder, stop)
            extend_all(tracker, text, 16)
            assert tracker.text == text.decode("utf-8", "replace")
            counts.append(decoder.decoded / len(text))
        assert counts[1] < 1.1 * counts[0]
        assert counts[1] < 16

    def test_garbage_is_not_decoded_over_and_over(self):
        """Bytes that never form a character, so that the tail cannot be split."""
        decoder = Counting()
        tracker = TextTracker(decoder, ())
        pieces = extend_all(tracker, b"\xe2\x82" * 1000, 50)
        assert "".join(pieces) == tracker.text == "\ufffd" * 1000


class Fragments:
    decode = staticmethod(as_text)


def _substrings(rng: np.random.Generator, *texts: str) -> tuple[str, ...]:
    """Returns one short piece of each text, without those that contain U+FFFD."""
    stop = []
    for text in texts:
        at, n = int(rng.integers(len(text))), int(rng.integers(1, 7))
        stop.append(text[at : at + n])
    return tuple(s for s in stop if "\ufffd" not in s)


def test_fragments_contain_what_these_tests_need():
    whole = [f for f in FRAGMENTS[3:] if f.decode("utf-8", "replace").encode() == f]
    assert len(whole) < len(FRAGMENTS) - 60
    assert "é" in as_text([31, 31])
    assert "€" in as_text([32, 32])
    assert "\ufffd" in as_text([31, 32])

"""TextTracker: stop strings, and characters that several tokens share."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

import dsv3_jax
from dsv3_jax.generation.text import Decoder, StopStrings, TextTracker
from dsv3_jax.tokenizer import SpecialTokenDecoder, Tokenizer
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


class Sampled:
    """Counts the tokens that it decodes.

    Args:
      decode: decodes tokens.
      sample: tokens of a kind.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], sample: Sequence[int]):
        self.text = decode
        self.sample = list(sample)
        self.decoded = 0

    def decode(self, ids: Sequence[int], /) -> str:
        self.decoded += len(ids)
        return self.text(ids)


CONTENTS = {
    "plain": lambda: Sampled(Bytes().decode, b"some text, "),
    "lone bytes": lambda: Sampled(Bytes().decode, b"\x80"),
    "beginnings": lambda: Sampled(Bytes().decode, b"\xf0\x9f\x98"),
    "two byte beginnings": lambda: Sampled(Bytes().decode, b"\xe2\x82"),
    "no token ends with a character": lambda: Sampled(as_text, [31, 34]),
    "parts of characters": lambda: Sampled(as_text, [32, 35]),
    "special tokens": lambda: Sampled(as_text, [0, 1, 2]),
    "special tokens after half a character": lambda: Sampled(as_text, [32, *[0] * 1999]),
    "special tokens inside characters": lambda: Sampled(as_text, [32, *[1] * 90]),
    "words with spaces before them": lambda: Sampled(stripped, [1, 0, 2]),
    "words joined by spaces": lambda: Sampled(joined, [0, 1, 2]),
}
"""Decoders with samples of one kind of content each."""


SENTENCE_WORDS = (
    *("▁one", "▁two", "three", "▁", "a", "##b", ".", "\n"),
    *(f"<0x{byte:02X}>" for byte in range(256)),
)
"""Tokens of a vocabulary with byte fallback."""


def sentence_decoder(decoder: decoders.Decoder | None) -> Tokenizer:
    """Returns a tokenizer of these words with a decoder of the library."""
    vocabulary = {word: i for i, word in enumerate(SENTENCE_WORDS)}
    made = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    if decoder is not None:
        made.decoder = decoder
    with tempfile.TemporaryDirectory() as directory:
        made.save(str(Path(directory, "tokenizer.json")))
        return Tokenizer(Path(directory))


SENTENCE_DECODERS = {
    "sentencepiece": lambda: sentence_decoder(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    ),
    "metaspace": lambda: sentence_decoder(decoders.Metaspace()),
    "wordpiece": lambda: sentence_decoder(decoders.WordPiece(cleanup=False)),
    "none": lambda: sentence_decoder(None),
}


def stripped(ids: Sequence[int]) -> str:
    """Decodes words like SentencePiece, which drops the space before the first one."""
    return "".join((" one", " ", " two\n")[i] for i in ids).removeprefix(" ")


def joined(ids: Sequence[int]) -> str:
    """Decodes words like a tokenizer without a decoder."""
    return " ".join(("one", "two", "three")[i] for i in ids)


def settled(data: bytes) -> str:
    """Returns the text of bytes, without what later bytes may change: three U+FFFD at its end."""
    text = data.decode("utf-8", "replace")
    return text[: max(len(text.rstrip("\ufffd")), len(text) - 3)]


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
            ends = range(stride, len(data), stride)
            assert list(itertools.accumulate(pieces[:-1])) == [settled(data[:end]) for end in ends]

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

    @pytest.mark.parametrize("stop", [(), ("no such thing",)], ids=["", "stop"])
    @pytest.mark.parametrize("content", CONTENTS)
    def test_any_content_is_decoded_as_often_as_plain_text(self, content, stop):
        """Also where no token ends with a character, or where most tokens have no text: every
        token is decoded a bounded number of times, and at most three characters are held back."""
        counts = {}
        for name in ("plain", content):
            decoder = CONTENTS[name]()
            tracker = TextTracker(decoder, stop)
            streamed = ""
            for i in range(2_000):
                tracker.extend([decoder.sample[i % len(decoder.sample)]])
                streamed += tracker.piece(final=False)
                rest = tracker.text[len(streamed) :]
                assert rest == "\ufffd" * len(rest)
                assert len(rest) <= 3
            counts[name] = decoder.decoded
            streamed += tracker.piece(final=True)
            assert streamed == tracker.text == decoder.text(tracker.tokens)
        assert counts[content] <= 2 * counts["plain"] <= 2 * 16 * 2_000

    def test_a_run_of_lone_bytes_is_streamed(self):
        tracker = TextTracker(Bytes(), ("no such thing",))
        pieces = extend_all(tracker, b"\x80" * 100, 1)
        assert pieces == ["", "", "", *["\ufffd"] * 96, "\ufffd" * 4]

    def test_a_genuine_replacement_character_stays(self):
        tracker = TextTracker(Bytes(), ())
        text = "a\ufffdb\ufffd\ufffd\ufffd\ufffd\ufffdc\ufffd"
        assert "".join(extend_all(tracker, text.encode(), 1)) == tracker.text == text


PARTS = ("a", "b", "ab ", " the", "é", "日本", "\n", "\ufffd", "😀")
"""Texts that random tokens spell, apart from single bytes."""


def by_hand(
    decoder: Decoder, tokens: list[int], stop: Sequence[str], min_tokens: int
) -> tuple[str, list[int]]:
    """Returns text and tokens of a request that decodes all tokens anew after each one."""
    begin = 0
    for n in range(1, len(tokens) + 1):
        text = decoder.decode(tokens[:n])
        if n <= min_tokens:
            begin = max(len(text.rstrip("\ufffd")), len(text) - 3)
        elif positions := [at for s in stop if (at := text.find(s, begin)) >= 0]:
            return text[: min(positions)], tokens[:n]
    return decoder.decode(tokens), tokens


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    return Tokenizer(Path(dsv3_jax.__file__).parent / "demo")


class TestAnyTokens:
    """Streamed text, whole text and tokens are those of decoding all tokens after each one."""

    @pytest.mark.parametrize("special", ["kept", "skipped"])
    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_byte_level(self, demo, special, data):
        decoder: Decoder = demo if special == "skipped" else SpecialTokenDecoder(demo)
        singles = [demo.encode(part, add_special_tokens=False) for part in PARTS]
        token = st.integers(0, 299) | st.sampled_from([i for ids in singles for i in ids])
        runs = st.lists(token, min_size=1, max_size=8) | st.builds(
            lambda one, count: [one] * count, token, st.integers(1, 60)
        )
        tokens = [i for run in data.draw(st.lists(runs, max_size=8)) for i in run]
        self._check(decoder, tokens, data)

    @given(data=st.data())
    @settings(max_examples=150, deadline=None)
    def test_parts_of_characters(self, data):
        tokens = data.draw(st.lists(st.integers(0, 40), max_size=80))
        self._check(Fragments(), tokens, data)

    @pytest.mark.parametrize("kind", SENTENCE_DECODERS)
    @given(data=st.data())
    @settings(max_examples=80, deadline=None)
    def test_other_decoders(self, kind, data):
        """The decoders of SentencePiece and WordPiece, or none. Runs of byte tokens spell
        characters: a run with an invalid byte would change those before it."""
        words = list(SENTENCE_WORDS)
        runs = st.sampled_from(["日", "é", "😀"]).map(
            lambda text: [words.index(f"<0x{byte:02X}>") for byte in text.encode()]
        )
        word = st.integers(0, words.index("<0x00>") - 1).map(lambda i: [i])
        tokens = [i for run in data.draw(st.lists(word | runs, max_size=60)) for i in run]
        # While a character is incomplete, decoding the whole run hides the ones before it: what
        # `by_hand` does not count as text then, a stop string may begin in.
        self._check(SENTENCE_DECODERS[kind](), tokens, data, has_min=kind != "sentencepiece")

    def _check(
        self, decoder: Decoder, tokens: list[int], data: st.DataObject, *, has_min: bool = True
    ) -> None:
        text = decoder.decode(tokens)
        at = st.tuples(st.integers(0, len(text)), st.integers(1, 30))
        spans = data.draw(st.lists(at, max_size=4))
        stop = [s for begin, n in spans if (s := text[begin : begin + n])]
        min_tokens = data.draw(st.just(0) | st.integers(0, len(tokens) if has_min else 0))
        expected = by_hand(decoder, tokens, stop, min_tokens)
        for stride in (1, data.draw(st.integers(2, 100))):
            tracker = TextTracker(decoder, stop, min_tokens)
            pieces = extend_all(tracker, tokens, stride)
            assert (tracker.text, tracker.tokens) == expected, stride
            assert "".join(pieces) == tracker.text


class TestStopStrings:
    @given(st.data())
    @settings(max_examples=200, deadline=None)
    def test_equals_a_search_from_the_beginning(self, data):
        letters = st.text("ab", min_size=1, max_size=6)
        strings = data.draw(st.lists(letters, min_size=1, max_size=5))
        text = data.draw(st.text("abc", max_size=30))
        automaton, state = StopStrings(strings), 0
        for end in range(1, len(text) + 1):
            state, begin = automaton.search(state, text[end - 1])
            ending = [len(s) for s in strings if text[:end].endswith(s)]
            assert begin == (1 - max(ending) if ending else None)
            depths = [n for s in strings for n in range(len(s) + 1) if text[:end].endswith(s[:n])]
            assert automaton.depth(state) == max(depths)

    def test_the_work_is_linear_in_the_text(self):
        """Each character of the text costs at most two moves, whatever the strings are."""
        strings = ["a" * 999 + chr(98 + i) for i in range(16)]
        automaton = StopStrings(strings)
        moves = 0

        class Labels(list):
            def __getitem__(self, state):
                nonlocal moves
                moves += 1
                return super().__getitem__(state)

        automaton._labels = Labels(automaton._labels)
        text = ("a" * 998 + "x") * 8
        state = 0
        for character in text:
            state, begin = automaton.search(state, character)
            assert begin is None
        assert len(text) <= moves <= 2 * len(text)
        assert automaton.search(state, "a" * 999 + "q")[1] == 0


@pytest.mark.slow
def test_any_stream_takes_the_time_of_plain_text(demo):
    """Streams of 8,000 tokens: the median of several takes at most twice as long as plain text."""
    lone = next(i for i in range(300) if demo.decode([i]) == "\ufffd")
    text = "def add(a, b):  # the sum of two numbers\n    return a + b\n"
    plain = (demo.encode(text, add_special_tokens=False) * 400)[:8000]
    (letter,) = demo.encode("a", add_special_tokens=False)
    special = demo.eos_token_id
    nearly = tuple((text * 30)[i : i + 999] + "@" for i in range(16))
    repeated = tuple("a" * 999 + chr(65 + i) for i in range(16))
    cases = {
        "plain": (plain, ()),
        "lone bytes": ([lone] * 8000, ()),
        "lone bytes, stop strings": ([lone] * 8000, nearly),
        "special tokens": ([special] * 8000, ()),
        "special tokens after a lone byte": ([lone, *[special] * 7999], ()),
        "stop strings": (plain, nearly),
        "beginnings of stop strings": (([letter] * 998 + plain[:2]) * 8, repeated),
    }
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(5):
        for name, (tokens, stop) in cases.items():
            tracker = TextTracker(demo, stop)
            began = time.process_time()
            for token in tokens:
                tracker.extend([token])
                tracker.piece(final=False)
            seconds[name].append(time.process_time() - began)
            assert len(tracker.tokens) == 8000
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    assert max(medians.values()) <= 2 * medians["plain"], medians


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

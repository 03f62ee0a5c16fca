"""StopScope: stop strings count neither in the reasoning of an answer nor inside special tokens."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsv3_jax.generation.text import ReasoningMarkers, StopScope, TextTracker
from tests.generation.test_text import Bytes, Words

ENDS = ("</think>", "<call>")
WORDS = (
    "<think>",
    "</think>",
    "<call>",
    "<",
    "/",
    "a",
    "b",
    " ",
    "\n",
    "think>",
    "<eos>",
    "ab",
    "é",
)
EOS = WORDS.index("<eos>")
BEGINS = {"reasoning": "", "undecided": "<think>"}


def scoped(
    ids: list[int], sizes: list[int], stops: tuple[str, ...], begin: str | None
) -> tuple[TextTracker, str]:
    """Returns the tracker of an answer that arrives in steps, and its joined pieces."""
    tracker = TextTracker(Words(*WORDS), stops)
    markers = None if begin is None else ReasoningMarkers(begin, ENDS)
    scope = StopScope(tracker, Words(*WORDS), markers, [EOS])
    pieces, rest = "", list(ids)
    for size in [*sizes, len(ids)]:
        if not rest or tracker.stopped:
            break
        step, rest = rest[:size], rest[size:]
        before = scope.num_tokens
        scope.extend(step)
        assert tracker.stopped or scope.num_tokens == before + len(step)
        pieces += tracker.piece(final=False)
    scope.end()
    return tracker, pieces + tracker.piece(final=True)


def by_hand(ids: list[int], stops: tuple[str, ...], begin: str | None) -> str:
    """Returns the text that an answer should have, found in the text as a whole."""
    text = "".join(WORDS[i] for i in ids)
    first = 0
    if begin is not None and (not begin or text.lstrip().startswith(begin)):
        first = ReasoningMarkers(begin, ENDS).span(text)[1]
        first += next((len(m) for m in ENDS if text.startswith(m, first)), 0)
    # A stop string counts in the parts between special tokens, and the first to be complete counts.
    starts = [len("".join(WORDS[j] for j in ids[:i])) for i in range(len(ids) + 1)]
    bounds = [first, *(s for i, t in enumerate(ids) if t == EOS for s in starts[i : i + 2])]
    matches = []
    for low, high in zip(bounds, [*bounds[1:], len(text)], strict=True):
        part = range(max(low, first), high)
        if part and text[part[0] : high] != "<eos>":
            matches += [
                (at + len(s), at) for s in stops for at in part if text.startswith(s, at, high)
            ]
    if not matches:
        return text
    # If one token completes several stop strings, the one that begins further left counts.
    complete = min(matches)[0]
    token_end = next(start for start in starts if start >= complete)
    return text[: min(at for end, at in matches if end <= token_end)]


@example([5, 6], [1], ["ab"], None)  # "a" and "b" in steps of their own
@example([5, 10, 6], [], ["ab"], None)  # with a special token between them
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=16),
    st.lists(st.integers(1, 5), max_size=16),
    st.lists(
        st.sampled_from(["a", "ab", "b<", "<", "\n", " a", "k>", "é"]), min_size=1, max_size=3
    ),
    st.sampled_from([None, *BEGINS]),
)
def test_any_answer_in_any_steps(ids, sizes, stops, state):
    begin = None if state is None else BEGINS[state]
    tracker, streamed = scoped(ids, sizes, tuple(stops), begin)
    assert tracker.text == streamed == by_hand(ids, tuple(stops), begin)
    assert tracker.tokens == ids[: len(tracker.tokens)]
    assert tracker.stopped or len(tracker.tokens) == len(ids)


def test_characters_of_several_tokens():
    for stop, text, expected in (
        ("世", "<think>世a</think>b世c", "<think>世a</think>b"),
        ("世", "\u3000<think>世</think>世", "\u3000<think>世</think>"),
        ("\u3000", "\u3000<thin", ""),
    ):
        tracker = TextTracker(Bytes(), (stop,))
        scope = StopScope(tracker, Bytes(), ReasoningMarkers("<think>", ENDS))
        for byte in text.encode():
            if not tracker.stopped:
                scope.extend([byte])
        scope.end()
        assert tracker.text == expected


def test_a_long_beginning_of_white_space_is_decided():
    tracker = TextTracker(Bytes(), ("\n",))
    scope = StopScope(tracker, Bytes(), ReasoningMarkers("<think>", ENDS))
    scope.extend(b" " * 200)
    assert len(tracker.tokens) == 200

"""Invalid requests are rejected with a clear message before anything runs."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from dsv3_jax.generation.settings import MAX_STOP_TOKENS
from dsv3_jax.offline.generator import Generator
from tests.generation.fragments import MAX_LEN, letters

PROMPT = letters("abc")

PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt"),
    (["fine", ""], "prompt"),
    ([[]], "prompt"),
    ([PROMPT, []], "prompt"),
    ([], "prompts"),
    ((), "prompts"),
    (None, "prompt"),
    ("a lone \ud800", "prompt"),
    (["fine", "\udfff"], "prompt"),
    (bytearray(b"ab"), "prompt"),
    ({"a", "b"}, "prompt"),
    (iter(["a"]), "prompt"),
    ([{3, 4}], "prompt"),
    ([b"bytes"], "prompt"),
    (7, "prompt"),
    (3.5, "prompt"),
    (b"bytes", "prompt"),
    ({"a": 1}, "prompt"),
    ({3, 4}, "prompt"),
    ((i for i in PROMPT), "prompt"),
    ([None], "prompt"),
    ([PROMPT, None], "prompt"),
    ([PROMPT, 5], "prompt"),
    ([5, PROMPT], "prompt"),
    ([5, "text"], "prompt"),
    ([-1], "prompt"),
    ([3, 4, 160], "prompt"),
    ([PROMPT, [2**40]], "prompt"),
    ([1.0, 2.0], "prompt"),
    ([[3, 4.5]], "prompt"),
    ([True, False], "prompt"),
    (np.array([0.5, 1.5]), "prompt"),
    (np.array([True]), "prompt"),
    (np.zeros((1, 2, 2), int), "prompt"),
    (jnp.zeros((0,), jnp.int32), "prompts"),
    ([5] * MAX_LEN, "prompt"),
    ("a" * MAX_LEN, "prompt"),
    ("a" * (MAX_LEN - 1), "prompt"),  # BOS makes it too long
]

WRONG_NUMBERS = [True, np.True_, None, "1", "x", [None], ["1"], [[1]], 1j, {}, object()]
NOT_INTEGERS = [*WRONG_NUMBERS, 1.5, 1.0, np.float32(1)]

SETTINGS: dict[str, list[Any]] = {
    "max_new_tokens": [
        0,
        -1,
        [0],
        *(x for x in NOT_INTEGERS if x not in (None, [None])),
    ],  # None means all the room
    "temperature": [-0.1, -1, float("nan"), float("inf"), 1e39, 10**400, [-1.0], *WRONG_NUMBERS],
    "top_p": [0, 0.0, 1.5, -0.5, float("nan"), 10**400, *WRONG_NUMBERS],
    "top_k": [-1, 2**31, 2**32 + 1, 10**400, *NOT_INTEGERS],
    "min_p": [-0.1, 2, 1.01, float("nan"), float("inf"), *WRONG_NUMBERS],
    "seed": [
        -1,
        2**32,
        10**400,
        *(x for x in NOT_INTEGERS if x is not None),
    ],  # None means one per prompt
    "stop": [
        *(None, 5, 1.5, [5], ["a", None], b"ab", [b"ab"], True, "", ["a", ""]),
        *([["a"], ["b"]], [["a", ""]], [["a", 5]], [[["a"]]], "a\ud800", ["\udfff"]),
    ],
    "stop_tokens": [
        *(None, 5, [-1], [160], [1.5], ["a"], [True], "ab", [2**40]),
        *([[1], [2]], [[160]], [[True]], [[[1]]], [["a"]]),
    ],
    "ignore_eos": [None, "no", "", 0, 1, 1.0, ["no"], [0], [None], [True, False], [[True]], ()],
    "logprobs": [21, -1, 2.0, True, None, "5", [21], [1, 2], [None], [[1]], 10**400],
    "n": [0, -1, 1.5, True, None, "2", [1], 2.0],
    "draft": [
        ("mtp",),
        ["mtp", None],
        "mtp",
        "none",
        "synthetic",
        "synthetic:2",
        "synthetic:x",
        "ngram:1",
        "",
        1,
        True,
    ],
    "progress": [5, "bar", [print]],
    "draft_depth": [0, 5, -1, 1.0, True, "1", "AUTO", None, (1,)],
}


def check_message(error: pytest.ExceptionInfo, name: str) -> None:
    message = str(error.value)
    assert message.startswith(f"{name}: expected "), message
    assert "got" in message.removeprefix(name)
    assert "\n" not in message
    assert len(message) < 1000


@pytest.fixture
def idle(generator, monkeypatch) -> Generator:
    """A Generator whose programs must not run."""

    def refuse(*args: object) -> None:
        pytest.fail("nothing may run before everything is checked")

    monkeypatch.setattr(generator, "_programs_of", refuse)
    return generator


def test_good_ones_do_run(idle):
    with pytest.raises(pytest.fail.Exception, match="nothing may run"):
        idle.generate(PROMPT)


@pytest.mark.parametrize(
    ("prompts", "name"),
    PROMPTS,
    ids=[f"{i}-{type(p).__name__}" for i, (p, _) in enumerate(PROMPTS)],
)
def test_prompts(idle, prompts, name):
    with pytest.raises(ValueError, match="expected") as error:
        idle.generate(prompts)
    check_message(error, name)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in SETTINGS.items() for value in values]
)
def test_settings(idle, name, value):
    with pytest.raises(ValueError, match="expected") as error:
        idle.generate(PROMPT, **{name: value})
    check_message(error, name)
    with pytest.raises(ValueError, match="expected") as streamed:
        idle.stream(PROMPT, **{name: value})
    assert str(streamed.value) == str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature: expected a number in [0, 3.4e38], got -1"),
        ({"top_p": 0}, "top_p: expected a number in (0, 1], got 0"),
        ({"top_k": 1.5}, "top_k: expected an integer in [0, 2**31), got 1.5"),
        ({"min_p": 2}, "min_p: expected a number in [0, 1], got 2"),
        ({"seed": -1}, "seed: expected an integer in [0, 2**32), got -1"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected an integer of at least 1, got 0"),
        ({"logprobs": 21}, "logprobs: expected an integer from 0 to 20, got 21"),
        ({"stop": 5}, "stop: expected a string or several, got 5"),
        ({"stop_tokens": [160]}, "stop_tokens: expected token ids from 0 to 159, got 160"),
    ],
)
def test_words(idle, settings, message):
    with pytest.raises(ValueError, match="expected") as error:
        idle.generate(PROMPT, **settings)
    assert str(error.value) == message


@pytest.mark.parametrize(
    "name", ["max_new_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs"]
)
def test_as_many_values_as_prompts(idle, name):
    for values in ([1], [1, 1, 1], (), np.ones(4, int)):
        with pytest.raises(ValueError, match="one value or 2") as error:
            idle.generate([PROMPT, PROMPT], **{name: values})
        check_message(error, name)
        assert str(error.value).endswith(f"got {len(values)}")


def test_the_wrong_one_of_several_values(idle):
    with pytest.raises(ValueError, match=r"^top_p: expected .* got 7"):
        idle.generate([PROMPT] * 3, top_p=[0.5, 7, 1.0])


def test_a_prompt_that_is_too_long_is_refused_with_its_length(idle):
    with pytest.raises(ValueError, match=f"at most {MAX_LEN - 1} tokens .* got {MAX_LEN + 5}"):
        idle.generate([PROMPT, [5] * (MAX_LEN + 5)])


def test_too_many_stop_tokens(idle):
    with pytest.raises(ValueError, match="stop_tokens") as error:
        idle.generate(
            PROMPT, stop_tokens=range(3, 3 + MAX_STOP_TOKENS)
        )  # one too many with the model's own
    check_message(error, "stop_tokens")


@pytest.mark.parametrize(("prompts", "name"), [([], "prompts"), ("", "prompt"), (None, "prompt")])
def test_streamed_prompts(idle, prompts, name):
    with pytest.raises(ValueError, match="expected") as error:
        idle.stream(prompts)
    check_message(error, name)


def test_only_one_prompt_can_be_streamed(idle):
    with pytest.raises(ValueError, match=r"^stream: expected one prompt, got 2"):
        idle.stream([PROMPT, PROMPT])


def test_one_completion_of_a_prompt_can_be_streamed(idle):
    with pytest.raises(ValueError, match=r"^n: expected 1 in a stream, got 2"):
        idle.stream(PROMPT, n=2)


def test_only_generate_has_progress(idle):
    assert idle.requests(PROMPT, progress=print) == idle.requests(PROMPT)
    with pytest.raises(ValueError, match=r"^progress: expected None in a stream, .* got <built-in"):
        idle.stream(PROMPT, progress=print)


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"a", "b"}, "got set; make it a list"),
        ((text for text in "ab"), "got generator; make it a list"),
        (b"text", "got bytes; decode it"),
        (None, "got None"),
        ("a\ud83d", r"got a lone surrogate, '\\ud83d', at character 1"),
    ],
)
def test_words_about_prompts(idle, prompts, words):
    with pytest.raises(ValueError, match=f"^prompt: expected .*{words}$"):
        idle.generate(prompts)


def test_a_value_for_each_prompt(idle):
    requests = idle.requests(
        [PROMPT] * 3,
        stop=[["x", "y"], "z", ()],
        stop_tokens=[[5], [], range(7, 9)],
        ignore_eos=[True, False, np.True_],
        logprobs=[0, 3, 20],
    )
    assert [r.stop for r in requests] == [("x", "y"), ("z",), ()]
    assert [r.stop_tokens for r in requests] == [(5,), (1,), (7, 8)]
    assert [r.logprobs for r in requests] == [0, 3, 20]
    for stop in ("xy", ["x", "y"], {"x"}):
        assert {r.stop for r in idle.requests([PROMPT] * 2, stop=stop)} == {
            (stop,) if isinstance(stop, str) else tuple(stop)
        }
    same = idle.requests([PROMPT] * 2, stop_tokens=[5, 6], ignore_eos=True)
    assert {r.stop_tokens for r in same} == {(5, 6)}


@pytest.mark.parametrize(
    ("settings", "seeds"),
    [
        ({}, [0, 1, 2]),
        ({"seed": 0}, [0, 0, 0]),
        ({"n": 2}, [0, 1, 2, 3, 4, 5]),
        ({"n": 2, "seed": 7}, [7, 8, 7, 8, 7, 8]),
        ({"n": 2, "seed": [1, 2**32 - 1, 3]}, [1, 2, 2**32 - 1, 0, 3, 4]),
    ],
)
def test_seeds(idle, settings, seeds):
    prompts = [[5], [6], [7]]
    requests = idle.requests(prompts, **settings)
    assert [r.seed for r in requests] == seeds
    assert [list(r.prompt) for r in requests] == [
        p for p in prompts for _ in range(len(seeds) // 3)
    ]


def test_checked_without_running(idle):
    requests = idle.requests([PROMPT, "ab"], seed=range(2), stop="x", top_k=4, ignore_eos=True)
    assert [r.prompt for r in requests] == [tuple(PROMPT), (0, *letters("ab"))]
    assert [r.seed for r in requests] == [0, 1]
    assert {(r.stop, r.stop_tokens, r.top_k) for r in requests} == {(("x",), (), 4)}
    with pytest.raises(ValueError, match="temperature: expected"):
        idle.requests(PROMPT, temperature=-1)


@pytest.mark.parametrize("value", [1, [1], [1, 2], "x", None])
def test_unknown_settings(idle, value):
    for call in (idle.generate, idle.stream, idle.requests):
        with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
            call(PROMPT, temprature=value)


def test_text_without_a_tokenizer(tiny):
    bare = Generator(tiny, None, MAX_LEN)
    for call in (bare.generate, bare.stream):
        with pytest.raises(ValueError, match="no tokenizer") as error:
            call("text")
        check_message(error, "prompt")
        with pytest.raises(ValueError, match="tokenizer") as error:
            call(PROMPT, stop="a")
        check_message(error, "stop")


def test_text_that_encodes_to_nothing(generator, monkeypatch):
    monkeypatch.setattr(generator.tokenizer, "encode", lambda text: [])
    with pytest.raises(ValueError, match="empty prompt") as error:
        generator.generate("東")
    check_message(error, "prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_len", 1),
        ("max_len", 129),
        ("max_len", 64.0),
        ("max_len", True),
        ("batch_sizes", ()),
        ("batch_sizes", (0, 4)),
        ("batch_sizes", (1.5,)),
        ("batch_sizes", 5),
        ("batch_sizes", None),
        ("batch_sizes", "4"),
        ("max_len", None),
        ("max_len", "64"),
        ("prefill_chunk", 0),
        ("prefill_chunk", 2.0),
        ("stride", 0),
        ("stride", -1),
        ("stride", True),
    ],
)
def test_settings_of_the_generator(tiny, name, value):
    with pytest.raises(ValueError, match="expected") as error:
        Generator(tiny, None, **{"max_len": MAX_LEN, name: value})
    check_message(error, name)


def test_the_default_length_is_refused_by_a_short_model(tiny):
    with pytest.raises(ValueError, match=r"2 to 128 .*max_position_embeddings.* got 4096"):
        Generator(tiny, None)


def test_other_things_than_a_model_and_its_tokenizer(tiny, tokenizer):
    for wrong in ((tokenizer, tiny), (None, None), ("demo", tokenizer)):
        with pytest.raises(ValueError, match=r"^model: expected a DeepSeekV3, got ") as error:
            Generator(*wrong, MAX_LEN)
        check_message(error, "model")
    for wrong in (tiny, "demo", 64):
        with pytest.raises(ValueError, match=r"^tokenizer: expected a .*Tokenizer or None, got "):
            Generator(tiny, wrong, MAX_LEN)

"""A model that computes NaN or an infinity: an error that contains the tokens before it."""

import contextlib
import json
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from dsv3_jax.generation.errors import NonFiniteLogitsError
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from tests.generation.fragments import VOCAB_SIZE, letters

SETTINGS = {"max_new_tokens": 12, "ignore_eos": True}
PROMPTS = [letters("some prompt"), letters("quiz"), [7]]


@contextlib.contextmanager
def edited(
    generator: Generator, model: DeepSeekV3, edit: Callable[[DeepSeekV3], None]
) -> Iterator[None]:
    """Replaces the generator's model by an edited copy. Nothing is compiled."""
    graph, state = nnx.split(model)
    copy = nnx.merge(graph, jax.tree.map(lambda x: x, state))
    edit(copy)
    generator.use(copy)
    try:
        yield
    finally:
        generator.use(model)


def set_rows(name: str, rows: object, value: object) -> Callable[[DeepSeekV3], None]:
    def edit(model: DeepSeekV3) -> None:
        weight = getattr(model, name).weight
        weight.set_value(weight.get_value().at[rows].set(value))

    return edit


def run(generator: Generator, prompts, **settings) -> NonFiniteLogitsError:
    with pytest.raises(NonFiniteLogitsError) as error:
        generator.generate(prompts, **SETTINGS | settings)
    assert "\n" not in str(error.value)
    for completion in error.value.generation:
        json.dumps(completion.as_json(), allow_nan=False)
    json.dumps(error.value.generation.stats.as_json(), allow_nan=False)
    return error.value


def test_everywhere(generator, tiny):
    prompts = [letters("some"), *PROMPTS[1:]]  # a chunk each, and so in one step
    with edited(generator, tiny, set_rows("norm", 0, jnp.nan)):
        error = run(generator, prompts, temperature=[0.0, 1.0, 0.5])
        assert [c.finish_reason for c in error.generation] == ["error"] * 3
        assert [c.tokens for c in error.generation] == [[]] * 3
        message = str(error)
        assert message.startswith(
            "prompt 0 (and 2 other sequences): expected finite logits for position 4 "
            "(4 prompt and 0 generated tokens before it), got NaN or an infinity; "
        )
        assert str(run(generator, prompts[:2])).startswith("prompt 0 (and 1 other sequence): ")
        stream = generator.stream(PROMPTS[0], **SETTINGS)
        with pytest.raises(NonFiniteLogitsError, match="expected finite logits"):
            next(stream)
        assert generator.warm_up(4) > 0  # ignores the logits of its made-up prompt


def test_latents_of_the_prompt(generator, tiny):
    """NaN is detected in the only sequence whose cache contains it, prefilled after the others."""
    poisoned = letters("q")[0]
    prompts = [PROMPTS[0], PROMPTS[2], PROMPTS[1]]
    want = [c.tokens for c in generator.generate(prompts, **SETTINGS)]
    assert not any(poisoned in tokens for tokens in want)
    with edited(generator, tiny, set_rows("embed_tokens", poisoned, jnp.nan)):
        error = run(generator, prompts)
        assert str(error).startswith("prompt 2: expected finite logits for position 4 ")
        assert [c.finish_reason for c in error.generation][2] == "error"
        assert error.generation[2].tokens == []
        # The others have the tokens so far, and are unaffected without the third one.
        for b in (0, 1):
            tokens = error.generation[b].tokens
            assert tokens
            assert tokens == want[b][: len(tokens)]
        clean = generator.generate(prompts[:2], **SETTINGS)
        assert [c.tokens for c in clean] == want[:2]


def test_after_finite_tokens(generator, tiny):
    want = generator.generate(PROMPTS[0], **SETTINGS)[0].tokens
    at = next(i for i in range(3, 12) if want[i] not in [*want[:i], *PROMPTS[0]])
    with edited(generator, tiny, set_rows("embed_tokens", want[at], jnp.nan)):
        completion = run(generator, PROMPTS[0]).generation[0]
        assert completion.tokens == want[: at + 1]
        assert len(completion.logprobs) == at + 1
        pieces = []
        with pytest.raises(NonFiniteLogitsError, match=f"position {len(PROMPTS[0]) + at + 1} "):
            pieces += generator.stream(PROMPTS[0], **SETTINGS)


@pytest.mark.parametrize("infinity", [float("inf"), -float("inf")])
def test_infinities(generator, tiny, infinity):
    """One logit is +inf or -inf; its sign depends on the hidden state."""
    row = jnp.zeros(tiny.config.hidden_size).at[5].set(infinity)
    with edited(generator, tiny, set_rows("lm_head", 40, row)):
        error = run(generator, PROMPTS)
        assert [c.tokens for c in error.generation] == [[]] * 3


@pytest.mark.slow
def test_padding_of_the_vocabulary_may_have_any_value(generator, tiny):
    want = generator.generate(PROMPTS, **SETTINGS, logprobs=2)
    with edited(generator, tiny, set_rows("lm_head", slice(VOCAB_SIZE, None), jnp.nan)):
        got = generator.generate(PROMPTS, **SETTINGS, logprobs=2)
    assert list(got) == list(want)

"""Copies from the device to the host: only new tokens, in windows."""

import numpy as np
import pytest

from dsv3_jax.generation import batch
from dsv3_jax.generation.generator import Generator
from tests.generation.fragments import letters

PROMPTS = [letters("one"), letters("a longer prompt"), [5]]
SETTINGS = {"max_new_tokens": 50, "ignore_eos": True, "temperature": 1.0, "logprobs": 2}


@pytest.mark.slow
def test_the_host_copies_new_tokens_in_windows(dense, monkeypatch):
    """A dispatch copies neither all positions of a sequence, nor too few of many new tokens."""
    max_len, window = 77, 16  # shapes for which nothing has been traced with the default window
    shapes = []
    host_values = batch.host_values

    def recorded(arrays):
        values = host_values(arrays)
        shapes.extend(
            np.shape(value) for value in (values if isinstance(values, tuple) else [values])
        )
        return values

    monkeypatch.setattr(batch, "host_values", recorded)
    monkeypatch.setattr(batch, "_WINDOW", window)
    generator = Generator(dense, None, max_len, batch_sizes=(3,), prefill_chunk=16)
    windowed = generator.generate(PROMPTS, **SETTINGS)
    assert [len(completion.tokens) for completion in windowed] == [50] * 3
    assert (3, window) in shapes
    assert not any(max_len in shape for shape in shapes)

    monkeypatch.undo()
    whole = Generator(dense, None, max_len + 1, batch_sizes=(3,), prefill_chunk=16)
    for a, b in zip(windowed, whole.generate(PROMPTS, **SETTINGS), strict=True):
        assert (a.tokens, a.logprobs, a.top_logprobs) == (b.tokens, b.logprobs, b.top_logprobs)

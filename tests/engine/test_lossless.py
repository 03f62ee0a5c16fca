"""The engine's sampled tokens keep the model's distribution, with drafts of all depths in a batch.

The counts of the first two tokens of many requests are compared with exact joint probabilities.
"""

from __future__ import annotations

import numpy as np
import pytest

from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.generation.request import TokenMask
from dsv3_jax.model import DeepSeekV3
from tests.generation.test_lossless import (
    PROMPT,
    SETTINGS,
    W,
    check_lossless,
    exact_probabilities,
    load_small,
)

pytestmark = pytest.mark.slow

SLOTS, REQUESTS = 256, 8192


def make(model: DeepSeekV3, draft: str, depth: int | str) -> Engine:
    return Engine(
        model,
        None,
        16,
        max_running=SLOTS,
        max_waiting=REQUESTS,
        background=False,
        draft=draft,
        draft_depth=depth,
        page_size=8,
        buckets=Buckets((SLOTS,), (64,), 8, 2),
    )


@pytest.mark.parametrize("draft", ["mtp", "ngram"])
def test_joint_of_two_tokens(tmp_path, draft):
    """Every third request goes without drafts; the others choose their depth themselves, and share
    steps with prompts and with requests at other positions."""
    model = load_small(tmp_path)
    engine = make(model, draft, "auto")
    handles = [
        engine.submit(
            PROMPT,
            max_new_tokens=3 + i % 4,
            ignore_eos=True,
            seed=i,
            draft=bool(i % 3),
            **SETTINGS[0],
        )
        for i in range(REQUESTS)
    ]
    while engine.step():
        pass
    joint = exact_probabilities(model, SETTINGS[0])
    drafted = accepted = 0
    for remainder in (0, 1, 2):
        pairs = np.zeros((W, W), int)
        for handle in handles[remainder::3]:
            completion = handle.result(0)
            pairs[completion.tokens[0], completion.tokens[1]] += 1
            if completion.speculation is not None:
                drafted += sum(completion.speculation.drafted)
                accepted += sum(completion.speculation.accepted)
        check_lossless(pairs, joint)
    assert 0.05 < accepted / drafted < 0.95, "nothing would be tested"


class Sets:
    """A grammar that allows one set of tokens at each position."""

    sets = ([4], [0, 2, 3, 5, 6], [1, 2, 5, 7], list(range(W)))

    def __init__(self):
        self.position = 0

    def mask(self) -> np.ndarray:
        return TokenMask.of(W, self.sets[self.position]).words

    def accept(self, token: int) -> None:
        assert token in self.sets[self.position]
        self.position += 1


def test_joint_of_two_tokens_with_a_grammar(tmp_path):
    """The first token is given. A step selects the second one with the mask, and often the third
    one without it, which the grammar then refuses half of the time."""
    model = load_small(tmp_path)
    engine = make(model, "mtp", 2)
    settings = {"temperature": 1.3, "max_new_tokens": 4, "ignore_eos": True}
    handles = [engine.submit(PROMPT, grammar=Sets(), seed=i, **settings) for i in range(REQUESTS)]
    while engine.step():
        pass

    def masked(logits: np.ndarray, generated: list[int]) -> np.ndarray:
        allowed = np.isin(np.arange(W), Sets.sets[1 + len(generated)])
        return np.where(allowed, logits, -np.inf)

    joint = exact_probabilities(model, {"temperature": 1.3}, masked, [*PROMPT, 4])
    pairs = np.zeros((W, W), int)
    accepted = 0
    for handle in handles:
        completion = handle.result(0)
        assert completion.tokens[0] == 4
        pairs[completion.tokens[1], completion.tokens[2]] += 1
        accepted += sum(completion.speculation.accepted)
    check_lossless(pairs, joint)
    assert accepted > REQUESTS / 10, "nothing would be tested"

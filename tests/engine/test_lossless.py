"""The engine's sampled tokens keep the model's distribution, with drafts of all depths in a batch.

The counts of the first two tokens of many requests are compared with exact joint probabilities.
"""

from __future__ import annotations

import numpy as np
import pytest

from dsv3_jax.engine import Engine
from dsv3_jax.engine.buckets import Buckets
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


@pytest.mark.parametrize("draft", ["mtp", "ngram"])
def test_joint_of_two_tokens(tmp_path, draft):
    """Every third request goes without drafts; the others choose their depth themselves, and share
    steps with prompts and with requests at other positions."""
    model = load_small(tmp_path)
    engine = Engine(
        model,
        None,
        16,
        max_running=SLOTS,
        max_waiting=REQUESTS,
        background=False,
        draft=draft,
        draft_depth="auto",
        page_size=8,
        buckets=Buckets((SLOTS,), (64,), 8, 2),
    )
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

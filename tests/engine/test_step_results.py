"""Results of a dispatch as Python's lists."""

from __future__ import annotations

from typing import Any

import numpy as np

from dsv3_jax.engine.device.executor import StepResults
from dsv3_jax.engine.device.step import StepOutput

MOST_STEPS, ROWS, TOKENS = 6, 3, 2


def output(executed: int) -> StepOutput:
    """The arrays of a dispatch of ``executed`` steps. The second request ends with the first."""
    counts = np.zeros((MOST_STEPS, ROWS), np.int32)
    counts[:executed] = [1, 0, 2]
    if executed:
        counts[0, 1] = 1
    tokens = np.arange(MOST_STEPS * ROWS * TOKENS, dtype=np.int32)
    tokens = tokens.reshape(MOST_STEPS, ROWS, TOKENS)
    no_top = np.zeros((MOST_STEPS, ROWS, TOKENS, 0))
    arrays: dict[str, Any] = {
        "tokens": tokens,
        "counts": counts,
        "finished": np.zeros(ROWS, np.int32),
        "drafted": np.ones((MOST_STEPS, ROWS), np.int32),
        "logprobs": -tokens.astype(np.float32),
        "top_tokens": no_top,
        "top_logprobs": no_top,
    }
    return StepOutput(**arrays, prompt=None)


def test_only_executed_steps_are_read():
    for executed in (0, 1, 4, MOST_STEPS):
        results = StepResults(output(executed))
        assert len(results._tokens) == executed
        assert [new.tokens for new in results.new_tokens(2, top=False)] == [
            [6 * step + 4, 6 * step + 5] for step in range(executed)
        ]
        assert [new.tokens for new in results.new_tokens(1, top=False)] == [[2]][:executed]
        assert all(new.drafted == 1 for new in results.new_tokens(0, top=False))

"""An engine whose device sleeps in every step, and so leaves all cores to the host's work."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import numpy as np

import dsv3_jax
from benchmarks.serving.host_time import InstantPrograms
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.device.step import StepOutput
from dsv3_jax.engine.device.step_input import StepShape
from dsv3_jax.tokenizer import Tokenizer


class SleepingPrograms(InstantPrograms):
    """Programs that predict token 7 and take a fixed time, without using a core."""

    step_seconds = 0.01

    def warm_up(self, *arguments: Any, **options: Any) -> None:
        """There is nothing to compile."""

    def __call__(
        self, state: SlotState, buffer: np.ndarray, shape: StepShape
    ) -> tuple[SlotState, StepOutput]:
        end = time.perf_counter() + self.step_seconds
        result = super().__call__(state, buffer, shape)
        time.sleep(max(0.0, end - time.perf_counter()))
        return result


def sleeping_engine(
    max_running: int, max_len: int, step_seconds: float
) -> tuple[Engine, Tokenizer]:
    """Returns an engine of the demo on a device that sleeps, and the demo's tokenizer.

    A step decodes once, as with 256 users on a large GPU, and prefills all waiting prompts.
    """
    model, tokenizer = dsv3_jax.load("demo")
    assert tokenizer is not None
    SleepingPrograms.step_seconds = step_seconds
    buckets = Buckets(
        decodes=(max_running,), chunks=(max_running,), chunk_tokens=max_len, max_steps=1
    )
    with mock.patch("dsv3_jax.engine.engine.Programs", SleepingPrograms):
        engine = Engine(model, tokenizer, max_len, max_running=max_running, buckets=buckets)
    return engine, tokenizer

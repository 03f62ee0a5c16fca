"""An engine whose device runs no model and sleeps in every step, so that all cores are free for the
host's work."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import dsv3_jax
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.device.step import StepOutput
from dsv3_jax.engine.device.step_input import StepShape, empty_input
from dsv3_jax.generation.completion import FULL, RUNNING
from dsv3_jax.tokenizer import Tokenizer


class _HostArray(np.ndarray):
    """An array with the methods of `jax.Array` that an engine calls."""

    def copy_to_host_async(self) -> None:
        """It is on the host."""

    def is_ready(self) -> bool:
        return True


class SleepingPrograms(Programs):
    """Programs that predict token 7 and take a fixed time, without using a core."""

    step_seconds = 0.01

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._lengths, self._limits = np.zeros((2, self.num_slots + 1), np.int32)

    def warm_up(self, *arguments: Any, **options: Any) -> None:
        """There is nothing to compile."""

    def empty_state(self, num_pages: int) -> SlotState:
        return super().empty_state(1)

    def __call__(
        self, state: SlotState, buffer: np.ndarray, shape: StepShape
    ) -> tuple[SlotState, StepOutput]:
        end = time.perf_counter() + self.step_seconds
        copy, (fields,) = empty_input(shape, self.num_slots)
        copy[...] = buffer
        inputs: Any = fields
        self._lengths[inputs.admitted_slots] = inputs.lengths
        self._limits[inputs.admitted_slots] = inputs.limits
        slots = np.concatenate([inputs.decode_slots, inputs.chunk_slots])
        has_token = np.concatenate([inputs.decode_slots < self.num_slots, inputs.is_last == 1])
        steps = shape.max_steps
        left = (self._limits - self._lengths)[slots]
        counts = (np.arange(steps)[:, None] < np.minimum(left, inputs.steps)) * has_token
        self._lengths[slots] += counts.sum(0, dtype=np.int32)
        is_full = (self._lengths >= self._limits)[slots] & has_token
        tokens, k = (steps, shape.rows, 1), shape.num_top_logprobs
        output = SimpleNamespace(
            tokens=np.full(tokens, 7),
            counts=counts,
            finished=np.where(is_full, FULL, RUNNING),
            drafted=np.zeros_like(counts),
            logprobs=np.zeros(tokens, np.float32),
            top_tokens=np.zeros((*tokens, k), np.int32),
            top_logprobs=np.zeros((*tokens, k), np.float32),
        )
        arrays: dict[str, Any] = {n: a.view(_HostArray) for n, a in vars(output).items()}
        time.sleep(max(0.0, end - time.perf_counter()))
        return state, StepOutput(**arrays, prompt=None)


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

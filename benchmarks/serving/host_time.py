"""Measures what the host does in a step of an engine whose device takes no time.

    python -m benchmarks.serving.host_time --max-running 256 --steps 300

Programs are replaced by a count of tokens, which is not part of the times. Everything else is the
engine's own. All requests of the chat trace are submitted at once; the measurement begins when no
slot is free. The result is JSON: microseconds per step, as in ``EngineStats.host_us``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

import dsv3_jax
from dsv3_jax.engine import Engine, EngineStats
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.device.programs import Programs
from dsv3_jax.engine.device.state import SlotState
from dsv3_jax.engine.device.step import StepOutput
from dsv3_jax.engine.device.step_input import StepShape, empty_input
from dsv3_jax.generation.completion import FULL, RUNNING
from dsv3_jax.traces import chat


class _HostArray(np.ndarray):
    def copy_to_host_async(self) -> None:
        """It is on the host."""


class InstantPrograms(Programs):
    """Programs that predict token 7 and run no model."""

    seconds = 0.0
    """Time of all of them."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self._lengths, self._limits = np.zeros((2, self.num_slots + 1), np.int32)

    def empty_state(self, num_pages: int) -> SlotState:
        return super().empty_state(1)

    def __call__(
        self, state: SlotState, buffer: np.ndarray, shape: StepShape
    ) -> tuple[SlotState, StepOutput]:
        began = time.perf_counter()
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
        InstantPrograms.seconds += time.perf_counter() - began
        return state, StepOutput(**arrays, prompt=None)


def measure(max_running: int, steps: int, count: int = 768) -> EngineStats:
    """Returns the figures of ``steps`` turns of the loop after all slots were filled."""
    model, trace = dsv3_jax.load("demo")[0], chat(count)
    most, vocab_size = model.config.max_position_embeddings, model.config.vocab_size
    buckets = Buckets.default(max_running, platform="gpu", absorbed_chunks=True)
    with mock.patch("dsv3_jax.engine.engine.Programs", InstantPrograms):
        engine = Engine(
            model,
            None,
            most,
            max_running=max_running,
            cache_tokens=1024 * max_running,
            buckets=dataclasses.replace(buckets, max_steps=1),
            background=False,
        )
    for i, request in enumerate(trace.requests):
        prompt = trace.prompt(i, vocab_size)[: most - request.output_tokens]
        engine.submit(prompt, max_new_tokens=request.output_tokens, ignore_eos=True)
    while (before := engine.stats()).running < max_running:
        engine.step()
    gc.collect()  # otherwise what the submissions made would be collected during the measurement
    InstantPrograms.seconds = 0.0
    for _ in range(steps):
        engine.step()
    stats = engine.stats().since(before)
    stats.host_us["dispatching"] -= 1e6 * InstantPrograms.seconds / steps
    engine.shutdown(drain=False)
    return stats


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the host's part of an engine's steps.")
    parser.add_argument("--max-running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    figures = measure(arguments.max_running, arguments.steps)
    print(json.dumps({name: round(us) for name, us in figures.host_us.items()}))

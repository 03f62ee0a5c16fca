"""Times one process from its start to a model's first token.

    python -m benchmarks.decode.first_token BEGAN MODEL WEIGHTS DTYPE LAYERS PROMPT CACHE

prints one JSON object with the seconds of each phase. ``BEGAN`` is the system time at which the
process was started, ``LAYERS`` the model's number of layers, and ``CACHE`` the directory of the
compilation cache.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from benchmarks.decode import machine, models
from dsv3_jax import compile_cache
from dsv3_jax.offline.generator import Generator

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
"""JAX's monitoring events and our names for them. Concurrent compilations add up."""


class Stopwatch:
    """Measures consecutive phases."""

    def __init__(self, began: float):
        self._last = began
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Records the seconds since the previous lap under ``name``."""
        now = time.time()
        self.laps[name] = now - self._last
        self._last = now


def main() -> None:
    began, name, weights, dtype, layers, prompt, cache = sys.argv[1:]
    watch = Stopwatch(float(began))
    watch.lap("imports")
    compile_cache.enable(Path(cache))
    jax.devices()
    watch.lap("device")
    config = dataclasses.replace(models.config(name), num_hidden_layers=int(layers))
    model = models.random_model(models.shapes(config, weights, dtype, mtp=False))
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    watch.lap("weights")
    program_seconds: dict[str, float] = collections.defaultdict(float)

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event in EVENTS:
            program_seconds[EVENTS[event]] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    tokens = list(range(int(prompt)))
    generator = Generator(model, None, max_len=len(tokens) + 64)
    settings = {"max_new_tokens": 1, "ignore_eos": True}
    generator.generate(tokens, **settings)
    watch.lap("programs")
    program_seconds = dict(program_seconds)
    generator.generate(tokens, **settings)
    watch.lap("second")
    second = watch.laps.pop("second")
    result = {
        "machine": machine.description(),
        "layers": config.num_hidden_layers,
        "first_token_s": sum(watch.laps.values()),
        "phases_s": watch.laps,
        "of_programs_s": program_seconds,
        "second_call_s": second,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

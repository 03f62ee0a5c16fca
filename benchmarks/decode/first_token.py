"""A process of its own, from its start to a model's first token: where the seconds go.

    python -m benchmarks.decode.first_token BEGAN MODEL WEIGHTS DTYPE LAYERS PROMPT CACHE

prints one JSON object of seconds since ``BEGAN``, a time of the system's clock. The model has as
many as ``LAYERS``; compiled programs are kept in the folder ``CACHE``.
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
from dsv3_jax.cli import compile_cache
from dsv3_jax.generation.generator import Generator

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
"""JAX's names of what it times; programs may be compiled side by side, and take seconds each."""


class Stopwatch:
    def __init__(self, began: float):
        self._last = began
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
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
    of_programs: dict[str, float] = collections.defaultdict(float)

    def listen(event: str, duration_secs: float, **kwargs: Any) -> None:
        if event in EVENTS:
            of_programs[EVENTS[event]] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    tokens = list(range(int(prompt)))
    generator = Generator(model, None, max_len=len(tokens) + 64)
    settings = {"max_new_tokens": 1, "ignore_eos": True}
    generator.generate(tokens, **settings)
    watch.lap("programs")
    of_programs = dict(of_programs)
    generator.generate(tokens, **settings)
    watch.lap("second")
    second = watch.laps.pop("second")
    found = {
        "machine": machine.description(),
        "layers": config.num_hidden_layers,
        "first_token_s": sum(watch.laps.values()),
        "phases_s": watch.laps,
        "of_programs_s": of_programs,
        "second_call_s": second,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()

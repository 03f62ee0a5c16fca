"""Times training steps of a model with random weights and tokens on one device.

    python -m scripts.bench_training                        # Moonlight, 8 layers, 4 x 4,096 tokens
    python -m scripts.bench_training --batch 8
    python -m scripts.bench_training --batch 1 --length 32768
    python -m scripts.bench_training --batch 1 --length 32768 --documents 16
    python -m scripts.bench_training --remat full
    python -m scripts.bench_training --moments-dtype bfloat16
    python -m scripts.bench_training --layers 0 --lora-rank 16              # bfloat16 base
    python -m scripts.bench_training --layers 0 --lora-rank 16 --base fp8
    python -m scripts.bench_training --config config.json --layers 0 --batch 16 --length 1024
    python -m scripts.bench_training --profile

JAX allocates 75 % of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set, to 0.94 for
example.

Prints one JSON object: the mean time of a step, tokens/s, MFU as ``dsv3 train`` defines it, which
counts the operations that low-rank updates need, the peak memory that JAX has allocated, the
compile time and the losses. The time is that of ``--steps``
steps one after the other, as in a run, after ``--warm-up`` ones. ``--profile`` traces two more
steps and adds ``profile``: milliseconds of a step by group of kernels and by kernel, their sum, and
the time from the first kernel to the last, in which kernels ran for the share ``busy``. stderr has
it as a table, where each kernel has the module and the operation of the traced program from which
XLA made it.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import description
from benchmarks.profile import trace
from benchmarks.profile.operations import Operation, operations
from dsv3_jax import ModelConfig, presets
from dsv3_jax.initialization import parameter_count, random_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import QUANTIZATIONS
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import separator
from dsv3_jax.training.metrics_log import utilisation
from dsv3_jax.training.trainer import Trainer

TRACED = 2  # steps of a profile
SHOWN = 40  # kernels in its table
_OUR_KERNEL = "_mosaic_gpu_kernel"


def model_config(name: str, layers: int, length: int) -> ModelConfig:
    """Returns a preset or a config.json, with its first ``layers`` layers, or all for 0, and with
    positions for ``length`` tokens (Moonlight has 8,192)."""
    config = ModelConfig.from_hf(name) if Path(name).exists() else presets.get(name)
    layers = layers or config.num_hidden_layers
    positions = max(length, config.max_position_embeddings)
    return dataclasses.replace(
        config, num_hidden_layers=layers, max_position_embeddings=positions, quantization=None
    )


def frozen_model(config: ModelConfig, base: str) -> DeepSeekV3:
    """Returns a random model in bfloat16, or with weights of the format ``base``."""
    quantization = QUANTIZATIONS[base]
    return DeepSeekV3(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, quantization=quantization)


def measure(
    make_model: Callable[[], DeepSeekV3],
    config: TrainingConfig,
    batch: int,
    length: int,
    steps: int,
    warm_up: int,
    documents: int | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    """Returns the figures of one configuration. With ``documents``, so many of equal length are in
    each sequence. With ``profiled``, :func:`profile` of further steps is among the figures."""
    initial = make_model()
    model = initial.config
    parameters = parameter_count(initial) + parameter_count(initial, mtp=True)
    trainer = Trainer(initial, config)
    del initial
    state, random = trainer.init(), np.random.default_rng(0)
    tokens = random.integers(1, model.vocab_size, (batch, length))
    if documents is not None:
        tokens[:, :: -(-length // documents)] = separator(model)
    tokens = trainer.shard_batch(tokens)
    losses, seconds = [], []
    for count in (1, warm_up, steps):
        began = time.perf_counter()
        for _ in range(count):
            state, metrics = trainer.step(state, tokens)
            losses.append(metrics.losses.main)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - began)
    step, device = seconds[-1] / steps, jax.devices()[0]
    rate = batch * length / step
    memory = device.memory_stats() or {}
    figures: dict[str, Any] = {
        "parameters": parameters,
        "batch": batch,
        "length": length,
        "documents": documents,
        "remat": config.remat,
        "moments_dtype": config.moments_dtype,
        "lora_rank": config.lora_rank,
        "ms": 1000 * step,
        "tokens_per_second": rate,
        "mfu": utilisation(
            model, length, rate, device.device_kind, config.compute_dtype, trainer.updates
        ),
        "peak_gb": memory.get("peak_bytes_in_use", 0) / 1e9,
        "first_step_s": seconds[0],
        "losses": [float(loss) for loss in losses],
    }
    if profiled:
        # The program that has just run: JAX keeps it and compiles nothing.
        compiled = trainer.programs.step.lower(*trainer.step_shapes(batch, length)).compile()

        def one_step() -> Any:
            nonlocal state
            state, metrics = trainer.step(state, tokens)
            return metrics

        events = trace.traced(one_step, TRACED)
        figures["profile"] = profile(events, operations(compiled.as_text() or ""))
    return figures


def profile(events: Sequence[trace.Event], by_name: dict[str, Operation]) -> dict[str, Any]:
    """Returns the times of :data:`TRACED` steps per step, in milliseconds, longest first.

    Equal fusions of all layers have one kernel, and are one row with the module and the operation
    of the longest of them.

    Args:
      by_name: operations of the compiled step.
    """
    rows: dict[str, dict[str, Any]] = {}
    groups: collections.Counter[str] = collections.Counter()
    for row in trace.summed(trace.kernels(events), by_name, TRACED)["kernels"]:
        operation = by_name.get(row["operation"])
        ms, group = row["us"] / 1e3, _group(row["kernel"], operation)
        empty = {"ms": 0.0, "launches": 0.0, "group": group, "kernel": row["kernel"]}
        source = {"module": row["kind"], "traced": row["traced"]}
        merged = rows.setdefault(row["kernel"], empty | source)
        merged["ms"] += ms
        merged["launches"] += row["launches"]
        groups[group] += ms
    wall = max(event.start_ns + event.ns for event in events) - min(e.start_ns for e in events)
    return {
        "wall_ms": wall / 1e6 / TRACED,
        "busy": trace.busy_fraction(events),
        "kernels_ms": groups.total(),
        "groups_ms": dict(groups.most_common()),
        "kernels": sorted(rows.values(), key=lambda row: -row["ms"]),
    }


def _group(kernel: str, operation: Operation | None) -> str:
    if _OUR_KERNEL in kernel:
        return kernel.partition(_OUR_KERNEL)[0]
    if "cudnn" in kernel:
        return "cuDNN"
    if kernel.startswith(("nvjet", "cutlass")) or "gemm" in kernel or "splitKreduce" in kernel:
        return "dense matmuls"
    if kernel.startswith(("Memcpy", "Memset")):
        return "copies"
    return "XLA fusions" if operation is not None and operation.opcode == "fusion" else "other"


def table(profile: dict[str, Any]) -> str:
    """Formats a profile as text: its groups, and the longest kernels."""
    total = profile["kernels_ms"]
    lines = [
        f"kernels {total:.1f} ms per step, traced step {profile['wall_ms']:.1f} ms,"
        f" busy {profile['busy']:.1%}"
    ]
    for group, ms in profile["groups_ms"].items():
        lines.append(f"  {ms:9.3f} ms {ms / total:6.1%}  {group}")
    for row in profile["kernels"][:SHOWN]:
        source = f"{row['module']}  {row['traced']}" if row["traced"] else row["module"]
        lines.append(
            f"  {row['ms']:9.3f} ms {row['launches']:6.1f}x  {row['kernel'][:48]:48}  {source}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time training steps on one device.")
    parser.add_argument("--config", default="moonlight-16b", help="preset or config.json")
    parser.add_argument("--layers", type=int, default=8, help="0: all")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--remat", default="none", help="policy of recomputation")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--compute-dtype", default="bfloat16")
    parser.add_argument("--moments-dtype", default="float32", help="or bfloat16, as V3 was trained")
    parser.add_argument("--lora-rank", type=int, default=0, help="0: train all weights")
    parser.add_argument("--base", choices=QUANTIZATIONS, help="frozen weights of --lora-rank")
    parser.add_argument(
        "--documents", type=int, help="documents per sequence, with attention inside each"
    )
    parser.add_argument("--profile", action="store_true", help="trace two more steps by kernel")
    given = parser.parse_args(arguments)
    config = TrainingConfig(
        steps=10_000,
        learning_rate=1e-4,
        final_learning_rate=1e-5,
        remat=given.remat,
        accumulate=given.accumulate,
        compute_dtype=given.compute_dtype,
        moments_dtype=given.moments_dtype,
        lora_rank=given.lora_rank,
        document_mask=given.documents is not None,
    )
    if given.base and not given.lora_rank:
        parser.error("--base: expected --lora-rank with it")
    model = model_config(given.config, given.layers, given.length)
    sizes = given.batch, given.length, given.steps, given.warm_up, given.documents, given.profile
    base = given.base or ("bf16" if given.lora_rank else None)

    def make_model() -> DeepSeekV3:
        return random_model(model, 0) if base is None else frozen_model(model, base)

    figures = measure(make_model, config, *sizes)
    if given.profile:
        print(table(figures["profile"]), file=sys.stderr)
    print(json.dumps(description() | {"base": base} | figures))


if __name__ == "__main__":
    main()

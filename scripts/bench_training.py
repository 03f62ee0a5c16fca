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

JAX allocates 75 % of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION is set, to 0.94 for
example.

Prints one JSON object: the mean time of a step, tokens/s, MFU as ``dsv3 train`` defines it, which
counts the operations that low-rank updates need, the peak memory that JAX has allocated, the
compile time and the losses. The time is that of ``--steps``
steps one after the other, as in a run, after ``--warm-up`` ones.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.machine import description
from dsv3_jax import ModelConfig, presets
from dsv3_jax.initialization import parameter_count, random_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import QUANTIZATIONS
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import separator
from dsv3_jax.training.metrics_log import utilisation
from dsv3_jax.training.trainer import Trainer


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
) -> dict[str, object]:
    """Returns the figures of one configuration. With ``documents``, so many of equal length are in
    each sequence."""
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
    return {
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
    sizes = given.batch, given.length, given.steps, given.warm_up, given.documents
    base = given.base or ("bf16" if given.lora_rank else None)

    def make_model() -> DeepSeekV3:
        return random_model(model, 0) if base is None else frozen_model(model, base)

    print(json.dumps(description() | {"base": base} | measure(make_model, config, *sizes)))


if __name__ == "__main__":
    main()

"""Trains the demo with sparse attention, from the demo's weights, as DeepSeek-V3.2 from V3.1.

    python scripts/train_sparse_demo.py --out runs/demo-sparse

The two stages are those of the V3.2 report. In the dense warm-up the demo's weights are frozen, and
random indexers learn the probabilities of dense attention. As their inputs do not depend on
indexers, the inputs of all layers are computed once, and each indexer is trained by itself. In the
sparse stage attention is sparse: the language-model loss trains all weights but the indexers', and
each indexer, detached from it, learns the probabilities of attention to the tokens it selects.

The data is a few modules of the standard library of the running interpreter; the demo's was that of
CPython 3.11.7. The result is a directory with two checkpoints that ``dsv3_jax.load`` reads,
``warm-up`` and ``model``, and training.json with the losses of both stages. ``model`` is what
``load("demo-sparse")`` reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import os
import platform
import shutil
import sysconfig
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.checkpoint.load import load
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.layers.block import DecoderLayer, run_in_order
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation, rotation_at
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.training import run as training_run
from dsv3_jax.training.batches import TrainingBatches
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus, document_tokens, pack
from dsv3_jax.training.indexer import divergence, is_indexer
from dsv3_jax.training.session import TrainingResult
from dsv3_jax.training.settings import RunSettings
from scripts.train_demo import modules, print_entry, write_json

HEADS, HEAD_DIM, TOPK = 4, 64, 32
Inputs = Float32[Array, "B T D"]


def is_sampled(name: str) -> bool:
    """Returns whether a module is used: one in 100 is held out, and one in 25 is trained on.

    Of every 25 modules, the demo was not trained on those with a remainder of 0.
    """
    return zlib.crc32(name.encode()) % 100 in (0, 1, 2, 3, 4)


def with_indexers(dense: DeepSeekV3, seed: int) -> DeepSeekV3:
    """Returns the model of DeepSeek-V3.2 with the weights of ``dense`` and random indexers."""
    config = dataclasses.replace(
        dense.config,
        model_type="deepseek_v32",
        quantization=None,
        index_n_heads=HEADS,
        index_head_dim=HEAD_DIM,
        index_topk=TOPK,
    )
    model = DeepSeekV3(config, rngs=nnx.Rngs(seed))
    nnx.update(model, nnx.state(dense))
    return model


def inputs_of_layers(model: DeepSeekV3, batches: Sequence[np.ndarray]) -> list[list[Inputs]]:
    """Returns the input of each layer's attention, MTP layers last, under dense attention."""
    graph, weights = nnx.split(model)

    @jax.jit
    def of_batch(weights: nnx.State, tokens: Int[Array, "B T"]) -> list[Inputs]:
        inputs = []

        def run(
            layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
        ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
            all_stats = []
            for layer in layers:
                assert isinstance(layer.self_attn, SparseAttention)
                layer.self_attn.is_dense = True
                inputs.append(layer.input_layernorm(x))
                x, stats = run_in_order([layer], x, rotation)
                all_stats += stats
            return x, all_stats

        nnx.merge(graph, weights)(tokens, return_aux=True, run_layers=run)
        return inputs

    by_batch = [of_batch(weights, jnp.asarray(tokens)) for tokens in batches]
    return [list(inputs) for inputs in zip(*by_batch, strict=True)]


def train_indexer(
    attention: SparseAttention,
    inputs: Sequence[Inputs],
    rotation: Rotation,
    steps: int,
    learning_rate: float,
) -> list[float]:
    """Trains the indexer of an attention in place. Returns the loss of each step, in nats."""
    graph, params, rest = nnx.split(attention, lambda path, _: is_indexer(path), ...)
    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, steps, 0.05))
    state = params, optimizer.init(params)
    losses = []
    for step in range(steps):
        x = inputs[step % len(inputs)]
        state, loss = _step(graph, optimizer.update, state, rest, x, rotation)
        losses.append(loss)
    nnx.update(attention, state[0])
    return [float(loss) for loss in losses]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(graph, update, state, rest, x, rotation):
    params, moments = state

    def loss(params: nnx.State) -> Float32[Array, ""]:
        return divergence(nnx.merge(graph, params, rest), x, rotation, selected=False)

    value, gradient = jax.value_and_grad(loss)(params)
    updates, moments = update(gradient, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def warm_up(model: DeepSeekV3, corpus: Corpus, options: argparse.Namespace) -> list[list[float]]:
    """Trains the indexers of all layers in place. Returns each one's losses."""
    stream = TrainingBatches(corpus.train, options.batch, options.length, options.seed)
    batches = [next(stream) for _ in range(options.batches)]
    losses = []
    for layer, inputs in zip(
        [*model.layers, *model.mtp], inputs_of_layers(model, batches), strict=True
    ):
        B, T, _ = inputs[0].shape  # an MTP layer has one token fewer
        rotation = rotation_at(model.config, jnp.broadcast_to(jnp.arange(T), (B, T)))
        attention = layer.self_attn
        assert isinstance(attention, SparseAttention)
        losses.append(
            train_indexer(attention, inputs, rotation, options.steps, options.learning_rate)
        )
        print(f"loss {losses[-1][0]:.3f} to {losses[-1][-1]:.3f}", flush=True)
    return losses


def sparse_stage(
    model: DeepSeekV3, corpus: Corpus, run: Path, options: argparse.Namespace
) -> TrainingResult:
    """Trains all weights under sparse attention. ``run`` is the directory of the training run."""
    config = TrainingConfig(
        steps=options.sparse_steps,
        learning_rate=options.sparse_learning_rate,
        final_learning_rate=options.sparse_learning_rate / 10,
        warmup_steps=min(10, options.sparse_steps // 4),
        decay_start=0.0,
        decay_end=1.0,
        final_mtp_weight=0.3,
        balance_weight=0.0,
        bias_update_speed=0.0,  # so few tokens say little about the load of experts
        compute_dtype="float32",
        indexer_stage="sparse",
    )
    settings = RunSettings(
        batch=options.batch,
        length=options.length,
        seed=options.seed + 1,  # other sequences than those of the warm-up
        log_every=10,
        eval_batches=8,
        keep=0,
    )
    return training_run.train(model, corpus, run, config, settings, report=print_entry)


def write(model: DeepSeekV3, directory: Path) -> None:
    """Writes the model as DeepSeek publishes it, with the demo's tokenizer."""

    def copy_tokenizer(target: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(DEMO / name, target / name)

    write_checkpoint(model, directory, quantization=BlockQuantization(), add_files=copy_tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo with sparse attention.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--steps", type=int, default=80, help="steps of the warm-up")
    parser.add_argument("--batches", type=int, default=20, help="batches of the warm-up")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="warm-up's rate")
    parser.add_argument("--sparse-steps", type=int, default=80)
    parser.add_argument("--sparse-learning-rate", type=float, default=2e-4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    start = time.perf_counter()
    demo, tokenizer = load("demo", dtype=jnp.float32)
    assert tokenizer is not None
    config = demo.config
    some = [each for each in modules(options.stdlib) if is_sampled(each[0])]
    corpus = pack(some, tokenizer, *document_tokens(config))
    model = with_indexers(demo, options.seed)
    warm_up_losses = warm_up(model, corpus, options)
    write(model, options.out / "warm-up")
    warmed_up = time.perf_counter()
    trained = sparse_stage(model, corpus, options.out / "run", options)
    write(trained.model, options.out / "model")
    result = {
        "options": {
            name: value for name, value in vars(options).items() if name not in ("out", "stdlib")
        },
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, "
        f"{jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
        "seconds": {
            "warm_up": round(warmed_up - start),
            "sparse": round(time.perf_counter() - warmed_up),
        },
        "warm_up": [[round(loss, 4) for loss in each[::20]] for each in warm_up_losses],
        "sparse": trained.metrics,
    }
    write_json(options.out / "training.json", result)


if __name__ == "__main__":
    main()

"""Trains indexers for the demo checkpoint, which make its attention sparse as in DeepSeek-V3.2.

    python scripts/train_sparse_demo.py --out runs/demo-sparse

This is the dense warm-up of the V3.2 report: the demo's own weights are frozen, and indexers learn
the probabilities of dense attention. As their inputs do not depend on indexers, the inputs of all
layers are computed once, and each indexer is trained by itself. The data is a few modules of the
standard library of the running interpreter; the demo's was that of CPython 3.11.7.

The result is a directory ``model`` that ``dsv3_jax.load`` reads, and training.json: the loss of
each indexer, held-out losses with dense and with sparse attention, and the recall of each layer's
indexer (:func:`dsv3_jax.training.indexer.recall`).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
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

from dsv3_jax.checkpoint.find import find
from dsv3_jax.checkpoint.load import load
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.layers.block import DecoderLayer
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation, rotation_at
from dsv3_jax.layers.runner import run_in_order
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.training.batches import TrainingBatches, held_out_batches, target_count
from dsv3_jax.training.corpus import Corpus, pack
from dsv3_jax.training.indexer import divergence, is_indexer, recall
from dsv3_jax.training.losses import cross_entropy, target_mask
from scripts.train_demo import modules, write_json

HEADS, HEAD_DIM, TOPK = 4, 64, 128
EVALUATIONS = ((1024, 8), (2048, 4))
"""Tokens per sequence, and number of sequences, of each evaluation."""

Inputs = Float32[Array, "B T D"]


def is_sampled(name: str) -> bool:
    """Returns whether a module is used: one in 100 is held out, and about as many are trained on.

    Of every 25 modules, the demo was not trained on those with a remainder of 0.
    """
    return zlib.crc32(name.encode()) % 100 in (0, 1)


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


def forward(
    model: DeepSeekV3, tokens: Int[Array, "B T"], *, dense: bool
) -> tuple[Float32[Array, ""], list[Float32[Array, ""]]]:
    """Returns the sum of the next-token losses of a batch, and with dense attention also the recall
    of each decoder layer's indexer."""
    recalls = []

    def run(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        for layer in layers:
            attention = layer.self_attn
            assert isinstance(attention, SparseAttention)
            attention.is_dense = dense
            if dense:
                recalls.append(recall(attention, layer.input_layernorm(x), rotation))
        return run_in_order(layers, x, rotation)

    def run_each(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        for layer in layers:
            x, _ = run([layer], x, rotation)
        return x, []

    logits = model(tokens, run_layers=run_each)
    mask = target_mask(tokens, model.config.bos_token_id, 1)
    return cross_entropy(logits[:, :-1], tokens[:, 1:], mask, jnp.int32(1)), recalls


def measure(model: DeepSeekV3, corpus: Corpus, length: int, sequences: int) -> dict[str, object]:
    """Returns held-out losses with dense and sparse attention, and the indexers' recall."""
    bos, graph_and_weights = model.config.bos_token_id, nnx.split(model)
    batches = held_out_batches(corpus.held_out, 1, length, bos, sequences)
    targets = sum(target_count(tokens, bos, 1) for tokens in batches)

    @functools.partial(jax.jit, static_argnames="dense")
    def of_batch(weights: nnx.State, tokens: Int[Array, "B T"], dense: bool) -> object:
        return forward(nnx.merge(graph_and_weights[0], weights), tokens, dense=dense)

    dense, sparse = (
        [of_batch(graph_and_weights[1], jnp.asarray(tokens), dense) for tokens in batches]
        for dense in (True, False)
    )
    recalls = np.mean([each for _, each in dense], axis=0)
    return {
        "length": length,
        "sequences": sequences,
        "dense": float(sum(loss for loss, _ in dense)) / targets,
        "sparse": float(sum(loss for loss, _ in sparse)) / targets,
        "recall": [round(float(each), 4) for each in recalls],
    }


def write(model: DeepSeekV3, directory: Path) -> int:
    """Writes the model as DeepSeek publishes it, with the demo's tokenizer. Returns the bytes of
    the tensors that the demo does not have."""
    demo = find("demo")

    def copy_tokenizer(target: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo / name, target / name)

    write_checkpoint(model, directory, quantization=BlockQuantization(), add_files=copy_tokenizer)
    before, after = CheckpointReader(demo), CheckpointReader(directory)
    return sum(after[name].nbytes for name in after if name not in before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train indexers for the demo checkpoint.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    start = time.perf_counter()
    demo, tokenizer = load("demo", dtype=jnp.float32)
    assert tokenizer is not None
    config = demo.config
    some = [each for each in modules(options.stdlib) if is_sampled(each[0])]
    corpus = pack(some, tokenizer, config.bos_token_id, config.eos_token_id[0])
    model = with_indexers(demo, options.seed)
    stream = TrainingBatches(corpus.train, options.batch, options.length, options.seed)
    batches = [next(stream) for _ in range(options.batches)]
    losses = []
    for layer, inputs in zip(
        [*model.layers, *model.mtp], inputs_of_layers(model, batches), strict=True
    ):
        T, attention = inputs[0].shape[1], layer.self_attn
        assert isinstance(attention, SparseAttention)
        rotation = rotation_at(config, jnp.broadcast_to(jnp.arange(T), (options.batch, T)))
        losses.append(
            train_indexer(attention, inputs, rotation, options.steps, options.learning_rate)
        )
        print(f"loss {losses[-1][0]:.3f} to {losses[-1][-1]:.3f}", flush=True)
    result = {
        "added_bytes": write(model, options.out / "model"),
        "options": {
            name: value for name, value in vars(options).items() if name not in ("out", "stdlib")
        },
        "machine": f"{platform.machine()}, {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "train_tokens": len(corpus.train),
        "held_out_tokens": len(corpus.held_out),
        "seconds": round(time.perf_counter() - start),
        "indexer_loss": [[round(loss, 4) for loss in each[::20]] for each in losses],
        "held_out": [],
    }
    for length, sequences in EVALUATIONS:
        result["held_out"].append(measure(model, corpus, length, sequences))
        print(json.dumps(result["held_out"][-1]), flush=True)
        write_json(options.out / "training.json", result)


if __name__ == "__main__":
    main()

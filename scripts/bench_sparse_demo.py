"""Measures what sparse attention costs the demo, on held-out text.

    python -m scripts.bench_sparse_demo --warm-up runs/demo-sparse/warm-up \\
        --out benchmarks/results/sparse_demo.json --page dsv3_jax/demo_sparse/README.md

Four models are compared: the demo with random indexers, with those of the dense warm-up
(``scripts/train_sparse_demo.py`` writes that checkpoint), the demo with sparse attention as it is
shipped, and the demo itself. The first two have the demo's weights, so that their loss with dense
attention is the demo's.

A layer's mass is the share of dense attention's probability, averaged over its heads, that the
selected tokens have; its recall is the share of the ``index_topk`` most probable tokens that are
selected. Both are means over the queries that see more tokens than that. The text is a share of the
modules of the running interpreter's standard library on which no demo was trained.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import platform
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int

import dsv3_jax
from dsv3_jax.checkpoint.find import DEMOS
from dsv3_jax.files import atomic_write
from dsv3_jax.layers.block import DecoderLayer, run_in_order
from dsv3_jax.layers.moe import RoutingStats
from dsv3_jax.layers.rope import Rotation
from dsv3_jax.layers.sparse_attention import SparseAttention
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.batches import held_out_batches, target_count
from dsv3_jax.training.corpus import document_tokens, pack, separator
from dsv3_jax.training.indexer import attention_mass, recall
from dsv3_jax.training.losses import cross_entropy, target_mask
from scripts.train_demo import modules
from scripts.train_sparse_demo import is_sampled, with_indexers

BEGIN, END = "<!-- losses: begin -->", "<!-- losses: end -->"

Shares = list[tuple[Float32[Array, ""], Float32[Array, ""]]]


def forward(
    model: DeepSeekV3, tokens: Int[Array, "B T"], *, dense: bool
) -> tuple[Float32[Array, ""], Shares]:
    """Returns the sum of the next-token losses of a batch, and with dense attention also the mass
    and the recall of each decoder layer's indexer."""
    shares: Shares = []

    def run(
        layers: Sequence[DecoderLayer], x: Float[Array, "B T D"], rotation: Rotation
    ) -> tuple[Float[Array, "B T D"], list[RoutingStats]]:
        for layer in layers:
            attention = layer.self_attn
            if isinstance(attention, SparseAttention):
                attention.is_dense = dense
                if dense:
                    inputs = attention, layer.input_layernorm(x), rotation
                    shares.append((attention_mass(*inputs), recall(*inputs)))
            x, _ = run_in_order([layer], x, rotation)
        return x, []

    logits = model(tokens, run_layers=run)
    mask = target_mask(tokens, separator(model.config), 1)
    return cross_entropy(logits[:, :-1], tokens[:, 1:], mask, jnp.int32(1)), shares


def measure(
    model: DeepSeekV3, held_out: Int[np.ndarray, " M"], length: int, sequences: int
) -> dict[str, object]:
    """Returns the held-out loss with dense attention, and for a model with indexers that with
    sparse attention, and each layer's mass and recall."""
    bos, (graph, weights) = separator(model.config), nnx.split(model)
    batches = held_out_batches(held_out, 1, length, bos, sequences)
    targets = sum(target_count(tokens, bos, 1) for tokens in batches)

    @functools.partial(jax.jit, static_argnames="dense")
    def of_batch(
        weights: nnx.State, tokens: Int[Array, "B T"], dense: bool
    ) -> tuple[Float32[Array, ""], Shares]:
        return forward(nnx.merge(graph, weights), tokens, dense=dense)

    def loss_and_shares(dense: bool) -> tuple[float, np.ndarray]:
        results = [of_batch(weights, jnp.asarray(tokens), dense) for tokens in batches]
        loss = float(sum(loss for loss, _ in results)) / targets
        return loss, np.mean([shares for _, shares in results], axis=0)

    dense, shares = loss_and_shares(dense=True)
    row: dict[str, object] = {"length": length, "sequences": sequences, "dense_loss": dense}
    if not model.config.has_indexer:
        return row
    row["sparse_loss"], _ = loss_and_shares(dense=False)
    for name, each in zip(("mass", "recall"), shares.T, strict=True):
        row[name] = [round(float(share), 4) for share in each]
    return row


def tables(result: dict[str, Any]) -> str:
    """Formats the losses, and the mass of each layer, as Markdown tables."""
    rows = result["rows"]
    lengths = sorted({row["length"] for row in rows})
    columns = [f"{form}, {length:,} tokens" for length in lengths for form in ("dense", "sparse")]
    lines = [f"| model | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    by_model = {(row["model"], row["length"]): row for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    for model in models:
        of_model = [by_model[model, length] for length in lengths]
        keys = ("dense_loss", "sparse_loss")
        losses = [f"{row[key]:.4f}" if key in row else "" for row in of_model for key in keys]
        lines.append(f"| {model} | {' | '.join(losses)} |")
    layers = range(len(by_model[models[-1], lengths[-1]]["mass"]))
    heads = " | ".join(f"layer {layer}" for layer in layers)
    lines += ["", f"| mass, {lengths[-1]:,} tokens | {heads} |", f"|---|{'---:|' * len(layers)}"]
    for model in models:
        if mass := by_model[model, lengths[-1]].get("mass"):
            lines.append(f"| {model} | {' | '.join(f'{share:.1%}' for share in mass)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Held-out losses of the demo's attentions.")
    parser.add_argument("--warm-up", type=Path, required=True, help="checkpoint of the warm-up")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/sparse_demo.json"))
    parser.add_argument("--page", type=Path, help="document to write the tables into")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--tokens", type=int, default=8192, help="for each length")
    options = parser.parse_args()
    load = functools.partial(dsv3_jax.load, dtype="float32", mtp=False)
    demo, tokenizer = load("demo")
    assert tokenizer is not None
    config = demo.config
    texts = [each for each in modules(options.stdlib) if is_sampled(each[0])]
    held_out = pack(texts, tokenizer, *document_tokens(config)).held_out
    models = {
        "demo": demo,
        "random indexers": with_indexers(demo, 0),
        "warm-up": load(options.warm_up)[0],
        "demo-sparse": load("demo-sparse")[0],
    }
    rows = []
    for name, model in models.items():
        for length in options.lengths:
            sequences = options.tokens // length
            rows.append({"model": name, **measure(model, held_out, length, sequences)})
            print(json.dumps(rows[-1]), flush=True)
    sparse = models["demo-sparse"].config
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, "
        f"{jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "index_topk": sparse.index_topk,
        "index_n_heads": sparse.index_n_heads,
        "index_head_dim": sparse.index_head_dim,
        "file_bytes": {
            name: sum(path.stat().st_size for path in directory.glob("*.safetensors"))
            for name, directory in DEMOS.items()
        },
        "rows": rows,
    }
    atomic_write(options.out, json.dumps(result, indent=1) + "\n")
    if options.page:
        before, _, rest = options.page.read_text("utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        atomic_write(options.page, f"{before}{BEGIN}\n{tables(result)}\n{END}{after}")


if __name__ == "__main__":
    main()

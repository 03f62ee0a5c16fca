"""Measures the quality loss and the size of quantized weights, on held-out text.

    python scripts/bench_quantization.py --model demo --tokens runs/demo/tokens.npz \\
        --out benchmarks/results/quantization.json
    python -m scripts.bench_quantization --tokens demo --batches 8 --activations \\
        --out benchmarks/results/activations_demo.json

Every format is a store that ``dsv3 convert`` makes of the model. The model runs with the weights as
stored and is compared with the bfloat16 store by: KL(bf16 || format), the mean over positions of
``sum_w p log(p / q)`` over the whole vocabulary, in nats per token; how often both have the same
most likely token; and the loss. All formats use the same windows, and positions before a BOS do not
count, as in training. ``--activations`` adds the formats that take float8 activations, with them.
``--tokens demo`` takes the modules of the running interpreter's standard library on which the demo
was not trained. If the model was published in float8, the bfloat16 store has the same weights
after rounding, so the fp8 row measures only that rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int

import dsv3_jax
from benchmarks import machine
from dsv3_jax.accounting import checkpoint_bytes
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.find import find
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import INT4, INT8, BlockQuantization, Quantization
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training.batches import held_out_batches, target_count
from dsv3_jax.training.corpus import (
    document_tokens,
    is_held_out,
    pack,
    read_corpus,
    separator,
)
from dsv3_jax.training.losses import target_mask
from scripts.train_demo import modules

Form = Literal["bf16", "fp8", "int8", "int4"]
FORMS: tuple[Form, ...] = ("bf16", "fp8", "int8", "int4")
FLOAT8_ACTIVATIONS: tuple[Form, ...] = ("fp8", "int4")
"""Formats of weights that take float8 activations."""


def compare(
    models: Mapping[str, DeepSeekV3], batches: Iterable[np.ndarray]
) -> dict[str, dict[str, float]]:
    """Compares every model with ``bf16``: means over all counted positions of [B, T] batches."""
    bos = separator(models["bf16"].config)
    totals, places = {form: np.zeros(3) for form in models}, 0
    for batch in batches:
        tokens = jnp.asarray(batch)
        log_p = log_probabilities(*nnx.split(models["bf16"]), tokens)
        for form, model in models.items():
            log_q = log_p if form == "bf16" else log_probabilities(*nnx.split(model), tokens)
            totals[form] += np.asarray(sums(log_p, log_q, tokens, bos), np.float64)
        places += target_count(batch, bos)
    names = ("kl", "top1_agreement", "loss")
    return {
        form: dict(zip(names, (total / places).tolist(), strict=True))
        for form, total in totals.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def log_probabilities(
    graph: nnx.GraphDef, state: nnx.State, tokens: Int[Array, "B T"]
) -> Float32[Array, "B T W"]:
    return jax.nn.log_softmax(nnx.merge(graph, state)(tokens), axis=-1)


@functools.partial(jax.jit, static_argnums=3)
def sums(
    log_p: Float32[Array, "B T W"],
    log_q: Float32[Array, "B T W"],
    tokens: Int[Array, "B T"],
    bos: int,
) -> Float32[Array, " 3"]:
    """Sums KL(p || q), top-1 agreements, and losses of q over the counted positions."""
    log_p, log_q = log_p[:, :-1], log_q[:, :-1]
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    # q - p sums to zero up to the rounding of log_softmax. Adding it makes every term nonnegative,
    # and cancels that rounding in the other terms, which matters if p and q are close.
    kl = jnp.sum(p * (log_p - log_q) + (q - p), axis=-1)
    same = jnp.argmax(log_p, axis=-1) == jnp.argmax(log_q, axis=-1)
    loss = -jnp.take_along_axis(log_q, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(jnp.stack([kl, same, loss]) * target_mask(tokens, bos, 1), axis=(1, 2))


def held_out_tokens(source: str, config: ModelConfig, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the held-out tokens of an .npz file, or of ``demo``."""
    if source != "demo":
        return read_corpus([Path(source)], config).held_out
    texts = modules(Path(sysconfig.get_path("stdlib")))
    held_out = [each for each in texts if is_held_out(each[0])]
    # Nothing of it is for training: both parts are held out.
    return np.concatenate(pack(held_out, tokenizer, *document_tokens(config)))


def weight_bytes(config: ModelConfig, form: Form) -> int:
    """Returns the bytes of the main model's weights and scales as stored."""
    published = config.quantization
    forms: dict[Form, Quantization | None] = {
        "bf16": None,
        "fp8": published if isinstance(published, BlockQuantization) else BlockQuantization(),
        "int8": INT8,
        "int4": INT4,
    }
    stored = dataclasses.replace(
        config, quantization=forms[form], dtype="bfloat16", num_nextn_predict_layers=0
    )
    return checkpoint_bytes(stored)


def load_as(store: Path, form: Form, dtype: str, activations: str | None = None) -> DeepSeekV3:
    """Loads the store of that format."""
    quantization = None if form == "bf16" else form
    options: Any = {"dtype": dtype, "quantization": quantization, "activations": activations}
    return dsv3_jax.load(store, mtp=False, **options)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="Quantized weights on held-out text.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", required=True, help="demo, or an .npz with `held_out`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quantization.json"))
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="float32")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument(
        "--batches", type=int, default=0, help="maximum number of batches; 0 uses all of the text"
    )
    parser.add_argument("--activations", action="store_true", help="also with float8 activations")
    arguments = parser.parse_args()
    source = find(arguments.model)
    config = ModelConfig.from_hf(source)
    batches = held_out_batches(
        held_out_tokens(arguments.tokens, config, Tokenizer(source)),
        arguments.batch,
        arguments.length,
        separator(config),
        arguments.batches,
    )
    # TF32, a GPU's default for float32, would add noise as large as the measured effect.
    with tempfile.TemporaryDirectory() as stores, jax.default_matmul_precision("highest"):
        for form in FORMS:
            convert(source, Path(stores) / form, to=form)
        # The formats by name, and those with float8 activations.
        forms: dict[str, Form] = {form: form for form in FORMS}
        models = {form: load_as(Path(stores) / form, form, arguments.dtype) for form in FORMS}
        for form in FLOAT8_ACTIVATIONS if arguments.activations else ():
            name = f"{form}, float8 activations"
            forms[name] = form
            models[name] = load_as(Path(stores) / form, form, arguments.dtype, "float8")
        losses = compare(models, batches)
    rows = [
        {"form": name, "weight_bytes": weight_bytes(config, form), **losses[name]}
        for name, form in forms.items()
    ]
    for row in rows:
        print(row)
    result = {
        **machine.description(),
        "model": arguments.model,
        "published": "fp8" if config.quantization else config.dtype,
        "dtype": arguments.dtype,
        "window": arguments.length,
        "places": sum(target_count(tokens, separator(config)) for tokens in batches),
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measures the quality loss of caches in float8, on held-out text.

    python -m scripts.bench_cache_dtype --model demo --tokens runs/demo/tokens.npz \\
        --out benchmarks/results/cache_dtype_demo.json

The model with each cache is compared with the one whose cache has the dtype of its activations, as
:mod:`scripts.bench_quantization` compares weights: KL(exact || format) in nats per token, how often
both have the same most likely token, and the loss. A forward pass rounds latents and indexer keys
as a cache does. ``--tokens demo`` takes the modules of the running interpreter's standard library
on which the demo was not trained.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
from pathlib import Path
from typing import get_args

import jax

import dsv3_jax
from dsv3_jax.accounting import cache_bytes_per_token
from dsv3_jax.files import atomic_write
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE, CacheSpec
from dsv3_jax.quantization import CacheDtype
from dsv3_jax.training.batches import held_out_batches, target_count
from dsv3_jax.training.corpus import separator
from scripts.bench_quantization import compare, held_out_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description="Caches in float8 on held-out text.")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--tokens", required=True, help="demo, or an .npz with `held_out`")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/cache_dtype.json"))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=0, help="0 uses all of the text")
    options = parser.parse_args()
    exact, tokenizer = dsv3_jax.load(options.model, dtype="float32", mtp=False)
    assert tokenizer is not None
    config = exact.config
    known: tuple[CacheDtype, ...] = get_args(CacheDtype)
    forms: list[CacheDtype] = [form for form in known if config.has_indexer or form == "fp8"]
    models = {"bf16": exact} | {
        form: dsv3_jax.load(options.model, dtype="float32", mtp=False, cache_dtype=form)[0]
        for form in forms
    }
    tokens = held_out_tokens(options.tokens, config, tokenizer)
    batches = held_out_batches(tokens, 1, options.length, separator(config), options.batches)
    # TF32, a GPU's default for float32, would add noise as large as the measured effect.
    with jax.default_matmul_precision("highest"):
        # The first model is what the others are compared with; its own cache is exact.
        losses = compare(models, batches)
    rows = []
    cache_dtypes: list[CacheDtype | None] = [None, *forms]
    for cache_dtype in cache_dtypes:
        form = cache_dtype or "bf16"
        spec = CacheSpec.of_config(config, "bfloat16", cache_dtype=cache_dtype)
        bytes_per_token = sum(
            array.page_bytes(DEFAULT_PAGE_SIZE) // DEFAULT_PAGE_SIZE
            for layer in spec.layers
            for array in layer.values()
        )
        rows.append({"form": form, "bytes_per_token": bytes_per_token, **losses[form]})
    assert rows[0]["bytes_per_token"] == cache_bytes_per_token(config)
    for row in rows:
        print(
            f"{row['form']:>10} {row['bytes_per_token']:>7,} {row['kl']:>10.2e} "
            f"{row['top1_agreement']:>7.4f} {row['loss']:>8.4f}"
        )
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}, "
        f"{jax.devices()[0].device_kind}",
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "model": options.model,
        "window": options.length,
        "places": sum(target_count(tokens, separator(config)) for tokens in batches),
        "rows": rows,
    }
    atomic_write(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

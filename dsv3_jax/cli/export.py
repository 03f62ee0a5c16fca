"""Write a store, or a checkpoint of a training run, as a Hugging Face directory."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from dsv3_jax.checkpoint.export import export, plan_export
from dsv3_jax.checkpoint.load import load
from dsv3_jax.checkpoint.store import StoreReader, is_store
from dsv3_jax.cli import flags, hf_directory
from dsv3_jax.cli.byte_progress import ByteProgress
from dsv3_jax.config import ModelConfig
from dsv3_jax.model import DeepSeekV3, abstract
from dsv3_jax.training import record
from dsv3_jax.training.config import TrainingConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, metavar="STORE|RUN_DIR", help="what dsv3 convert or dsv3 train made")
    add("hf_directory", type=Path, metavar="HF_DIR", help="a new directory")
    add("--step", type=int, metavar="N", help="of a run's checkpoint (default: the last)")
    add(
        "--to",
        choices=["bf16", "fp8", "float32"],
        help="default: a store's own form, bf16 of integers and of a run; float32: of a run only",
    )
    flags.add_workers(parser, "shards of a store")
    add("--json", action="store_true", help="one JSON object on stdout")


def run(arguments: argparse.Namespace) -> None:
    source, destination = arguments.source, arguments.hf_directory
    if destination.exists():
        raise ValueError(f"expected a directory that does not exist yet, got {destination}")
    result = _store(arguments) if is_store(source) else _run(arguments)
    if arguments.json:
        print(json.dumps(result | {"model": str(destination)}))


def _store(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.step is not None:
        raise ValueError(f"--step: {arguments.source} is a store, which has no steps")
    if arguments.to == "float32":
        raise ValueError("--to: expected bf16 or fp8 for a store, got float32")
    planned = plan_export(StoreReader(arguments.source), arguments.to)
    with ByteProgress(planned.bytes, "export") as progress:
        export(
            arguments.source,
            arguments.hf_directory,
            arguments.to,
            workers=arguments.workers,
            progress=progress.add,
        )
    what = "the source's files, byte for byte," if planned.verbatim else "new files"
    print(f"dsv3: wrote {what} to {arguments.hf_directory}", file=sys.stderr)
    return {
        "to": arguments.to,
        "verbatim": planned.verbatim,
        "bytes": planned.bytes,
        "shards": len(planned.shards),
    }


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    source, to = arguments.source, arguments.to or "bf16"
    model, step = restored(source, arguments.step)
    tokenizer = source / record.TOKENIZER
    hf_directory.write(model, arguments.hf_directory, to, tokenizer if tokenizer.is_dir() else None)
    print(f"dsv3: wrote step {step} to {arguments.hf_directory}", file=sys.stderr)
    return {"step": step, "to": to}


def restored(out: Path, step: int | None = None) -> tuple[DeepSeekV3, int]:
    """The model of a run's checkpoint in float32, and the step.

    Raises:
      ValueError: no run there, or no such checkpoint in it.
    """
    from dsv3_jax.training.run import CHECKPOINTS
    from dsv3_jax.training.step import Trainer
    from dsv3_jax.training.store import Store

    recorded = record.read(out)
    # Opening makes the directory, which is not for an export to do.
    store = Store(out / CHECKPOINTS, keep=None) if (out / CHECKPOINTS).is_dir() else None
    steps = store.steps() if store is not None else []
    if store is None or not steps:
        raise ValueError(f"{out}: expected a run with a checkpoint, found none")
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"--step: expected one of {', '.join(map(str, steps))}, got {step}")
    training = TrainingConfig(**flags.with_tuples(recorded["training"]))
    config = ModelConfig.from_hf(recorded["model"])

    def begin():
        return Trainer(DeepSeekV3(config, rngs=nnx.Rngs(0)), training).init()

    # Low-rank updates are of weights that are not in the checkpoint.
    if training.lora_rank:
        model = load(recorded["plan"]["source"], dtype=jnp.float32)[0]
    else:
        model = abstract(config, dtype=jnp.float32)
    state, _ = store.restore(step, jax.eval_shape(begin)._replace(optimizer=()))
    store.close()
    return Trainer(model, training).model(state), step

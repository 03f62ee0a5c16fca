"""Write a store, or a checkpoint of a training run, as a Hugging Face directory."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from dsv3_jax.checkpoint.export import export, plan_export, resume_hint
from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.checkpoint.kinds import describe, is_store
from dsv3_jax.checkpoint.load import load
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.checkpoint.unfinished import check_new
from dsv3_jax.cli import flags, hf_directory
from dsv3_jax.cli.byte_progress import ByteProgress
from dsv3_jax.cli.interrupt_report import report_interrupt
from dsv3_jax.cli.output import print_json
from dsv3_jax.config import ModelConfig
from dsv3_jax.model import DeepSeekV3, abstract, random_model
from dsv3_jax.training import record
from dsv3_jax.training.config import TrainingConfig


def run(arguments: argparse.Namespace) -> None:
    source, destination = arguments.source, arguments.hf_directory
    check_new(destination)
    if is_store(source):
        result = _store(arguments)
    elif (source / record.RECORD).is_file():
        result = _run(arguments)
    else:
        found = describe(DEMO if source == Path("demo") and not source.exists() else source)
        raise ValueError(
            f"{source}: expected a store or a training run, found no {record.RECORD}: {found}"
        )
    if arguments.json:
        print_json(result | {"model": str(destination)})


def _store(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.step is not None:
        raise ValueError(f"--step: {arguments.source} is a store, which has no steps")
    if arguments.to == "float32":
        raise ValueError("--to: expected bf16 or fp8 for a store, got float32")
    planned = plan_export(StoreReader(arguments.source), arguments.to)
    out = arguments.hf_directory
    with (
        report_interrupt("export", lambda: resume_hint(out)),
        ByteProgress(planned.bytes, "export") as progress,
    ):
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
      ValueError: no run there, or no such checkpoint in it; or the frozen weights of low-rank
        updates are not those that the run began with.
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
    training = TrainingConfig(**flags.recorded(recorded["training"], TrainingConfig))
    config = ModelConfig.from_hf(recorded["model"])
    # Low-rank updates are of weights that are not in the checkpoint.
    if training.lora_rank:
        model = _base(out, recorded, config)
    else:
        model = abstract(config, dtype=jnp.float32)
    trainer = Trainer(model, training)
    state, _ = store.restore(step, trainer.shapes()._replace(optimizer=()))
    store.close()
    return trainer.model(state, share=True), step


def _base(out: Path, recorded: dict[str, Any], config: ModelConfig) -> DeepSeekV3:
    """Loads the model whose weights a run of low-rank updates has frozen."""
    from dsv3_jax.training.fingerprint import fingerprint

    if "plan" not in recorded:
        raise ValueError(
            f"{out}: expected a run of dsv3 train, which records where its frozen weights are, got "
            "one begun in Python; use dsv3_jax.training.step.Trainer.model"
        )
    source = recorded["plan"]["source"]
    if source is None:  # it began with random weights
        model = random_model(config, recorded["data"]["seed"])
    else:
        model = load(source, dtype=jnp.float32)[0]
    record.check_weights(out, fingerprint(model))
    return model

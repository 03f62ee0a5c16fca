"""``dsv3 export``: writes a store, or a training run, as a Hugging Face directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from dsv3_jax.checkpoint.export import check_space, export, plan_export, resume_hint
from dsv3_jax.checkpoint.find import DEMOS
from dsv3_jax.checkpoint.kinds import check_new, describe, is_store
from dsv3_jax.checkpoint.load import load
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.cli import flags, hf_directory
from dsv3_jax.cli.output import log, print_json
from dsv3_jax.cli.progress import ByteProgress
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import abstract_model, random_model
from dsv3_jax.interrupts import report_interrupt
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import record
from dsv3_jax.training.config import TrainingConfig


def run(arguments: argparse.Namespace) -> None:
    source, destination = arguments.source, arguments.hf_directory
    with flags.naming("HF_DIR"):
        check_new(destination)
    if is_store(source):
        result = _export_store(arguments)
    elif (source / record.RECORD).is_file():
        result = _export_run(arguments)
    else:
        demo = None if source.exists() else DEMOS.get(str(source))
        description = describe(demo or source)
        raise ValueError(
            f"STORE|RUN_DIR: {source}: expected a store or a training run, found no"
            f" {record.RECORD}: {description}"
        )
    if arguments.json:
        print_json(result | {"model": str(destination)})


def _export_store(arguments: argparse.Namespace) -> dict[str, Any]:
    if arguments.step is not None:
        raise ValueError(f"--step: expected a training run, got {arguments.source}, a store")
    if arguments.to == "float32":
        raise ValueError("--to: expected bf16 or fp8 for a store, got float32")
    plan = plan_export(StoreReader(arguments.source), arguments.to)
    out = arguments.hf_directory
    check_space(plan, out)
    with (
        report_interrupt("export", lambda: resume_hint(out)),
        ByteProgress(plan.bytes, "export") as progress,
    ):
        export(
            arguments.source,
            arguments.hf_directory,
            arguments.to,
            workers=arguments.workers,
            progress=progress.add,
        )
    files = "the source's files, byte for byte," if plan.verbatim else "new files"
    log(f"wrote {files} to {arguments.hf_directory}")
    return {
        "to": arguments.to,
        "verbatim": plan.verbatim,
        "bytes": plan.bytes,
        "shards": len(plan.shards),
    }


def _export_run(arguments: argparse.Namespace) -> dict[str, Any]:
    source, weight_format = arguments.source, arguments.to or "bf16"
    if (recorded := record.read(source).get("model")) is not None:
        config = ModelConfig.from_hf(recorded)
        hf_directory.check_space(config, arguments.hf_directory, weight_format)
    model, step = restore_model(source, arguments.step)
    tokenizer = source / record.TOKENIZER
    copied = tokenizer if tokenizer.is_dir() else None
    hf_directory.write(model, arguments.hf_directory, weight_format, copied)
    log(f"wrote step {step} to {arguments.hf_directory}")
    return {"step": step, "to": weight_format}


def restore_model(run: Path, step: int | None = None) -> tuple[DeepSeekV3, int]:
    """Returns the float32 model of a training run's checkpoint, by default the last, and its step.
    Raises ValueError if there is none, or the weights that the run froze have changed since."""
    from dsv3_jax.training.checkpoints import CheckpointStore
    from dsv3_jax.training.record import CHECKPOINTS
    from dsv3_jax.training.trainer import Trainer

    recorded = record.read(run)
    # Opening a CheckpointStore would create the directory.
    store = CheckpointStore(run / CHECKPOINTS, keep=None) if (run / CHECKPOINTS).is_dir() else None
    steps = store.steps() if store is not None else []
    if store is None or not steps:
        raise ValueError(
            f"RUN_DIR: {run}: expected a training run with a checkpoint, got one without"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise ValueError(f"--step: expected one of {', '.join(map(str, steps))}, got {step}")
    training = TrainingConfig(**flags.recorded_values(recorded["training"], TrainingConfig))
    config = ModelConfig.from_hf(recorded["model"])
    # A checkpoint lacks the frozen weights.
    if training.freezes_weights:
        model = _load_frozen(run, recorded, config)
    else:
        model = abstract_model(config, dtype=jnp.float32)
    trainer = Trainer(model, training)
    state, _ = store.restore(step, trainer.abstract_state._replace(optimizer=()))
    store.close()
    return trainer.model(state, copy=False), step


def _load_frozen(run: Path, recorded: dict[str, Any], config: ModelConfig) -> DeepSeekV3:
    """Loads the model whose weights a run froze. Weights that are not quantised are float32."""
    from dsv3_jax.training.fingerprint import fingerprint

    if "plan" not in recorded:
        raise ValueError(
            f"{run}: expected a run of dsv3 train, which records where its frozen weights are, got "
            "one started in Python; call dsv3_jax.training.trainer.Trainer.model there"
        )
    source = recorded["plan"]["source"]
    if source is None:  # the run started with random weights
        model = random_model(config, recorded["data"]["seed"])
    else:
        plan = {"dtype": "float32", "quantization": None} | recorded["plan"]  # of earlier versions
        model = load(source, dtype=plan["dtype"], quantization=plan["quantization"])[0]
    record.check_weights(run, fingerprint(model))
    for _, weight in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if weight.dtype == jnp.bfloat16:
            weight.set_value(weight.get_value().astype(jnp.float32))
    model.dtype = jnp.dtype(jnp.float32)
    return model

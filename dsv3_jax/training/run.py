"""Training runs: from a model and a corpus to metrics, checkpoints and a trained model."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from dsv3_jax.config import ModelConfig
from dsv3_jax.files import free_bytes
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.quantization import IntegerQuantization
from dsv3_jax.training import record
from dsv3_jax.training.batches import TrainingBatches
from dsv3_jax.training.checkpoints import CheckpointStore, recorded_steps
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.fingerprint import fingerprint
from dsv3_jax.training.memory import fitting
from dsv3_jax.training.metrics_log import Entry
from dsv3_jax.training.session import Session, TrainingResult
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.trackers import Tracker
from dsv3_jax.training.trainable import check_settings
from dsv3_jax.training.trainer import Trainer
from dsv3_jax.words import counted


def train(
    model: DeepSeekV3 | Callable[[], DeepSeekV3],
    corpus: Corpus,
    out: str | os.PathLike[str],
    config: TrainingConfig,
    settings: RunSettings | None = None,
    *,
    resume: bool = False,
    report: Callable[[Entry], None] | None = None,
    tracker: Tracker | None = None,
    should_stop: Callable[[], bool] | None = None,
    metadata: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> TrainingResult:
    """Trains a model and writes the run's files into a directory.

        model, tokenizer = dsv3_jax.load("demo", dtype="float32")
        corpus = read_corpus(["notes"], model.config, tokenizer)
        config = TrainingConfig(steps=300, learning_rate=3e-4, final_learning_rate=3e-5)
        result = train(model, corpus, "runs/notes", config, RunSettings(batch=4, length=512))
        write_checkpoint(result.model, Path("notes-model"))

    A resumed run computes the same steps as an uninterrupted run: bit for bit on a CPU, and up to
    rounding on GPUs, where XLA's scatter-adds have no fixed order, and on other devices. A run that
    is resumed with more steps is extended: from there on its schedules are those of a run of the
    new length. Several processes call this together, with the same corpus. They share ``out``, and
    the first of them writes.

    Args:
      model: initial model in float32, which is not modified. Low-rank updates take a model in any
        dtype, quantised or not. A model with a layout trains on the devices of its mesh. If this is
        a function that returns the model, then nothing else keeps the initial weights in memory.
        Memory then contains three times the size of the weights (the weights and two moments)
        instead of four.
      out: directory for run.json, metrics.jsonl, expert_load.npy and checkpoints. It is created.
      resume: continue from the last complete checkpoint in ``out``, or from the beginning if there
        is none. The model must be the one that the run began with; its fingerprint is compared with
        run.json. It is not compared if all weights are trained and a checkpoint has them.
      report: callback for each new entry of metrics.jsonl. An entry has ``step``, ``losses`` and
        the other fields of :class:`~dsv3_jax.training.step.Metrics`, ``expert_load`` (maximum
        divided by mean, per MoE layer), ``seconds`` since the session began, ``tokens_per_second``
        and ``mfu`` since the previous entry, ``seconds_left`` of the session,
        ``peak_memory_bytes`` of a device (each null if unknown), and after an evaluation the
        ``held_out`` losses. The entry of step 0 has only ``step``, ``seconds`` and ``held_out``.
      tracker: receives the numbers of each entry, and is closed at the end. An error that it raises
        ends the run, unless it is a :class:`~dsv3_jax.training.trackers.GuardedTracker`.
      should_stop: callback after each step. If it returns True, the session saves a checkpoint and
        ends. An exception such as KeyboardInterrupt ends it without saving. Only for a single
        process.
      metadata: further content of run.json, which may change when the run is resumed.
      tokenizer: directory with tokenizer files, which are copied to ``out/tokenizer``.

    Raises:
      ValueError: one line. ``out`` has other content, cannot be written, or is on a disk without
        space for the checkpoints; a step needs more memory than the devices have; a resumed run
        differs in model, data or configuration; the corpus is too short; or the run has diverged or
        has filled the disk, in which case its last checkpoint is kept.
    """
    settings = settings or RunSettings()
    start_time = time.perf_counter()
    out = Path(out)
    # Everything is checked before the directory is created.
    model = model if isinstance(model, DeepSeekV3) else model()
    trainer = check(model, out, config, settings, resume=resume)
    config = trainer.config
    if should_stop is not None and (processes := jax.process_count()) > 1:
        raise ValueError(f"should_stop: expected None with {processes} processes, got a function")
    identity = {"model": _recorded(model.config)} | _identity(config, settings)
    identity["data"] |= corpus.fingerprint()
    batches = TrainingBatches(corpus.train, settings.batch, settings.length, settings.seed)
    evaluation = Evaluation(trainer, corpus, settings)
    if resume:
        record.compare(out, identity, _defaults())
        store = CheckpointStore(out / record.CHECKPOINTS, settings.keep)
        if jax.process_index() == 0:
            store.remove_unfinished()
        # A checkpoint has the trained weights, but not the frozen ones.
        uses_model = config.freezes_weights or not store.steps()
        record.resume(out, identity, fingerprint(model) if uses_model else None, tokenizer)
    else:
        identity["weights"] = {"fingerprint": fingerprint(model)}
        record.begin(out, identity, metadata or {}, tokenizer)
        store = CheckpointStore(out / record.CHECKPOINTS, settings.keep) if settings.keep else None
    del model
    session = Session(
        trainer, evaluation, out, settings, store, report, tracker, should_stop, start_time
    )
    return session.run(batches)


def check(
    model: DeepSeekV3,
    out: str | os.PathLike[str],
    config: TrainingConfig,
    settings: RunSettings,
    *,
    resume: bool = False,
    more_bytes: int = 0,
) -> Trainer:
    """Checks everything about a run that does not depend on its data and its weights.

    Args:
      model: an abstract model is enough. Only :func:`train` checks whether it is the model that a
        resumed run began with.
      more_bytes: bytes that the caller will write to the disk of ``out`` besides the checkpoints.

    Returns:
      The trainer of the model, whose configuration has the policy of recomputation.

    Raises:
      ValueError: as :func:`train`.
    """
    out = Path(out)
    check_settings(model, config, settings)
    if resume and not settings.keep:
        raise ValueError("resume: expected a run that keeps checkpoints, got keep=0")
    if resume:
        if config.remat == "auto":
            recorded = _defaults()["training"] | record.read(out).get("training", {})
            config = dataclasses.replace(config, remat=recorded["remat"])
        record.compare(out, _identity(config, settings), _defaults())
        record.check_writable(out)
    else:
        record.check_new(out)
    _check_space(Trainer(model, config), out, settings, more_bytes)
    if settings.check_memory:
        config = fitting(lambda changed: Trainer(model, changed), config, settings)
    return Trainer(model, dataclasses.replace(config, remat=config.recomputed))


def _recorded(config: ModelConfig) -> dict[str, Any]:
    """Returns the content of config.json, which has no key for integer weights. The fingerprint of
    the weights distinguishes them."""
    if isinstance(config.quantization, IntegerQuantization):
        config = dataclasses.replace(config, quantization=None)
    return config.to_hf()


def _identity(config: TrainingConfig, settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Returns the settings that must not change when a run is resumed."""
    return {
        "training": dataclasses.asdict(config),
        "data": {name: getattr(settings, name) for name in ("batch", "length", "seed")},
    }


def _defaults() -> dict[str, dict[str, Any]]:
    """Returns the settings of runs that were recorded before these existed."""
    fields = dataclasses.fields(TrainingConfig)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {"training": defaults | {"remat": "none"}}


def _check_space(trainer: Trainer, out: Path, settings: RunSettings, more_bytes: int) -> None:
    """Checks that the disk has space for what the run will write. While a checkpoint is saved, all
    those that are kept exist too."""
    present = recorded_steps(out / record.CHECKPOINTS)
    remaining = trainer.config.steps - (present[-1] if present else 0)
    saves = min(remaining, 1)
    if settings.save_every:
        saves = -(-remaining // settings.save_every)
    checkpoints = max(min(settings.keep + 1, len(present) + saves) - len(present), 0)
    checkpoints *= settings.keep > 0
    leaves = jax.tree.leaves(trainer.abstract_state)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    needed, free = checkpoints * size + more_bytes, free_bytes(out)
    if needed > free:
        raise ValueError(
            f"{out}: expected {needed:,} bytes of free disk for"
            f" {counted(checkpoints, 'checkpoint')} of {size:,} bytes and {more_bytes:,} bytes of"
            f" other files, got {free:,}; keep={settings.keep} sets how many checkpoints stay"
        )

"""A training run: batches in; metrics, checkpoints and a trained model out."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dsv3_jax.files import atomic_file
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import record
from dsv3_jax.training.batches import TrainingBatches
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.fingerprint import fingerprint
from dsv3_jax.training.journal import Journal, Row, divergence, metrics_row
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.step import Metrics, Trainer, TrainingState
from dsv3_jax.training.store import Store
from dsv3_jax.training.throughput import utilisation
from sharding.distributed import max_over_processes

METRICS = "metrics.jsonl"
EXPERT_LOAD = "expert_load.npy"
CHECKPOINTS = "checkpoints"

_UNREAD = 100  # steps whose metrics wait on the device at most
_NO_LOAD = np.zeros((0, 1), np.int32)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a run comes to."""

    model: DeepSeekV3
    """float32."""
    step: int
    """Steps behind it, those before a resumption included."""
    finished: bool
    """False where ``max_minutes`` ended the run early."""
    rows: list[Row]
    """Of metrics.jsonl."""


def train(
    model: DeepSeekV3 | Callable[[], DeepSeekV3],
    corpus: Corpus,
    out: str | os.PathLike[str],
    config: TrainingConfig,
    settings: RunSettings | None = None,
    *,
    resume: bool = False,
    report: Callable[[Row], None] | None = None,
    stop: Callable[[], bool] | None = None,
    beside: Mapping[str, Any] | None = None,
    tokenizer: Path | None = None,
) -> Trained:
    """Trains a model and leaves the run's files in a directory.

        model, tokenizer = dsv3_jax.load("demo", dtype="float32")
        corpus = read_corpus(["notes"], model.config, tokenizer)
        config = TrainingConfig(steps=300, learning_rate=3e-4, final_learning_rate=3e-5)
        trained = train(model, corpus, "runs/notes", config, RunSettings(batch=4, length=512))
        write_checkpoint(trained.model, Path("notes-model"))

    A resumed run takes the steps that the uninterrupted one would have taken, bit for bit; on other
    devices, but for rounding. Resumed with more steps it is extended: from there on the schedules
    are those of a run of the new length. Several processes call this alike, with the same corpus;
    the first of them writes, and all see the same directory.

    Args:
      model: where to begin, in float32. It stays as it is. One that is laid out trains on its
        devices. Or a function that makes it: then nobody else keeps its weights, and memory holds
        three times the weights (themselves and two moments) instead of four.
      out: becomes a directory with run.json, metrics.jsonl, expert_load.npy and checkpoints.
      resume: go on from the last whole checkpoint in ``out``, or from the beginning where a run
        was stopped before its first. The model must be the one that the run began with, which its
        fingerprint in run.json tells; only where all weights are trained and there is a checkpoint
        to take them from is the model not looked at.
      report: is given each row of metrics.jsonl as it is written. A row has ``step``, ``losses``
        and the other numbers of :class:`Metrics`, ``expert_load`` (largest over mean, each MoE
        layer), ``seconds`` since the run began or was resumed, ``tokens_per_second`` and ``mfu``
        since the row before (null where they are not known), and ``held_out`` losses after an
        evaluation. The row of step 0 has these and ``seconds`` alone.
      stop: is asked after each step; True saves a checkpoint and ends the session, which an
        exception, such as KeyboardInterrupt, does without saving. Only where this is the only
        process.
      beside: kept in run.json beside what must not change.
      tokenizer: a directory, whose tokenizer files are copied to ``out/tokenizer``.

    Raises:
      ValueError: one line: ``out`` holds something else or cannot be written to, a resumed run
        differs in model, data or configuration, the data are too short, or the run has diverged;
        its last checkpoint stays.
    """
    settings = settings or RunSettings()
    began = time.perf_counter()
    out = Path(out)
    # All that can be wrong is found out before the directory is made.
    model = model if isinstance(model, DeepSeekV3) else model()
    trainer = check(model, out, config, settings, resume=resume)
    if stop is not None and (processes := jax.process_count()) > 1:
        raise ValueError(f"stop: expected None with {processes} processes, got a function")
    identity = {"model": model.config.to_hf()} | _identity(config, settings)
    identity["data"] |= corpus.fingerprint()
    batches = TrainingBatches(corpus.train, settings.batch, settings.length, settings.seed)
    evaluation = Evaluation(trainer, corpus, settings)
    if resume:
        record.compare(out, identity)
        store = Store(out / CHECKPOINTS, settings.keep)
        # Trained weights come from a checkpoint, frozen ones from the model.
        needed = config.lora_rank or not store.steps()
        record.resume(out, identity, fingerprint(model) if needed else None, tokenizer)
    else:
        identity["weights"] = {"fingerprint": fingerprint(model)}
        record.begin(out, identity, beside or {}, tokenizer)
        store = Store(out / CHECKPOINTS, settings.keep) if settings.keep else None
    del model
    return _Run(trainer, evaluation, out, settings, store, report, stop, began).go(batches)


def check(
    model: DeepSeekV3,
    out: str | os.PathLike[str],
    config: TrainingConfig,
    settings: RunSettings,
    *,
    resume: bool = False,
) -> Trainer:
    """Checks all of a run that can be checked without its data and its weights.

    Args:
      model: one with shapes for weights is enough. Whether it is the one that a resumed run began
        with, :func:`train` alone checks.

    Returns:
      The model's trainer.

    Raises:
      ValueError: as :func:`train`.
    """
    out = Path(out)
    _check_settings(model, config, settings)
    if resume and not settings.keep:
        raise ValueError("resume: expected a run that keeps checkpoints, got keep=0")
    trainer = Trainer(model, config)
    trainer.shapes()
    if resume:
        record.compare(out, _identity(config, settings))
        record.check_writable(out)
    else:
        record.check_new(out)
    return trainer


def _identity(config: TrainingConfig, settings: RunSettings) -> dict[str, dict[str, Any]]:
    """Returns the settings that a resumed run must have in common with the run."""
    return {
        "training": dataclasses.asdict(config),
        "data": {name: getattr(settings, name) for name in ("batch", "length", "seed")},
    }


def _check_settings(model: DeepSeekV3, config: TrainingConfig, settings: RunSettings) -> None:
    batch, length = settings.batch, settings.length
    devices = 1 if model.layout is None else model.layout.num_shards("batch")
    if model.layout is None and jax.process_count() > 1:
        raise ValueError(
            f"layout: expected one over the devices of {jax.process_count()} processes, got none"
        )
    if batch % (devices * config.accumulate):
        over = f"{devices} devices x " if devices > 1 else ""
        raise ValueError(
            f"batch: expected a multiple of {over}accumulate={config.accumulate}, got {batch}"
        )
    shape = model.config
    shortest, longest = shape.num_nextn_predict_layers + 2, shape.max_position_embeddings
    if not shortest <= length <= longest:
        raise ValueError(f"length: expected {shortest} to {longest} for this model, got {length}")


class _Run:
    """One session: from the beginning or a checkpoint to the end or a limit."""

    def __init__(
        self,
        trainer: Trainer,
        evaluation: Evaluation,
        out: Path,
        settings: RunSettings,
        store: Store | None,
        report: Callable[[Row], None] | None,
        stop: Callable[[], bool] | None,
        began: float,
    ):
        self.trainer, self.evaluation, self.out = trainer, evaluation, out
        self.settings, self.store, self.began = settings, store, began
        self.report = report or (lambda row: None)
        self.stop = stop or (lambda: False)
        self.device = jax.devices()[0].device_kind

    def go(self, batches: TrainingBatches) -> Trained:
        state, begun = self._begin(batches)
        self.journal = Journal(self.out / METRICS, begun if begun else -1)
        try:
            state, step = self._steps(state, begun, batches)
        finally:
            self.journal.close()
            if self.store is not None:
                self.store.close()
        finished = step >= self.trainer.config.steps
        trained = self.trainer.model(state, share=True)  # no step follows
        return Trained(trained, step, finished, self.journal.rows)

    def _steps(
        self, state: TrainingState, begun: int, batches: TrainingBatches
    ) -> tuple[TrainingState, int]:
        settings, steps = self.settings, self.trainer.config.steps
        if not begun:
            held_out = self.evaluation.losses(state)
            self._write({"step": 0, "seconds": self._seconds(), "held_out": held_out})
        # When the steps since the last row began, and behind which step; none before compilation.
        self.mark: tuple[float, int] | None = None
        pending: tuple[int, Metrics] | None = None
        step, last = begun, begun >= steps
        self.unread: list[tuple[int, Metrics]] = []
        while not last:
            state, metrics = self.trainer.step(state, self.trainer.batch(next(batches)))
            step += 1
            # Of all that no row has, what tells whether the run has diverged, and since when.
            self.unread.append((step, metrics._replace(expert_load=_NO_LOAD)))
            if len(self.unread) == _UNREAD:
                self._check_finite(step - 1)
            # Rows are read a step late, so that the device has its next step when the host waits.
            if pending:
                self._write(self._row(*pending))
                pending = None
            stopped = self.stop()  # in haste: saved, and not evaluated
            last = step == steps or stopped or self._late()
            evaluates = step == steps or (last and not stopped) or _due(step, settings.eval_every)
            saves = self.store is not None and (last or _due(step, settings.save_every))
            if not (evaluates or saves or last):
                if step == begun + 1 or _due(step, settings.log_every):
                    pending = (step, metrics)
                continue
            row = self._row(step, metrics)
            if evaluates:
                row["held_out"] = self.evaluation.losses(state)
            self._write(row)
            if last and jax.process_index() == 0:
                with atomic_file(self.out / EXPERT_LOAD) as file:
                    np.save(file, np.asarray(jax.device_get(metrics.expert_load)))
            # Behind all that it stands for: a run resumed from here does not write it again.
            if self.store is not None and saves:
                self.store.save(state, batches.state)
            self.mark = time.perf_counter(), step
        return state, step

    def _begin(self, batches: TrainingBatches) -> tuple[TrainingState, int]:
        if self.store is None or not (steps := self.store.steps()):
            return self.trainer.init(), 0
        self.trainer.release()  # before there are restored weights beside the initial ones
        state, position = self.store.restore(steps[-1], self.trainer.shapes())
        batches.restore(position)
        return state, steps[-1]

    def _row(self, step: int, metrics: Metrics) -> Row:
        self._check_finite(step)  # waits for the step
        row = metrics_row(step, jax.device_get(metrics))
        now = time.perf_counter()
        rate = mfu = None
        if self.mark is not None:
            then, before = self.mark
            settings, trainer = self.settings, self.trainer
            rate = (step - before) * settings.batch * settings.length / (now - then)
            dtype = trainer.config.compute_dtype
            devices = 1 if trainer.layout is None else trainer.layout.mesh.size
            of_one = rate / devices
            mfu = utilisation(trainer.model_config, settings.length, of_one, self.device, dtype)
        self.mark = now, step
        return row | {"seconds": self._seconds(), "tokens_per_second": rate, "mfu": mfu}

    def _check_finite(self, last: int) -> None:
        """Reads the metrics of steps up to ``last``. No checkpoint is saved before that."""
        for step, metrics in self.unread:
            if step <= last:
                self._refuse_divergence(metrics_row(step, jax.device_get(metrics)))
        self.unread = [(step, metrics) for step, metrics in self.unread if step > last]

    def _write(self, row: Row) -> None:
        self._refuse_divergence(row)
        self.journal.write(row)
        self.report(row)

    def _refuse_divergence(self, row: Row) -> None:
        if wrong := divergence(row):
            saved = self.store.steps() if self.store is not None else []
            kept = f"the checkpoint of step {saved[-1]} is kept" if saved else "nothing was saved"
            raise ValueError(f"{wrong}; {kept}")

    def _seconds(self) -> float:
        return round(time.perf_counter() - self.began, 3)

    def _late(self) -> bool:
        limit = self.settings.max_minutes
        return limit is not None and max_over_processes(self._seconds() - 60 * limit) > 0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

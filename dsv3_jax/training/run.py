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

from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import record
from dsv3_jax.training.batches import TrainingBatches
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.journal import Journal, Row, metrics_row
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.step import Metrics, Trainer, TrainingState
from dsv3_jax.training.store import Store
from dsv3_jax.training.throughput import utilisation
from sharding.distributed import slowest

METRICS = "metrics.jsonl"
EXPERT_LOAD = "expert_load.npy"
CHECKPOINTS = "checkpoints"


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
    model: DeepSeekV3,
    corpus: Corpus,
    out: str | os.PathLike[str],
    config: TrainingConfig,
    settings: RunSettings | None = None,
    *,
    resume: bool = False,
    report: Callable[[Row], None] | None = None,
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
    devices, but for rounding. Several processes call this alike, with the same corpus; the first of
    them writes, and all see the same directory.

    Args:
      model: where to begin, in float32. It stays as it is. One that is laid out trains on its
        devices.
      out: becomes a directory with run.json, metrics.jsonl, expert_load.npy and checkpoints.
      resume: go on from the last whole checkpoint in ``out``, or from the beginning where a run
        was stopped before its first.
      report: is given each row of metrics.jsonl as it is written. A row has ``step``, ``losses``
        and the other numbers of :class:`Metrics`, ``expert_load`` (largest over mean, each MoE
        layer), ``seconds`` since the run began or was resumed, ``tokens_per_second`` and ``mfu``
        since the row before (null where they are not known), and ``held_out`` losses after an
        evaluation. The row of step 0 has these and ``seconds`` alone.
      beside: kept in run.json beside what must not change.
      tokenizer: a directory, whose tokenizer files are copied to ``out/tokenizer``.

    Raises:
      ValueError: one line: ``out`` holds something else, a resumed run differs in model, data or
        configuration, the data are too short, or the run has diverged.
    """
    settings = settings or RunSettings()
    began = time.perf_counter()
    out = Path(out)
    identity = {
        "model": model.config.to_hf(),
        "training": dataclasses.asdict(config),
        "data": {name: getattr(settings, name) for name in ("batch", "length", "seed")}
        | corpus.fingerprint(),
    }
    # All that can be wrong is found out before the directory is made.
    _check(model, config, settings)
    if resume and not settings.keep:
        raise ValueError("resume: expected a run that keeps checkpoints, got keep=0")
    batches = TrainingBatches(corpus.train, settings.batch, settings.length, settings.seed)
    trainer = Trainer(model, config)
    jax.eval_shape(trainer.init)
    if resume:
        record.check(out, identity)
    else:
        record.begin(out, identity, beside or {}, tokenizer)
    return _Run(trainer, corpus, out, settings, report, began).go(batches)


def _check(model: DeepSeekV3, config: TrainingConfig, settings: RunSettings) -> None:
    batch, length = settings.batch, settings.length
    devices = 1 if model.layout is None else model.layout.parts("batch")
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
        corpus: Corpus,
        out: Path,
        settings: RunSettings,
        report: Callable[[Row], None] | None,
        began: float,
    ):
        self.trainer, self.out, self.settings, self.began = trainer, out, settings, began
        self.report = report or (lambda row: None)
        self.evaluation = Evaluation(trainer, corpus, settings)
        self.device = jax.devices()[0].device_kind
        self.store = Store(out / CHECKPOINTS, settings.keep) if settings.keep else None

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
        return Trained(self.trainer.model(state), step, finished, self.journal.rows)

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
        while not last:
            state, metrics = self.trainer.step(state, self.trainer.batch(next(batches)))
            step += 1
            # Rows are read a step late, so that the device has its next step when the host waits.
            if pending:
                self._write(self._row(*pending))
                pending = None
            last = step == steps or self._late()
            evaluates = last or _due(step, settings.eval_every)
            saves = self.store is not None and (last or _due(step, settings.save_every))
            if not (evaluates or saves):
                if step == begun + 1 or _due(step, settings.log_every):
                    pending = (step, metrics)
                continue
            row = self._row(step, metrics)
            if evaluates:
                row["held_out"] = self.evaluation.losses(state)
            self._write(row)
            if last and jax.process_index() == 0:
                np.save(self.out / EXPERT_LOAD, np.asarray(jax.device_get(metrics.expert_load)))
            # Behind all that it stands for: a run resumed from here does not write it again.
            if self.store is not None and saves:
                self.store.save(state, batches.state)
            self.mark = time.perf_counter(), step
        return state, step

    def _begin(self, batches: TrainingBatches) -> tuple[TrainingState, int]:
        if self.store is None or not (steps := self.store.steps()):
            return self.trainer.init(), 0
        state, position = self.store.restore(steps[-1], self.trainer.shapes())
        batches.restore(position)
        return state, steps[-1]

    def _row(self, step: int, metrics: Metrics) -> Row:
        row = metrics_row(step, jax.device_get(metrics))  # waits for the step
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

    def _write(self, row: Row) -> None:
        self.journal.write(row)
        self.report(row)

    def _seconds(self) -> float:
        return round(time.perf_counter() - self.began, 3)

    def _late(self) -> bool:
        limit = self.settings.max_minutes
        return limit is not None and slowest(self._seconds() - 60 * limit) > 0


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0

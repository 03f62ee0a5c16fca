"""One session of a training run: from its beginning or a checkpoint, to its end or a limit."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from dsv3_jax.files import atomic_file
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training.batches import TrainingBatches
from dsv3_jax.training.checkpoints import CheckpointStore
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.metrics_log import Entry, MetricsLog, divergence, metrics_entry, utilisation
from dsv3_jax.training.record import EXPERT_LOAD, METRICS
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trackers import Tracker, scalars
from dsv3_jax.training.trainer import Trainer
from sharding.distributed import max_over_processes

_MAX_UNCHECKED = 100  # steps whose metrics may stay on the device
_NO_LOAD = np.zeros((0, 1), np.int32)


@dataclasses.dataclass(frozen=True)
class TrainingResult:
    """Result of a session."""

    model: DeepSeekV3
    """The trained model, float32, or as :meth:`Trainer.model` returns it if weights are frozen."""
    step: int
    """Number of completed steps, including those of earlier sessions."""
    finished: bool
    """Whether the run is complete. False if a time limit or ``should_stop`` ended the session."""
    metrics: list[Entry]
    """Entries of metrics.jsonl."""


class Session:
    """Runs training steps, and logs, evaluates and saves at the intervals of the settings.

    Args:
      out: directory of the run.
      store: checkpoints of the run, or None if it has none.
      report: callback for each new entry of metrics.jsonl.
      tracker: receives the scalars of each new entry on the first process, or None.
      should_stop: callback after each step. True ends the session after saving a checkpoint.
      start_time: value of ``time.perf_counter()`` from which ``seconds`` count.
    """

    def __init__(
        self,
        trainer: Trainer,
        evaluation: Evaluation,
        out: Path,
        settings: RunSettings,
        store: CheckpointStore | None,
        report: Callable[[Entry], None] | None,
        tracker: Tracker | None,
        should_stop: Callable[[], bool] | None,
        start_time: float,
    ):
        self.trainer, self.evaluation, self.out = trainer, evaluation, out
        self.settings, self.store, self.start_time = settings, store, start_time
        self.report = report or (lambda entry: None)
        self.tracker = tracker if jax.process_index() == 0 else None
        self.should_stop = should_stop or (lambda: False)
        self.device_kind = jax.devices()[0].device_kind
        # Time and step of the last entry, for the throughput since then. None until the first step
        # has been compiled.
        self._last_timing: tuple[float, int] | None = None
        # The first such time and step, for the time that remains.
        self._first_timing: tuple[float, int] | None = None
        # Steps whose losses and norms nobody has checked yet, with their metrics on the device.
        self._unchecked: list[tuple[int, Metrics]] = []

    def run(self, batches: TrainingBatches) -> TrainingResult:
        """Trains from the last checkpoint, or from the beginning if there is none.

        Raises:
          ValueError: one line. The run has diverged, or a file cannot be written, for example
            because the disk is full. The checkpoints before that are kept.
        """
        state, start_step = self._initial_state(batches)
        self._log = MetricsLog(self.out / METRICS, start_step if start_step else -1)
        try:
            state, step = self._train(state, start_step, batches)
        except OSError as error:
            file = f"{error.filename}: " if error.filename else ""
            raise ValueError(f"{file}{error.strerror or error}; {self._saved()}") from None
        finally:
            self._log.close()
            if self.tracker is not None:
                self.tracker.close()
            if self.store is not None:
                self.store.close()
        finished = step >= self.trainer.config.steps
        model = self.trainer.model(state, copy=False)  # no step follows
        return TrainingResult(model, step, finished, self._log.entries)

    def _initial_state(self, batches: TrainingBatches) -> tuple[TrainingState, int]:
        """Returns the state of the last checkpoint or a new one, and its step."""
        if self.store is None or not (steps := self.store.steps()):
            return self.trainer.init(), 0
        # The initial weights must not be in memory together with the restored ones.
        self.trainer.release_model()
        state, position = self.store.restore(steps[-1], self.trainer.abstract_state)
        batches.restore(position)
        return state, steps[-1]

    def _train(
        self, state: TrainingState, start_step: int, batches: TrainingBatches
    ) -> tuple[TrainingState, int]:
        settings, steps = self.settings, self.trainer.config.steps
        if not start_step:
            held_out = self.evaluation.losses(state)
            self._append({"step": 0, "seconds": self._seconds(), "held_out": held_out})
        pending: tuple[int, Metrics] | None = None
        step, is_last = start_step, start_step >= steps
        while not is_last:
            state, metrics = self.trainer.step(state, self.trainer.shard_batch(next(batches)))
            step += 1
            self._unchecked.append((step, metrics._replace(expert_load=_NO_LOAD)))
            if len(self._unchecked) == _MAX_UNCHECKED:
                self._check_finite(step - 1)
            # Metrics are read one step late, so that the device has work while the host waits.
            if pending:
                self._append(self._entry(*pending))
                pending = None
            is_stopped = self.should_stop()  # then the session saves, but does not evaluate
            is_last = step == steps or is_stopped or self._is_out_of_time()
            evaluates = (
                step == steps or (is_last and not is_stopped) or _is_due(step, settings.eval_every)
            )
            saves = self.store is not None and (is_last or _is_due(step, settings.save_every))
            if not (evaluates or saves or is_last):
                if step == start_step + 1 or _is_due(step, settings.log_every):
                    pending = (step, metrics)
                continue
            entry = self._entry(step, metrics)
            if evaluates:
                entry["held_out"] = self.evaluation.losses(state)
            self._append(entry)
            if is_last and jax.process_index() == 0:
                with atomic_file(self.out / EXPERT_LOAD) as file:
                    np.save(file, np.asarray(jax.device_get(metrics.expert_load)))
            # The checkpoint comes after everything up to its step, because a run that resumes from
            # it does not write that again.
            if self.store is not None and saves:
                self.store.save(state, batches.state)
            self._last_timing = time.perf_counter(), step
        return state, step

    def _entry(self, step: int, metrics: Metrics) -> Entry:
        """Returns the log entry of a step. Waits until the step is complete."""
        self._check_finite(step)
        entry = metrics_entry(step, jax.device_get(metrics))
        now = time.perf_counter()
        tokens_per_second = mfu = None
        if self._last_timing is not None:
            last_time, last_step = self._last_timing
            settings, trainer = self.settings, self.trainer
            tokens = (step - last_step) * settings.batch * settings.length
            tokens_per_second = tokens / (now - last_time)
            devices = 1 if trainer.layout is None else trainer.layout.mesh.size
            if not trainer.config.draft_depth:  # which takes other operations
                mfu = utilisation(
                    trainer.model_config,
                    settings.length,
                    tokens_per_second / devices,
                    self.device_kind,
                    trainer.config.compute_dtype,
                    trainer.updates,
                )
        timing = {"seconds": self._seconds(), "tokens_per_second": tokens_per_second, "mfu": mfu}
        timing["seconds_left"] = self._seconds_left(now, step)
        timing["peak_memory_bytes"] = peak_memory()
        self._last_timing = now, step
        return entry | timing

    def _seconds_left(self, now: float, step: int) -> float | None:
        """Returns the remaining time of the session, estimated from its steps after the first,
        which includes compilation."""
        if self._first_timing is None:
            self._first_timing = now, step
            return None
        first_time, first_step = self._first_timing
        left = (now - first_time) / (step - first_step) * (self.trainer.config.steps - step)
        if self.settings.max_minutes is not None:
            left = min(left, max(60 * self.settings.max_minutes - self._seconds(), 0.0))
        return round(left, 1)

    def _check_finite(self, last_step: int) -> None:
        """Checks the losses and norms of all steps up to ``last_step``. This precedes every
        checkpoint."""
        for step, metrics in self._unchecked:
            if step <= last_step:
                self._refuse_divergence(metrics_entry(step, jax.device_get(metrics)))
        self._unchecked = [(step, metrics) for step, metrics in self._unchecked if step > last_step]

    def _append(self, entry: Entry) -> None:
        self._refuse_divergence(entry)
        self._log.append(entry)
        if self.tracker is not None:
            self.tracker.log(entry["step"], scalars(entry))
        self.report(entry)

    def _refuse_divergence(self, entry: Entry) -> None:
        if message := divergence(entry):
            raise ValueError(f"{message}; {self._saved()}")

    def _saved(self) -> str:
        """Returns which checkpoint a failed session leaves."""
        steps = self.store.steps() if self.store is not None else []
        return f"the checkpoint of step {steps[-1]} is kept" if steps else "nothing was saved"

    def _seconds(self) -> float:
        return round(time.perf_counter() - self.start_time, 3)

    def _is_out_of_time(self) -> bool:
        limit = self.settings.max_minutes
        return limit is not None and max_over_processes(self._seconds() - 60 * limit) > 0


def peak_memory() -> int | None:
    """Returns the most bytes that this process has used on one of its devices so far, or None if
    the devices do not count them, as CPUs."""
    used = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in jax.local_devices()]
    return max((each for each in used if each is not None), default=None)


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0

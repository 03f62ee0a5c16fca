"""Sends a run's metrics to Weights & Biases or TensorBoard, or to any object that logs scalars."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dsv3_jax.words import how_to_install

_LOG = logging.getLogger("dsv3_jax")
_LIBRARIES = "wandb", "tensorboard"


@runtime_checkable
class Tracker(Protocol):
    """Receives the metrics of a run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives the scalars of one entry of metrics.jsonl, by names such as ``losses/main``."""
        ...

    def close(self) -> None:
        """Ends the run."""
        ...


class GuardedTracker:
    """A tracker whose first error is logged as a warning and ends the tracking, not the run.

    Args:
      make: makes the tracker, at the first entry. The run's directory exists then.
    """

    def __init__(self, make: Callable[[], Tracker]):
        self._make = make
        self._tracker: Tracker | None = None
        self._has_failed = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        def log() -> None:
            if self._tracker is None:
                self._tracker = self._make()
            self._tracker.log(step, metrics)

        self._guard(log)

    def close(self) -> None:
        if self._tracker is not None:
            self._guard(self._tracker.close)

    def _guard(self, function: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            function()
        except Exception as error:
            self._has_failed = True
            reason = (str(error).splitlines() or [""])[0]
            _LOG.warning(
                "the tracker failed and gets no further metrics: %s: %.200s",
                type(error).__name__,
                reason,
            )


def parse(name: str) -> tuple[str, str | None]:
    """Returns the library and what follows the colon in ``wandb[:PROJECT]`` or
    ``tensorboard[:DIR]``.

    Raises:
      ValueError: the library is another one, or it is not installed.
    """
    library, _, rest = name.partition(":")
    if library not in _LIBRARIES:
        raise ValueError(f"expected wandb[:PROJECT] or tensorboard[:DIR], got {name!r}")
    if importlib.util.find_spec(library) is None:
        raise ValueError(f"expected {library} to be installed; {how_to_install(library)}")
    return library, rest or None


def make_tracker(name: str, out: Path, settings: Mapping[str, Any]) -> GuardedTracker:
    """Returns the tracker that ``--track`` names.

    Args:
      out: directory of the run. TensorBoard's files are in ``out/tensorboard`` by default, and a
        resumed run continues the same run of Weights & Biases.
      settings: what Weights & Biases shows as the run's configuration.

    Raises:
      ValueError: as :func:`parse`.
    """
    library, rest = parse(name)
    if library == "wandb":
        return GuardedTracker(lambda: _WandB(rest, out, settings))
    return GuardedTracker(lambda: _TensorBoard(Path(rest) if rest else out / "tensorboard"))


def scalars(entry: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of an entry of metrics.jsonl by name. Groups become prefixes, and of the
    expert loads the largest is kept."""
    numbers: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            numbers |= {f"{name}/{key}": number for key, number in scalars(value).items()}
        elif isinstance(value, list):
            numbers |= {f"{name}/max": max(value)} if value else {}
        elif isinstance(value, (int, float)) and name != "step":
            numbers[name] = value
    return numbers


class _WandB:
    """A run of Weights & Biases, which reads its own environment variables."""

    def __init__(self, project: str | None, out: Path, settings: Mapping[str, Any]):
        directory = out.absolute()
        self._run = importlib.import_module("wandb").init(
            project=project or "dsv3_jax",
            name=directory.name,
            id=hashlib.sha256(str(directory).encode()).hexdigest()[:16],
            resume="allow",
            config=dict(settings),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class _TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, directory: Path):
        self._writer = importlib.import_module("tensorboard.summary").Writer(str(directory))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

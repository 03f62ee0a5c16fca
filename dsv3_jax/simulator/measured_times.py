"""The time of a step from a measured run of the engine.

A result of ``scripts/bench_engine.py`` has, for every compiled program, how often it ran in a
replay and for how long. Within a program the time still depends on how many requests it really has
and on their lengths, which the file does not have. The planner's model supplies this dependence:

    seconds = model's seconds of the step x (measured mean / model's mean of the same program)

The mean of the model is that over the same replay in the simulator. The measured ratios, one for
each program, are parameters from that replay, so that no other figure of it can validate the
simulator. Other replays can.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.simulator.step_times import StepTime, StepTimes
from dsv3_jax.simulator.step_work import StepWork

_ROUNDS = 3  # the ratios change which steps a replay has, a little


@dataclasses.dataclass(frozen=True)
class Program:
    """The measured dispatches of a compiled program in one replay."""

    count: int
    seconds: float
    is_multi_step: bool
    """Whether a dispatch can have several decode steps."""

    def ratio(self, count: int, seconds: float) -> float:
        """Returns the measured time divided by the model's.

        A dispatch of several steps lasts about as long whatever a step takes, because their number
        is chosen so. There the total decides: the number of steps follows from the trace.

        Args:
          count: simulated dispatches.
          seconds: their time by the model, all together.
        """
        if self.is_multi_step:
            return self.seconds / seconds
        return (self.seconds / self.count) / (seconds / count)


def programs_of(replay: Mapping[str, Any]) -> dict[str, Program]:
    """Returns the programs of a replay in a result file, by the name of their shape.

    Raises:
      ValueError: the replay has no times of programs.
    """
    try:
        shapes = replay["engine"]["dispatches"]["shapes"]
        return {
            name: Program(each["count"], each["seconds"], "max_steps=1 " not in f"{name} ")
            for name, each in shapes.items()
        }
    except (KeyError, TypeError) as error:
        raise ValueError(
            "step times: expected a result of scripts/bench_engine.py with the seconds of each"
            f" shape, got a replay without {error}"
        ) from None


class MeasuredTimes:
    """Step times of the model, scaled for each compiled program.

    Args:
      model: the model's times.
      buckets: sizes of the programs.
      ratios: factor of each program by the name of its shape.
    """

    def __init__(self, model: StepTimes, buckets: Buckets, ratios: Mapping[str, float]):
        self._model, self._buckets, self.ratios = model, buckets, dict(ratios)
        known = self.ratios.values()
        self._other = sum(known) / len(known) if known else 1.0
        self._names: dict[tuple[int, int], str] = {}
        self.counts: Counter[str] = Counter()
        """Number of dispatches of each program so far."""
        self.model_seconds: dict[str, float] = defaultdict(float)
        """Sum of their times by the model."""

    def of(self, work: StepWork, steps: int) -> StepTime:
        """Returns the time of a dispatch. A program without a ratio takes the mean of all
        ratios."""
        name = self._name(work.decodes, work.chunks)
        step = self._model.of(work, steps)
        self.counts[name] += 1
        self.model_seconds[name] += step.seconds
        return step._replace(
            seconds=step.seconds * self.ratios.get(name, self._other), program=name
        )

    def _name(self, decodes: int, chunks: int) -> str:
        key = decodes, chunks
        if key not in self._names:
            shape = self._buckets.shape(decodes, chunks, max_len=1, max_pages=1)
            self._names[key] = shape.name
        return self._names[key]


def calibrate(
    model: StepTimes,
    buckets: Buckets,
    programs: Mapping[str, Program],
    replay: Callable[[StepTimes], object],
) -> MeasuredTimes:
    """Returns step times whose mean for each program, in this replay, is the measured one.

    Args:
      programs: the measured programs of the replay.
      replay: simulates the same replay with given step times.
    """
    ratios: dict[str, float] = {}
    for _ in range(_ROUNDS):
        times = MeasuredTimes(model, buckets, ratios)
        replay(times)
        ratios = {
            name: programs[name].ratio(count, times.model_seconds[name])
            for name, count in times.counts.items()
            if name in programs
        }
    return MeasuredTimes(model, buckets, ratios)

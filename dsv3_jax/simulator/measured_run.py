"""An engine as a result of ``scripts/bench_engine.py`` describes it, and its replays again.

For every compiled program the result has how often it ran in a replay and for how long. Within a
program the time still depends on how many requests it really has and on their lengths, which the
file does not have. The planner's model supplies this dependence:

    seconds = model's seconds of the step x (measured mean / model's mean of the same program)

The mean of the model is that over the same replay in the simulator. The measured ratios, one for
each program, are parameters from that replay, so that no other figure of it can validate the
simulator. Other replays can.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv3_jax import presets
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.scheduling.step_plan import SchedulerConfig
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.cluster import Cluster, ClusterSettings, Outcome, PoolSettings
from dsv3_jax.simulator.replica import HostCosts, ReplicaSettings
from dsv3_jax.simulator.step_times import StepModel, StepTime, StepTimes, StepWork
from dsv3_jax.simulator.workload import SubmitCosts, replayed
from dsv3_jax.traces import TRACES

_PAGE_SIZE = 64
_ROUNDS = 3  # the ratios change which steps a replay has, a little


@dataclasses.dataclass(frozen=True)
class Program:
    """The measured dispatches of a compiled program in one replay."""

    count: int
    seconds: float
    is_multi_step: bool  # whether a dispatch can have several decode steps

    def ratio(self, count: int, seconds: float) -> float:
        """Returns the measured time divided by the model's, which is ``seconds`` for ``count``
        simulated dispatches.

        A dispatch of several steps lasts about as long whatever a step takes, because their number
        is chosen so. There the total decides: the number of steps follows from the trace.
        """
        if self.is_multi_step:
            return self.seconds / seconds
        return (self.seconds / self.count) / (seconds / count)


def programs_of(replay: Mapping[str, Any]) -> dict[str, Program]:
    """Returns the programs of a replay in a result file, by the name of their shape. Raises
    ValueError if the replay has no times of programs."""
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
    """Step times of the model, scaled for each compiled program, whose factors ``ratios`` has by
    the name of its shape. ``buckets`` has the sizes of the programs."""

    def __init__(self, model: StepTimes, buckets: Buckets, ratios: Mapping[str, float]):
        self._model, self._buckets, self.ratios = model, buckets, dict(ratios)
        known = self.ratios.values()
        self._other = sum(known) / len(known) if known else 1.0
        self._names: dict[tuple[int, int], str] = {}
        self.counts: Counter[str] = Counter()  # number of dispatches of each program so far
        self.model_seconds: dict[str, float] = defaultdict(float)  # sum of their times by the model

    def of(self, work: StepWork, steps: int) -> StepTime:
        """Returns the time of a dispatch. A program without a ratio takes the mean of all
        ratios."""
        key = work.decodes, work.chunks
        if (name := self._names.get(key)) is None:
            name = self._names[key] = self._buckets.shape(*key, max_len=1, max_pages=1).name
        step = self._model.of(work, steps)
        self.counts[name] += 1
        self.model_seconds[name] += step.seconds
        return step._replace(
            seconds=step.seconds * self.ratios.get(name, self._other), program=name
        )


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """An engine on one GPU, with replays of traces."""

    model_name: str
    target: str  # full name of the target, such as ``gpu:h200x1``
    engine: ReplicaSettings  # without host costs
    buckets: Buckets
    model: StepModel  # step times at peak rates
    replays: Sequence[Mapping[str, Any]]
    submit: SubmitCosts = dataclasses.field(default_factory=SubmitCosts)
    """Time that the client, a thread of the engine's process, took for each submission."""

    @classmethod
    def read(
        cls, path: Path, *, plans_late: bool | None = None, submit: SubmitCosts | None = None
    ) -> MeasuredRun:
        """Reads a result file. Raises ValueError if it is none, or its GPU or model is unknown.

        Args:
          plans_late: whether the engine planned steps late. None takes the entry of the file;
            files without one are of earlier engines, which did not.
          submit: time that the client took for each submission; None for no time.
        """
        try:
            result = json.loads(path.read_text("utf-8"))
            sizes: dict[str, Any] = dict(result["buckets"])
            for name in ("decodes", "chunks"):
                sizes[name] = tuple(sizes[name])
            buckets = Buckets(**sizes)
            replays, name = result["replays"], result["model"]
            kind = result["machine"].removeprefix("NVIDIA ").split()[0].lower()
            cache_tokens = replays[0]["engine"]["cache_tokens"]
        except (OSError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{path}: expected a result of scripts/bench_engine.py, got {error!r}"
            ) from None
        slots = buckets.decodes[-1]
        deployment = Deployment(
            presets.get(name),
            Target.parse(kind),
            "single",
            slots,
            _PAGE_SIZE,
            quantization=result["weights"],
        )
        engine = ReplicaSettings(
            SchedulerConfig(
                slots,
                buckets.chunk_tokens,
                buckets.chunks[-1],
                multi_step_decodes=buckets.most_multi_step_decodes,
            ),
            shards=1,
            pages=cache_tokens // _PAGE_SIZE,
            page_size=_PAGE_SIZE,
            max_steps=buckets.max_steps,
            plans_late=result.get("plans_late", False) if plans_late is None else plans_late,
        )
        model = StepModel(ShardCache().of(deployment), deployment, chunk_form=buckets.chunk_form)
        return cls(
            name, deployment.target.name, engine, buckets, model, replays, submit or SubmitCosts()
        )

    def find(self, trace: str, rate: float | None) -> Mapping[str, Any]:
        """Returns a replay, or raises ValueError if there is none of this trace at this rate."""
        for replay in self.replays:
            if (replay["trace"], replay["rate"]) == (trace, rate):
                return replay
        known = ", ".join(label(replay) for replay in self.replays)
        raise ValueError(f"replay: expected one of {known}; got {trace} at {rate}")

    def calibrated(self, replay: Mapping[str, Any], host: HostCosts) -> MeasuredTimes:
        """Returns step times whose mean for each program, in this replay, is the measured one."""
        programs, ratios = programs_of(replay), {}
        for _ in range(_ROUNDS):
            times = MeasuredTimes(self.model, self.buckets, ratios)
            self.simulate(replay, times, host)
            ratios = {
                name: programs[name].ratio(count, times.model_seconds[name])
                for name, count in times.counts.items()
                if name in programs
            }
        return MeasuredTimes(self.model, self.buckets, ratios)

    @staticmethod
    def host_costs(one: Mapping[str, Any], other: Mapping[str, Any]) -> HostCosts:
        """Returns the host's time per step, and per request of a step, from two replays whose steps
        have different numbers of requests on average. Raises ValueError if one would be
        negative."""
        costs = {}
        for name, parts in (("plan", ("planning", "dispatching")), ("read", ("processing",))):
            points = []
            for replay in (one, other):
                engine = replay["engine"]
                seconds = 1e-6 * sum(engine["host_us"][part] for part in parts)
                points.append((replay["output_tokens"] / engine["steps"], seconds))
            (few, short), (many, long) = sorted(points)
            costs[f"{name}_request"] = slope = (long - short) / (many - few)
            costs[name] = short - slope * few
        if min(costs.values()) < 0:
            raise ValueError(
                "host times: expected more for steps of more requests, and in each step, got"
                f" {costs} s from {label(one)} and {label(other)}"
            )
        return HostCosts(**costs)

    def simulate(self, replay: Mapping[str, Any], times: StepTimes, host: HostCosts) -> Outcome:
        """Simulates a replay: the same requests at the same times."""
        pool = PoolSettings(
            1, dataclasses.replace(self.engine, host=host), times, devices=1, nodes=1 / 8
        )
        trace = TRACES[replay["trace"]]()
        return Cluster(ClusterSettings(pool)).run(
            replayed(trace, replay["rate"], replay["requests"], submit=self.submit)
        )


def label(replay: Mapping[str, Any]) -> str:
    """Returns the name of a replay."""
    rate = replay["rate"]
    return f"{replay['trace']} {'offline' if rate is None else f'at {rate:g}/s'}"

"""An engine as a result of ``scripts/bench_engine.py`` describes it, and its replays again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv3_jax import presets
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.engine.scheduling.scheduler_config import SchedulerConfig
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.cluster import Cluster, ClusterSettings, Outcome, PoolSettings
from dsv3_jax.simulator.measured_times import MeasuredTimes, calibrate, programs_of
from dsv3_jax.simulator.replica import HostCosts, ReplicaSettings
from dsv3_jax.simulator.step_times import StepModel, StepTimes
from dsv3_jax.simulator.workload import SubmitCosts, replayed
from dsv3_jax.traces import TRACES

_PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """An engine on one GPU, with replays of traces."""

    model_name: str
    target: str
    """Full name of the target, such as ``gpu:h200x1``."""
    engine: ReplicaSettings
    """Without host costs."""
    buckets: Buckets
    model: StepModel
    """Step times at peak rates."""
    replays: Sequence[Mapping[str, Any]]
    submit: SubmitCosts = dataclasses.field(default_factory=SubmitCosts)
    """Time that the client, a thread of the engine's process, took for each submission."""

    @classmethod
    def read(
        cls,
        path: Path,
        *,
        plans_late: bool | None = None,
        submit: SubmitCosts | None = None,
    ) -> MeasuredRun:
        """Reads a result file.

        Args:
          submit: time that the client took for each submission; None for no time.
          plans_late: whether the engine planned steps late. None takes the entry of the file;
            files without one are of earlier engines, which did not.

        Raises:
          ValueError: it is no such file, or its GPU or model is unknown.
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
        """Returns a replay.

        Raises:
          ValueError: there is none of this trace at this rate.
        """
        for replay in self.replays:
            if (replay["trace"], replay["rate"]) == (trace, rate):
                return replay
        known = ", ".join(label(replay) for replay in self.replays)
        raise ValueError(f"replay: expected one of {known}; got {trace} at {rate}")

    def calibrated(self, replay: Mapping[str, Any], host: HostCosts) -> MeasuredTimes:
        """Returns step times with a ratio for each program that all come from one replay."""
        return calibrate(
            self.model,
            self.buckets,
            programs_of(replay),
            lambda times: self.simulate(replay, times, host),
        )

    @staticmethod
    def host_costs(one: Mapping[str, Any], other: Mapping[str, Any]) -> HostCosts:
        """Returns the host's time per step, and per request of a step, from two replays whose
        steps have different numbers of requests on average.

        Raises:
          ValueError: one of them would be negative.
        """
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

    def simulate(
        self,
        replay: Mapping[str, Any],
        times: StepTimes,
        host: HostCosts,
    ) -> Outcome:
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

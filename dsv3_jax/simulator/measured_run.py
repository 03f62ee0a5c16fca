"""An engine as a result of ``scripts/bench_engine.py`` describes it, and its replays again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsv3_jax import presets
from dsv3_jax.engine.buckets import Buckets
from dsv3_jax.engine.scheduler_config import SchedulerConfig
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.shard_cache import ShardCache
from dsv3_jax.plan.target import Target
from dsv3_jax.simulator.cluster import Cluster, ClusterSettings, Outcome, PoolSettings
from dsv3_jax.simulator.measured_times import MeasuredTimes, calibrate, programs_of
from dsv3_jax.simulator.replica import HostCosts, ReplicaSettings
from dsv3_jax.simulator.step_times import StepModel, StepTimes
from dsv3_jax.simulator.workload import replayed
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

    @classmethod
    def read(cls, path: Path, *, plans_late: bool | None = None) -> MeasuredRun:
        """Reads a result file.

        Args:
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
        return cls(name, deployment.target.name, engine, buckets, model, replays)

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

    def calibrated(self, replay: Mapping[str, Any]) -> tuple[MeasuredTimes, HostCosts]:
        """Returns step times and host costs whose parameters all come from one replay: a ratio for
        each program, and the host's time per request of a step."""
        engine = replay["engine"]
        per_request = 1e-6 * engine["steps"] / replay["output_tokens"]
        us = engine["host_us"]
        host = HostCosts(
            plan_request=per_request * (us["planning"] + us["dispatching"]),
            read_request=per_request * us["processing"],
        )
        times = calibrate(
            self.model,
            self.buckets,
            programs_of(replay),
            lambda times: self.simulate(replay, times, host),
        )
        return times, host

    def simulate(
        self,
        replay: Mapping[str, Any],
        times: StepTimes,
        host: HostCosts,
        *,
        submit_seconds: float = 0.0,
    ) -> Outcome:
        """Simulates a replay: the same requests at the same times.

        Args:
          submit_seconds: time that the client takes for each submission.
        """
        pool = PoolSettings(
            1, dataclasses.replace(self.engine, host=host), times, devices=1, nodes=1 / 8
        )
        trace = TRACES[replay["trace"]]()
        return Cluster(ClusterSettings(pool)).run(
            replayed(trace, replay["rate"], replay["requests"], submit_seconds=submit_seconds)
        )


def label(replay: Mapping[str, Any]) -> str:
    """Returns the name of a replay."""
    rate = replay["rate"]
    return f"{replay['trace']} {'offline' if rate is None else f'at {rate:g}/s'}"

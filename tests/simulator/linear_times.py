"""Step times that grow linearly with the work, and engines that have them."""

from __future__ import annotations

import dataclasses

from dsv3_jax.engine.scheduling.step_plan import SchedulerConfig
from dsv3_jax.simulator.replica import ReplicaSettings
from dsv3_jax.simulator.step_times import StepTime, StepWork


@dataclasses.dataclass(frozen=True)
class LinearTimes:
    """A step takes ``fixed`` seconds and more for each decoding request and prompt token."""

    fixed: float = 0.005
    decode: float = 0.0005
    prompt: float = 0.00002

    def of(self, work: StepWork, steps: int) -> StepTime:
        seconds = self.fixed + self.decode * work.decodes + self.prompt * work.prompt_tokens
        return StepTime(steps * seconds, "arithmetic")


def engine(max_running: int = 64, chunks: int = 8, **settings) -> ReplicaSettings:
    """An engine with chunks of 64 tokens and pages for all of its slots."""
    config = SchedulerConfig(max_running, 64, chunks, multi_step_decodes=0)
    return ReplicaSettings(config, settings.pop("shards", 1), 64 * max_running, **settings)

"""Pools of a simulation, from deployments of the planner."""

from __future__ import annotations

import dataclasses

from dsv3_jax.engine.scheduling.step_plan import SchedulerConfig
from dsv3_jax.kv_cache import DEFAULT_PAGE_SIZE
from dsv3_jax.plan import engine_state
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.weights import ShardCache
from dsv3_jax.simulator.cluster import PoolSettings
from dsv3_jax.simulator.replica import ReplicaSettings
from dsv3_jax.simulator.step_times import Efficiency, StepModel

_NODE_SIZE = 8  # devices of a node where all devices are joined by fast links, as in a TPU slice


@dataclasses.dataclass(frozen=True)
class PoolPlan:
    """Replicas of one deployment, whose ``batch`` is the number of slots of a replica."""

    deployment: Deployment
    replicas: int = 1
    efficiency: Efficiency = dataclasses.field(default_factory=Efficiency)
    acceptance: float = 0.85  # probability that a draft of the MTP layer is accepted
    stored_prompts: bool = False  # whether beginnings of prompts are on disk
    resumes: bool = False  # whether requests arrive with their prompts cached, as in a decode pool
    multi_step: int | None = None
    """Number of decode steps of every dispatch that prefills nothing; None takes the engine's.
    More steps make a simulation faster, and an arriving request wait longer."""
    bfloat16_results: bool = False  # whether experts' results travel in bfloat16

    def settings(self, shards: ShardCache) -> PoolSettings:
        """Returns the pool.

        Raises:
          ValueError: the layout does not exist on the devices, or cannot divide the slots.
        """
        d = self.deployment
        assert d.engine is not None
        shard = shards.of(d)
        parts, token_parts = map(shard.layout.num_shards, ("batch", "cached_tokens"))
        buckets = engine_state.default_buckets(d.target, d.layout_name, d.batch // parts)
        engine = ReplicaSettings(
            SchedulerConfig(
                d.batch // parts,
                d.chunk_tokens,
                d.engine.chunks,
                multi_step_decodes=None if self.multi_step else buckets.most_multi_step_decodes,
                max_waiting=10**9,
            ),
            shards=parts,
            pages=engine_state.local_pages(shard, d),
            page_size=DEFAULT_PAGE_SIZE * token_parts,
            prefix_cache=not self.resumes,
            max_steps=self.multi_step or buckets.max_steps,
            adaptive_steps=not self.multi_step,
            drafts=d.draft_depth,
            acceptance=self.acceptance,
            stored_prompts=self.stored_prompts,
            resumes=self.resumes,
        )
        times = StepModel(
            shard,
            d,
            self.efficiency,
            chunk_form=d.engine.chunk_form,
            result_dtype="bfloat16" if self.bfloat16_results else "float32",
        )
        node_size = d.target.chip.node_size or _NODE_SIZE
        return PoolSettings(
            self.replicas, engine, times, d.target.devices, d.target.devices / node_size
        )

"""The planner's answer: memory use, limits and lower bounds on time, or what does not fit and
why."""

from __future__ import annotations

import dataclasses

from dsv3_jax.plan import capacity, engine_state, memory, roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.memory import LABELS, MemoryUse
from dsv3_jax.plan.remedies import remedies
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.weights import ModelShapes, ShardCache


@dataclasses.dataclass(frozen=True)
class EngineCache:
    """Size of an Engine's cache on all devices together, in tokens."""

    tokens: int
    """The size that was asked for, or by default what the Engine takes."""
    largest: int
    """The largest that fits."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Memory use and speed limits of a deployment that fits its devices."""

    deployment: Deployment
    memory: dict[str, MemoryUse]
    """Memory use of one device in each phase, ``"decode"`` and ``"prefill"``."""
    largest_batch: int
    """Largest batch size that fits at this context."""
    largest_context: int
    """Most tokens per sequence that fit at this batch size and that the model has positions for."""
    cache: EngineCache | None
    """Size of an Engine's cache; None for a Generator, which has ``context`` tokens of every
    sequence."""
    rooflines: dict[str, Roofline]
    """Lower bounds on the time of each phase, one decode step and one whole prefill."""

    @property
    def peak(self) -> int:
        """Memory use of one device in the larger of the two phases, in bytes."""
        return max(use.peak for use in self.memory.values())


class DoesNotFitError(ValueError):
    """A deployment that needs more memory than its devices have.

    Attributes:
      deployment: the deployment. If settings were left open, their combination with the lowest
        peak.
      memory: memory use of one device in each phase, ``"decode"`` and ``"prefill"``.
      missing: bytes per device by which the higher peak exceeds the device's memory.
      largest_part: label and bytes of the largest part of that peak.
      remedies: flags of ``dsv3 plan``. Adding any one of these strings to the command makes the
        deployment fit.
      num_layouts: number of layouts that were compared, if the layout was left open; else 0.
    """

    def __init__(
        self,
        deployment: Deployment,
        memory: dict[str, MemoryUse],
        remedies: tuple[str, ...],
        num_layouts: int = 0,
    ) -> None:
        phase = max(memory, key=lambda name: memory[name].peak)
        parts = dataclasses.asdict(memory[phase])
        part = max(parts, key=parts.__getitem__)
        self.deployment, self.memory, self.remedies = deployment, memory, remedies
        self.missing = memory[phase].peak - deployment.target.chip.memory
        self.largest_part = LABELS[part], parts[part]
        self.num_layouts = num_layouts
        least = f" or more in each of {num_layouts} layouts" if num_layouts > 1 else ""
        super().__init__(
            f"expected at most {_gb(deployment.target.chip.memory)} per device of"
            f" {deployment.target.name}, got {_gb(memory[phase].peak)}{least}: {_gb(self.missing)}"
            f" too much in {phase}, whose largest part is {LABELS[part]}, {_gb(parts[part])}; what"
            f" fits: {'; '.join(remedies) or 'no change of settings that the planner tries'}"
        )

    @classmethod
    def of(
        cls, deployment: Deployment, shards: ShardCache, num_layouts: int = 0
    ) -> DoesNotFitError:
        """Makes the error for a deployment; computes its memory use and remedies."""
        use = memory.by_phase(shards.of(deployment), deployment)
        return cls(deployment, use, tuple(remedies(deployment, shards)), num_layouts)


def estimate(deployment: Deployment, shards: ShardCache | None = None) -> Estimate:
    """Returns the memory use of a deployment, its limits, and lower bounds on its times.

    Args:
      shards: cache of earlier calls for the same model, which makes this one faster.

    Raises:
      DoesNotFitError: a ValueError with the missing bytes and changes that fit.
      ValueError: the layout cannot shard the parameters, or cannot divide the batch over devices.
    """
    shards = shards or ShardCache()
    shard = shards.of(deployment)
    if not capacity.fits(shard, deployment):
        raise DoesNotFitError.of(deployment, shards)
    use, cache = memory.by_phase(shard, deployment), None
    decoding = deployment
    if deployment.engine is not None:
        spare = deployment.target.chip.memory - max(each.peak for each in use.values())
        cache = EngineCache(
            engine_state.cache_tokens(shard, deployment),
            engine_state.largest_cache_tokens(shard, deployment, spare),
        )
        # The bound of the longest requests that the cache holds all of at once.
        context = max(1, min(deployment.context, cache.tokens // deployment.batch))
        decoding = dataclasses.replace(deployment, context=context)
    return Estimate(
        deployment,
        use,
        capacity.largest_batch(shard, deployment),
        capacity.largest_context(shard, deployment),
        cache,
        {
            "decode": roofline.decode(shard, decoding),
            "prefill": roofline.prefill(shard, deployment),
        },
    )


def model_shapes(deployment: Deployment) -> ModelShapes:
    """Returns the abstract model of a deployment."""
    return ModelShapes.of(
        deployment.config,
        deployment.quantization,
        mtp=deployment.mtp,
        redundant_experts=deployment.redundant_experts,
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 5e7 else f"{nbytes / 1e6:.1f} MB"

"""A deployment that fits its devices, with its bounds; or what it lacks, and what would fit."""

from __future__ import annotations

import dataclasses

from dsv3_jax.plan import capacity, memory, roofline
from dsv3_jax.plan.deployment import Deployment
from dsv3_jax.plan.memory import MEANINGS, Memory
from dsv3_jax.plan.remedies import remedies
from dsv3_jax.plan.roofline import Roofline
from dsv3_jax.plan.shares import Shares
from dsv3_jax.plan.weights import Shapes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A deployment that fits."""

    deployment: Deployment
    memory: dict[str, Memory]
    """Bytes of one device while decoding, and in prefill."""
    largest_batch: int
    """The most sequences that fit at this context."""
    largest_context: int
    """The most tokens a sequence that fit at this batch, up to what the model reaches."""
    rooflines: dict[str, Roofline]
    """Bounds on a decode step, and on a prefill."""

    @property
    def peak(self) -> int:
        return max(each.peak for each in self.memory.values())


class DoesNotFitError(ValueError):
    """A deployment that needs more memory than its devices have.

    Attributes:
      deployment: what was asked for; where settings were left open, the combination of them with
        the lowest peak.
      memory: bytes of one device while decoding, and in prefill.
      missing: bytes a device by which the higher peak of the two is too large.
      largest_part: name and bytes of what takes most at that peak.
      remedies: flags of ``dsv3 plan`` each of which, added to it, make it fit.
    """

    def __init__(
        self, deployment: Deployment, needed: dict[str, Memory], remedies: tuple[str, ...]
    ) -> None:
        fullest = max(needed, key=lambda phase: needed[phase].peak)
        parts = dataclasses.asdict(needed[fullest])
        part = max(parts, key=parts.__getitem__)
        self.deployment, self.memory, self.remedies = deployment, needed, remedies
        self.missing = needed[fullest].peak - deployment.target.chip.memory
        self.largest_part = MEANINGS[part], parts[part]
        super().__init__(
            f"expected at most {_gb(deployment.target.chip.memory)} a device of"
            f" {deployment.target.name}, got {_gb(needed[fullest].peak)}: {_gb(self.missing)} too"
            f" much in {fullest}, whose largest part is {MEANINGS[part]}, {_gb(parts[part])}; what"
            f" fits: {'; '.join(remedies) or 'nothing near does'}"
        )

    @classmethod
    def of(cls, deployment: Deployment, shares: Shares) -> DoesNotFitError:
        needed = memory.phases(shares.of(deployment), deployment)
        return cls(deployment, needed, tuple(remedies(deployment, shares)))


def plan(deployment: Deployment, shares: Shares | None = None) -> Plan:
    """Returns what the deployment takes, and could.

    Args:
      shares: those of earlier plans for the same model, to save their time.

    Raises:
      DoesNotFitError: a ValueError with what is missing and what would fit.
      ValueError: parameters that cannot be cut as the layout says, or a batch that does not divide
        over the devices.
    """
    shares = shares or Shares()
    share = shares.of(deployment)
    if not capacity.fits(share, deployment):
        raise DoesNotFitError.of(deployment, shares)
    return Plan(
        deployment,
        memory.phases(share, deployment),
        capacity.largest_batch(share, deployment),
        capacity.largest_context(share, deployment),
        {
            "decode": roofline.decode(share, deployment),
            "prefill": roofline.prefill(share, deployment),
        },
    )


def shapes_of(deployment: Deployment) -> Shapes:
    return Shapes.of(
        deployment.config,
        deployment.quantization,
        mtp=deployment.mtp,
        redundant_experts=deployment.redundant_experts,
    )


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 5e7 else f"{nbytes / 1e6:.1f} MB"

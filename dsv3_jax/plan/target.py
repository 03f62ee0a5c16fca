"""So many devices of a kind, by name: ``gpu:h200x8``, ``tpu:v5p:4x4x8``."""

from __future__ import annotations

import dataclasses
import math
import re

from dsv3_jax.plan.chips import CHIPS, Chip

_EXPECTED = (
    "target: expected gpu:KINDxDEVICES or tpu:KIND:AxB[xC], such as gpu:h200x8 or tpu:v5p:4x4x8"
)
_MOST_GPUS = 2048

# Dimensions of a topology, most chips of a slice (Google Cloud's pages), devices a chip.
_TPUS = {"v5e": (2, 256, 1), "v5p": (3, 8960, 1), "v6e": (2, 256, 1), "tpu7x": (3, 9216, 2)}


@dataclasses.dataclass(frozen=True)
class Target:
    name: str
    kind: str
    sizes: tuple[int, ...]
    """The number of GPUs, or chips along each dimension of a slice."""

    @classmethod
    def parse(cls, name: str) -> Target:
        """Raises ValueError for a name of another form, an unknown kind, or no such slice."""
        kind, sizes = name, ""
        if gpu := re.fullmatch(r"gpu:([a-z0-9]+?)x(\d+)", name):
            kind, sizes = gpu.groups()
        elif tpu := re.fullmatch(r"tpu:(\w+):(\d+(?:x\d+)*)", name):
            kind, sizes = tpu.groups()
        else:
            raise ValueError(f"{_EXPECTED}; got {name!r}")
        family = name.partition(":")[0]
        known = [each for each in CHIPS if (each in _TPUS) == (family == "tpu")]
        if kind not in known:
            raise ValueError(f"target: expected {family} of {', '.join(known)}; got {kind!r}")
        found = cls(name, kind, tuple(map(int, sizes.split("x"))))
        if min(found.sizes) < 1:
            raise ValueError(f"target: expected 1 device or more, got {name!r}")
        if family == "tpu":
            dimensions, most, _ = _TPUS[kind]
            if len(found.sizes) != dimensions or math.prod(found.sizes) > most:
                raise ValueError(
                    f"target: expected {dimensions} dimensions of {most} chips at most for {kind},"
                    f" got {name!r}"
                )
        return found

    @property
    def chip(self) -> Chip:
        return CHIPS[self.kind]

    @property
    def platform(self) -> str:
        """As :mod:`pallas_kernels.target` names it."""
        return "tpu" if self.kind in _TPUS else "gpu"

    @property
    def devices(self) -> int:
        """As JAX counts them."""
        return math.prod(self.sizes) * (_TPUS[self.kind][2] if self.kind in _TPUS else 1)

    @property
    def nodes(self) -> int:
        """Groups of devices that are joined by the faster links."""
        return -(-self.devices // (self.chip.node or self.devices))

    def doubled(self) -> Target | None:
        """Twice as many devices, along the shortest dimension; None where there are no more."""
        sizes = list(self.sizes)
        sizes[sizes.index(min(sizes))] *= 2
        shape = "x".join(map(str, sizes))
        if self.kind in _TPUS:
            if math.prod(sizes) > _TPUS[self.kind][1]:
                return None
            return Target(f"tpu:{self.kind}:{shape}", self.kind, tuple(sizes))
        return (
            Target(f"gpu:{self.kind}x{shape}", self.kind, tuple(sizes))
            if (sizes[0] <= _MOST_GPUS)
            else None
        )

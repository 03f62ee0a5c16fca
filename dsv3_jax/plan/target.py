"""Names of targets: a kind and number of devices, as in ``gpu:h200x8`` or ``tpu:v5p:4x4x8``."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterator, Sequence

from dsv3_jax.plan.chips import CHIPS, Chip

# Machines of clouds, with their GPUs.
_MACHINES = {
    "a2-highgpu-1g": ("a100-40gb", 1),
    "a2-highgpu-8g": ("a100-40gb", 8),
    "a2-ultragpu-1g": ("a100-80gb", 1),
    "a2-ultragpu-8g": ("a100-80gb", 8),
    "a3-highgpu-8g": ("h100", 8),
    "a3-megagpu-8g": ("h100", 8),
    "a3-ultragpu-8g": ("h200", 8),
    "a4-highgpu-8g": ("b200", 8),
    "a4x-highgpu-4g": ("gb200", 4),
    "p4d.24xlarge": ("a100-40gb", 8),
    "p4de.24xlarge": ("a100-80gb", 8),
    "p5.48xlarge": ("h100", 8),
    "p5e.48xlarge": ("h200", 8),
    "p5en.48xlarge": ("h200", 8),
    "p6-b200.48xlarge": ("b200", 8),
}
_GPU_KIND = r"(?:gb200|b200|h100|h200|h800|h20|a100-40gb|a100-80gb)"
# Words of a product's name that leave the device the same. PCIe cards and the H100 NVL are others.
_WORDS = re.compile(
    r"(?<=h100|h200|h800)-(?:sxm\d?|80gb|141gb|hbm3e?)|(?<=a100)-sxm4|(?<=h20)-(?:sxm\d?|96gb|hbm3)"
    r"|(?<=b200)-(?:sxm\d?|180gb|192gb|hbm3e)"
)
_SYSTEM = re.compile(rf"(?:dgx|hgx)-({_GPU_KIND})(?:-(\d+)-?gpus?)?")

_TPU_KINDS = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5-lite-podslice": "v5e",
    "v5p-slice": "v5p",
    "v6e-slice": "v6e",
    "trillium": "v6e",
    "ironwood": "tpu7x",
    "v7x": "tpu7x",
}
_TPU = re.compile(
    rf"(?:tpu[:-])?(?P<kind>{'|'.join(_TPU_KINDS)}|v5e|v5p|v6e|tpu7x|7x)"
    r"(?:-(?P<number>\d+)|[:-](?P<shape>\d+(?:x\d+)+))?"
)


def own_name(name: str) -> str:
    """Returns a name as :meth:`Target.parse` reads it, in lower case.

    Accelerator types of TPUs such as ``v5p-128`` become ``v5p:-128``. A name that is not known is
    returned as it is.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
    if match := _TPU.fullmatch(plain):
        kind = match["kind"]
        kind = _TPU_KINDS.get(kind, "tpu7x" if kind == "7x" else kind)
        if match["number"]:
            return f"{kind}:-{match['number']}"
        return f"{kind}:{match['shape']}" if match["shape"] else kind
    prefix = re.match(r"(?:gpu:)?((?:\d+-?[x*]-?)*)", plain)
    assert prefix is not None
    number = math.prod(map(int, re.findall(r"\d+", prefix[1])))
    rest = plain[prefix.end() :].removeprefix("nvidia-")
    if gpus := _gpus(rest):
        kind, count = gpus
        return f"gpu:{kind}x{number * count}"
    return f"{rest}x{number}" if prefix[1] else plain


def _gpus(name: str) -> tuple[str, int] | None:
    """Returns kind and number of GPUs, or None for a name that is not known."""
    if name in _MACHINES:
        return _MACHINES[name]
    while (shorter := _WORDS.sub("", name)) != name:
        name = shorter
    if name in ("gb200-nvl72", "dgx-gb200"):
        return "gb200", 72
    if name in ("dgx-a100", "hgx-a100"):
        return "a100", 8  # which is refused, because there are two
    if match := _SYSTEM.fullmatch(name):
        return match[1], int(match[2] or 8)
    if match := re.fullmatch(rf"({_GPU_KIND})(?:[x:*-](\d+))?", name):
        return match[1], int(match[2] or 1)
    return None


_MOST_GPUS = 2048

# Number of dimensions of a slice, most chips of a slice (Google Cloud's pages), devices per chip.
_TPUS = {"v5e": (2, 256, 1), "v5p": (3, 8960, 1), "v6e": (2, 256, 1), "tpu7x": (3, 9216, 2)}

_TENSOR_CORES = ("v5p", "tpu7x")
"""TPUs whose accelerator types, such as v5p-128, count TensorCores, two to a chip. Those of the
others count chips."""
_SMALL_SLICES = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_GPUS_OF_HOST = {"gb200": 4}  # of others 8, as in NVIDIA's HGX and DGX systems
_CHIPS_OF_HOST = 4
_CHIPS_OF_ONE_HOST = {"v5e": 8, "v6e": 8}  # most, if a slice has a single host

_EXPECTED = (
    "target: expected a number of GPUs, such as h200x8, or the chips of a TPU slice, such as"
    " v5p:4x4x8 (8xH200, DGX H100 and v5p-128 are read too)"
)
_NAME = re.compile(
    r"(?:(?P<family>gpu|tpu):)?"
    r"(?P<kind>[a-z][a-z0-9-]*?)"
    r"(?:x(?P<gpus>\d+)|:(?P<slice>-?\d+(?:x\d+)*))?"
)


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of equal devices, joined by their makers' networks."""

    name: str
    """Full name, such as ``gpu:h200x8``."""
    kind: str
    """Key of :data:`~dsv3_jax.plan.chips.CHIPS`, such as ``h200``."""
    sizes: tuple[int, ...]
    """Number of GPUs, or number of chips along each dimension of a TPU slice."""

    @classmethod
    def parse(cls, name: str) -> Target:
        """Reads a name such as ``gpu:h200x8`` or ``tpu:v5p:4x4x8``.

        ``gpu:`` and ``tpu:`` may be left out, and so may ``x1``: ``h200`` is ``gpu:h200x1``. Names
        that others use are read too, see :mod:`dsv3_jax.plan.target`.

        Raises:
          ValueError: the name has another form, the kind is unknown (the message suggests the
            nearest), or the slice does not exist.
        """
        if (match := _NAME.fullmatch(own_name(name))) is None:
            raise ValueError(f"{_EXPECTED}; got {name!r}")
        family, kind, gpus, chips = match.group("family", "kind", "gpus", "slice")
        known = [each for each in CHIPS if family in (None, _family(each))]
        if kind not in known:
            raise ValueError(
                f"target: expected a kind among {', '.join(known)}; got {kind!r}{_nearest(kind)}"
            )
        family = _family(kind)
        if family == "tpu" and chips and (count := re.fullmatch(r"-(\d+)", chips)):
            chips = _shape(kind, int(count[1]), name)
        if (gpus or not chips) if family == "tpu" else chips:
            raise ValueError(f"{_EXPECTED}; got {name!r}, but {kind} is a {family.upper()}")
        sizes = tuple(map(int, (chips or gpus or "1").split("x")))
        if min(sizes) < 1:
            raise ValueError(f"target: expected 1 device or more, got {name!r}")
        if family == "tpu":
            dimensions, most, _ = _TPUS[kind]
            if len(sizes) != dimensions or math.prod(sizes) > most:
                raise ValueError(
                    f"target: expected {dimensions} dimensions and at most {most} chips for {kind},"
                    f" got {name!r}"
                )
        return cls(_full_name(kind, sizes), kind, sizes)

    @property
    def chip(self) -> Chip:
        """Peak figures of one device."""
        return CHIPS[self.kind]

    @property
    def platform(self) -> str:
        """``"gpu"`` or ``"tpu"``, the names that :mod:`pallas_kernels.target` uses."""
        return "tpu" if self.kind in _TPUS else "gpu"

    @property
    def devices(self) -> int:
        """Number of devices as JAX counts them. A TPU7x chip is two."""
        return math.prod(self.sizes) * (_TPUS[self.kind][2] if self.kind in _TPUS else 1)

    @property
    def nodes(self) -> int:
        """Number of groups of devices that the fast links join: see ``Chip.node_size``."""
        return -(-self.devices // (self.chip.node_size or self.devices))

    @property
    def devices_of_host(self) -> int:
        """Number of devices that one host has."""
        if self.platform == "gpu":
            return min(self.devices, _GPUS_OF_HOST.get(self.kind, 8))
        chips = math.prod(self.sizes)
        alone = chips <= _CHIPS_OF_ONE_HOST.get(self.kind, _CHIPS_OF_HOST)
        return (chips if alone else _CHIPS_OF_HOST) * _TPUS[self.kind][2]

    @property
    def hosts(self) -> int:
        """Number of hosts, as NVIDIA's systems and Google Cloud's machines have them."""
        return -(-self.devices // self.devices_of_host)

    def doubled(self) -> Target | None:
        """Returns the target with twice as many devices, along the shortest dimension of a slice.

        None if that is more than exist.
        """
        sizes = list(self.sizes)
        sizes[sizes.index(min(sizes))] *= 2
        most = _TPUS[self.kind][1] if self.kind in _TPUS else _MOST_GPUS
        if math.prod(sizes) > most:
            return None
        return Target(_full_name(self.kind, sizes), self.kind, tuple(sizes))


def _family(kind: str) -> str:
    return "tpu" if kind in _TPUS else "gpu"


def _shape(kind: str, number: int, name: str) -> str:
    """Returns the slice of an accelerator type, such as ``4x4x4`` for v5p-128.

    Raises:
      ValueError: no slice has this number of chips.
    """
    cores = 2 if kind in _TENSOR_CORES else 1
    chips, dimensions = number // cores, _TPUS[kind][0]
    is_possible = number % cores == 0 and 1 <= chips <= _TPUS[kind][1]
    shapes = list(_shapes(chips, dimensions)) if is_possible else []
    if not shapes:
        unit = f"TensorCores of {kind} (two to a chip)" if cores > 1 else f"chips of {kind}"
        raise ValueError(f"target: expected a number of {unit} that a slice can have, got {name!r}")
    sizes = min(shapes, key=lambda each: max(each) - min(each))
    return "x".join(map(str, sizes))


def _shapes(chips: int, dimensions: int) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of slices with a number of chips. Small ones are parts of a cube of 64
    chips; larger ones have whole cubes. In two dimensions, sizes are powers of two."""
    if dimensions == 2:
        sizes = [2**n for n in range(9)]
        yield from ((a, chips // a) for a in sizes if chips % a == 0 and chips // a in sizes)
        return
    yield from (each for each in _SMALL_SLICES if math.prod(each) == chips)
    steps = range(4, 1 + round(chips ** (1 / 3)) + 4, 4)
    for a in steps:
        for b in range(a, 1 + math.isqrt(chips // a), 4):
            c, rest = divmod(chips, a * b)
            if not rest and c >= b and c % 4 == 0:
                yield a, b, c


def _full_name(kind: str, sizes: Sequence[int]) -> str:
    shape = "x".join(map(str, sizes))
    return f"tpu:{kind}:{shape}" if kind in _TPUS else f"gpu:{kind}x{shape}"


def _nearest(kind: str) -> str:
    """Returns ``"; did you mean X?"`` with the known kinds closest to ``kind``, or ``""``."""
    close = [each for each in CHIPS if each.startswith(kind)]
    close = close or difflib.get_close_matches(kind, CHIPS, n=2, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""

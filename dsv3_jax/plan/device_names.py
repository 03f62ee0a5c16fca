"""Names that NVIDIA, Google Cloud and other projects have for devices, as names of ours.

For example ``8xH200``, ``2x DGX H100``, ``H100:8``, ``a3-ultragpu-8g``, ``v5p-128`` and
``v5litepod-16``.
"""

from __future__ import annotations

import math
import re

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


def ours(name: str) -> str:
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

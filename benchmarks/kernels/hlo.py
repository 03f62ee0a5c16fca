"""What XLA made of a program: how many kernels it launches, and whether it kept all calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

KERNELS = r"mosaic_gpu\w*"
"""Names of the custom calls that run our kernels."""

# Neither a kernel nor a copy on the device.
_FREE = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "opt-barrier", "after-all",
    "call", "while", "conditional", "copy-done", "async-done", "async-update", "partition-id",
}  # fmt: skip
_CALLED = re.compile(r"(?:to_apply|body|branch_computations)=\{?%?([\w.\-]+(?:, ?%[\w.\-]+)*)")


def asked(stablehlo: str, target: str = KERNELS) -> int:
    """Custom calls to ``target`` that one run of a lowered module makes."""
    own, calls, name = Counter[str](), dict[str, Counter[str]](), ""
    custom = re.compile(rf"stablehlo\.custom_call @{target}\(")
    for line in stablehlo.splitlines():
        if found := re.search(r"func\.func \w+ @([\w.]+)\(", line):
            name = found[1]
            calls[name] = Counter()
            continue
        own[name] += bool(custom.search(line))
        if found := re.search(r"(?:func\.)?call @([\w.]+)\(", line):
            calls[name][found[1]] += 1

    def total(name: str) -> int:
        return own[name] + sum(n * total(callee) for callee, n in calls.get(name, {}).items())

    return total("main")


def launched(hlo: str, target: str = KERNELS) -> tuple[int, int]:
    """(custom calls to ``target``, kernels and copies of all kinds) of one run of optimised HLO.

    Loops count as one turn, and of a branch every side.
    """
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.removeprefix("ENTRY ").split(" ")[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            bodies[name] = []
        elif " = " in line and name:
            bodies[name].append(line)
        elif line.startswith("}"):
            name = ""
    wanted = re.compile(rf'custom_call_target="{target}"')

    def total(name: str) -> Iterator[tuple[bool, bool]]:
        for line in bodies.get(name, ()):
            opcode = _opcode(line)
            yield opcode == "custom-call" and bool(wanted.search(line)), opcode not in _FREE
            if opcode in ("call", "while", "conditional") and (found := _CALLED.search(line)):
                for callee in found[1].split(","):
                    yield from total(callee.strip(" %"))

    every = list(total(entry))
    return sum(ours for ours, _ in every), sum(kernel for _, kernel in every)


def _opcode(line: str) -> str:
    """Of ``%name = type opcode(operands), ...``, where a type may be a tuple of types."""
    rest = line.split(" = ", 1)[1]
    depth = 0
    for i, letter in enumerate(rest):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and depth == 0:
            return rest[i + 1 :].split("(", 1)[0]
    return ""

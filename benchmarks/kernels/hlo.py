"""Analyses compiled programs: how many kernels they launch, and whether XLA kept all calls."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

KERNELS = r"mosaic_gpu\w*"
"""Custom call targets of our kernels, as a regular expression."""

# Operations that launch neither a kernel nor a copy.
_FREE = {
    "parameter", "constant", "bitcast", "get-tuple-element", "tuple", "opt-barrier", "after-all",
    "call", "while", "conditional", "copy-done", "async-done", "async-update", "partition-id",
}  # fmt: skip
_CALLED = re.compile(r"(?:to_apply|body|branch_computations)=\{?%?([\w.\-]+(?:, ?%[\w.\-]+)*)")


def asked(stablehlo: str, target: str = KERNELS) -> int:
    """Returns the number of custom calls to ``target`` that a lowered module requests."""
    direct_calls, calls, name = Counter[str](), dict[str, Counter[str]](), ""
    custom = re.compile(rf"stablehlo\.custom_call @{target}\(")
    for line in stablehlo.splitlines():
        if match := re.search(r"func\.func \w+ @([\w.]+)\(", line):
            name = match[1]
            calls[name] = Counter()
            continue
        direct_calls[name] += bool(custom.search(line))
        if match := re.search(r"(?:func\.)?call @([\w.]+)\(", line):
            calls[name][match[1]] += 1

    def total(name: str) -> int:
        return direct_calls[name] + sum(
            n * total(callee) for callee, n in calls.get(name, {}).items()
        )

    return total("main")


def launched(hlo: str, target: str = KERNELS) -> tuple[int, int]:
    """Returns (custom calls to ``target``, all kernels and copies) in optimised HLO.

    A loop counts as one iteration, and a conditional counts all its branches.
    """
    wanted = re.compile(rf'custom_call_target="{target}"')
    every = list(_launches(hlo))
    ours = sum(_opcode(line) == "custom-call" and bool(wanted.search(line)) for line in every)
    return ours, len(every)


def outside(hlo: str, kernel: str) -> list[str] | None:
    """Returns what scheduled HLO launches before the first or after the second ``kernel``.

    ``kernel`` is the kernel's name in JAX. None if it is not launched exactly twice. Copies of a
    single number are ignored, because they initialise a counter of a kernel or of a loop, and so
    are small arrays of integers, such as the first positions of sequences.
    """
    every = list(_launches(hlo))
    named = [i for i, line in enumerate(every) if _of_kernel(line, kernel)]
    if len(named) != 2:
        return None
    rest = every[: named[0]] + every[named[1] + 1 :]
    ignored = re.compile(r" = s32\[(1?\]\S* copy\(|(\d{1,2},){0,2}\d{0,2}\]\S* fusion\()")
    return [line.strip() for line in rest if not ignored.search(line)]


def _of_kernel(line: str, kernel: str) -> bool:
    return bool(re.search(rf'op_name="[^"]*/{kernel}/', line))


def _launches(hlo: str) -> Iterator[str]:
    """Yields the lines that launch something on the device, in the order of the schedule."""
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

    def launches_of(name: str) -> Iterator[str]:
        for line in bodies.get(name, ()):
            opcode = _opcode(line)
            if opcode not in _FREE:
                yield line
            if opcode in ("call", "while", "conditional") and (match := _CALLED.search(line)):
                for callee in match[1].split(","):
                    yield from launches_of(callee.strip(" %"))

    return launches_of(entry)


def _opcode(line: str) -> str:
    """Parses the opcode of ``%name = type opcode(operands), ...``. A type may be a tuple."""
    rest = line.split(" = ", 1)[1]
    depth = 0
    for i, letter in enumerate(rest):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == " " and depth == 0:
            return rest[i + 1 :].split("(", 1)[0]
    return ""

"""Finds the kernels of a compiled loop that depend on one of them, such as those behind the LM
head, and how many of them run one after the other."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

_LAUNCHED = {"fusion", "custom-call", "copy", "sort", "scatter", "reduce", "conditional"}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operation of optimised HLO that launches a kernel, or several: ``sort``."""

    name: str
    """``loop_add_fusion.1``, which profiles list as ``loop_add_fusion_1``."""
    depth: int
    """1 for a kernel that waits for the first one only, 2 for a kernel that waits for that, ..."""
    behind: str
    """The kernel before it in the longest chain."""


@dataclasses.dataclass(frozen=True)
class Loop:
    """The kernels of a loop's body and of its condition."""

    body: int
    condition: int
    kernels: list[Kernel]
    """The kernels that wait for the first one, or all, by depth."""

    def longest(self) -> list[str]:
        """Returns the names of the longest chain, without the first kernel."""
        by_name = {kernel.name: kernel for kernel in self.kernels}
        chain, name = [], self.kernels[-1].name if self.kernels else ""
        while name in by_name:
            chain.insert(0, name)
            name = by_name[name].behind
        return chain


def last_loop(hlo: str, first: str | None) -> Loop:
    """Analyses the last loop of a module's text, which for decode steps is the one over steps.

    Args:
      first: how the name of the first kernel begins, the last such kernel of the loop. None stands
        for all kernels of the loop.

    Raises:
      ValueError: the module has no loop, or its body no such kernel.
    """
    computations = dict(_computations(hlo))
    loops = re.findall(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", hlo)
    if not loops:
        raise ValueError("hlo: expected a loop, got none")
    condition, body = loops[-1]
    operations = dict(map(_parse, computations[body]))
    launched = [name for name, (opcode, _) in operations.items() if opcode in _LAUNCHED]
    # HLO text lists operations after their operands. Depth, and the last kernel of the chain.
    chains: dict[str, tuple[int, str]] = {}
    if first is not None:
        roots = [name for name in launched if name.startswith(first)]
        if not roots:
            raise ValueError(f"first: expected the beginning of a kernel's name, got {first!r}")
        chains[roots[-1]] = 0, roots[-1]
    kernels = []
    for name, (opcode, operands) in operations.items():
        before = [chains[each] for each in operands if each in chains]
        if first is None and not before:
            before = [(0, "")]
        if name in chains or not before:
            continue
        depth, last = max(before)
        if opcode in _LAUNCHED:
            kernels.append(Kernel(name, depth + 1, last))
            depth, last = depth + 1, name
        chains[name] = depth, last
    kernels.sort(key=lambda kernel: kernel.depth)
    in_condition = [opcode for _, (opcode, _) in map(_parse, computations[condition])]
    return Loop(len(launched), sum(opcode in _LAUNCHED for opcode in in_condition), kernels)


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and the operations of each computation."""
    lines: list[str] = []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            lines = []
            yield header[1], lines
        elif re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = ", line):
            lines.append(line.strip())


def _parse(line: str) -> tuple[str, tuple[str, list[str]]]:
    """Returns an operation's name, opcode and operands."""
    named = re.match(r"(?:ROOT )?%?([\w.\-]+) = (.*)", line)
    assert named is not None
    opcode = re.search(r"(?<=[\s)}\]])([a-z][\w\-]*)\(", named[2])
    assert opcode is not None
    depth, end = 1, opcode.end()
    while depth and end < len(named[2]):
        depth += {"(": 1, ")": -1}.get(named[2][end], 0)
        end += 1
    operands = re.findall(r"%([\w.\-]+)", named[2][opcode.end() : end])
    return named[1], (opcode[1], operands)

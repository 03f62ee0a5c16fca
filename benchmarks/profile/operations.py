"""Classifies the operations of optimised HLO by the part of the model that they belong to."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

KINDS = (
    # (substring of a source path, kind); the first match counts
    ("mla_decode/schedule", "schedule"),
    ("pallas_kernels/mla_", "attention"),
    ("pallas_kernels/softmax", "attention"),
    ("pallas_kernels/quantized_matmul", "dense matmul"),
    ("pallas_kernels/rms_norm", "norm"),
    ("pallas_kernels/swiglu", "dense matmul"),
    ("pallas_kernels/grouped_", "expert matmul"),
    ("pallas_kernels/block_quant", "dequantisation"),
    ("pallas_kernels/route", "router"),
    ("layers/router", "router"),
    ("layers/moe", "sort, permute, sum"),
    ("layers/norm", "norm"),
    ("layers/rope", "rope"),
    ("layers/linear", "dense matmul"),
    ("layers/mlp", "SwiGLU"),
    ("layers/attention", "around attention"),
    ("layers/block", "residual sum"),
    ("kv_cache", "cache write"),
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of optimised HLO."""

    opcode: str
    name: str
    """Name in the traced program, such as jit(run)/.../dot_general."""
    kind: str


def operations(hlo: str) -> dict[str, Operation]:
    """Parses a module's text. Returns its operations by the names that the profiler uses."""
    sources = _Sources(hlo)
    bodies: dict[str, list[tuple[str, str, str]]] = {}
    parsed: dict[str, tuple[str, str]] = {}
    body: list[tuple[str, str, str]] = []
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = bodies.setdefault(header[1], [])
        elif instruction := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
            name, rest = instruction.groups()
            opcode = re.search(r"(?<=[\s)}\]]) ?([a-z][\w\-]*)\(", " " + rest)
            body.append((name, opcode[1] if opcode else "", line))
            parsed[name] = (opcode[1] if opcode else "", line)

    def inside(line: str) -> Iterator[tuple[str, str]]:
        called = re.search(r"calls=%?([\w.\-]+)", line)
        for _, opcode, inner in bodies.get(called[1], ()) if called else ():
            yield opcode, inner
            yield from inside(inner)

    result = {}
    for name, (opcode, line) in parsed.items():
        lines = [(opcode, line), *inside(line)]
        result[name] = Operation(opcode, _traced_name(line), _kind(lines, sources))
    return result


class _Sources:
    """Looks up an operation's source file, in its own metadata or in the module's tables."""

    def __init__(self, hlo: str):
        self._tables: dict[str, dict[str, str]] = {}
        table: dict[str, str] | None = None
        for line in hlo.splitlines():
            if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables.setdefault(line, {})
            elif table is not None and (entry := re.match(r"(\d+) (.*)", line)):
                table[entry[1]] = entry[2]
            elif line and not line[0].isdigit():
                table = None

    def of(self, line: str) -> str:
        if direct := re.search(r'source_file="([^"]*)"', line):
            return direct[1]
        frame = re.search(r"stack_frame_id=(\d+)", line)
        location = _field(self._tables.get("StackFrames", {}), frame and frame[1], "location")
        file = _field(self._tables.get("FileLocations", {}), location, "name")
        return self._tables.get("FileNames", {}).get(file or "", "").strip('"')


def _field(table: dict[str, str], entry: str | None, name: str) -> str | None:
    match = re.search(rf"file_{name}_id=(\d+)", table.get(entry or "", ""))
    return match[1] if match else None


def _traced_name(line: str) -> str:
    match = re.search(r'op_name="([^"]*)"', line)
    return match[1] if match else ""


_MATMUL_KINDS = ("attention", "expert matmul", "router")
_IGNORED = {
    "parameter",
    "constant",
    "broadcast",
    "bitcast",
    "tuple",
    "get-tuple-element",
    "convert",
}


def _kind(lines: Sequence[tuple[str, str]], sources: _Sources) -> str:
    """Returns the kind of most fused operations, but a matmul decides for the whole fusion."""
    kinds = collections.Counter[str]()
    for opcode, line in lines:
        source = sources.of(line)
        kind = next((kind for part, kind in KINDS if part in source), "other")
        if opcode == "dot" or "__cublas" in line:
            return kind if kind in _MATMUL_KINDS else "dense matmul"
        if kind != "other" and opcode not in _IGNORED:
            kinds[kind] += 1
    if kinds:
        return kinds.most_common(1)[0][0]
    return "copies" if any(opcode.startswith("copy") for opcode, _ in lines) else "other"

"""Records a digest of every Hopper kernel's PTX, and the instructions of its main loops.

    python -m scripts.record_machine_code tests/pallas_kernels/machine_code.json
    python -m scripts.record_machine_code after.json --against before.json [--op mla_decode]

It compiles all kernels of ``tests/pallas_kernels/test_hopper_compile.py`` without a GPU. With
``--against`` it prints the kernels that differ from an older record, and its exit status is 1 if
any does: a change that only moves code leaves the PTX as it is. It needs JAX's CUDA plugin, ptxas
and nvdisasm (the package nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.kernels.machine_code import digest, disassemble, main_loops, ptx_of
from tests.pallas_kernels.test_hopper_compile import OPS, compile_in_child


def record(op: str) -> dict[str, dict[str, Any]]:
    """Returns, by kernel and by entry of its PTX: digest, instructions in all, main loops.

    A loop is ``[instructions, conditional instructions, tensor core instructions]``.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = compile_in_child(op, Path(folder))
    kernels = {}
    for name, result in results.items():
        if "error" in result:
            raise RuntimeError(f"expected {name} to compile, got {result['error']}")
        kernels[name] = {}
        for entry, ptx in ptx_of(result["report"]).items():
            code = disassemble(ptx)
            kernels[name][entry] = {
                "ptx": digest(ptx),
                "instructions": len(code),
                "loops": [
                    [loop.instructions, loop.conditional, loop.tensor] for loop in main_loops(code)
                ],
            }
    return kernels


def versions() -> dict[str, str]:
    printed = subprocess.run(["ptxas", "--version"], check=True, capture_output=True, text=True)
    release = re.search(r"V([\d.]+)", printed.stdout)
    return {"jax": jax.__version__, "ptxas": release[1] if release else printed.stdout.strip()}


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns a line for each kernel that was added, removed or changed."""
    lines = [f"removed: {name}" for name in before if name not in after]
    for name, entries in after.items():
        if name not in before:
            lines.append(f"added: {name}")
            continue
        for entry in sorted({*entries, *before[name]}):
            old, new = before[name].get(entry), entries.get(entry)
            if old is None or new is None:
                lines.append(f"{name}, {entry}: {'added' if old is None else 'removed'}")
            elif old["ptx"] != new["ptx"]:
                lines.append(
                    f"{name}, {entry}: instructions {old['instructions']} -> {new['instructions']},"
                    f" loops {old['loops']} -> {new['loops']}"
                )
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="the record to write")
    parser.add_argument("--against", type=Path, help="an older record")
    parser.add_argument("--op", choices=OPS, action="append", help="only this operation's kernels")
    arguments = parser.parse_args(words)
    kernels: dict[str, Any] = {}
    for op in arguments.op or OPS:
        kernels |= record(op)
        print(f"{op}: {len(kernels)} kernels so far", file=sys.stderr)
    lines = [f"  {json.dumps(name)}: {json.dumps(entries)}" for name, entries in kernels.items()]
    arguments.file.write_text(
        f'{{"versions": {json.dumps(versions())},\n "kernels": {{\n' + ",\n".join(lines) + "\n}}\n"
    )
    if arguments.against is None:
        return 0
    before = json.loads(arguments.against.read_text())["kernels"]
    if arguments.op:
        before = {name: entries for name, entries in before.items() if name in kernels}
    lines = differences(before, kernels)
    print("\n".join(lines) or f"the PTX of all {len(kernels)} kernels is the same")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

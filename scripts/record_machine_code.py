"""Records a digest of every Hopper kernel's PTX, and what the tests look for in its machine code.

    python -m scripts.record_machine_code
    python -m scripts.record_machine_code --op mla_decode --record /tmp/before.json

It compiles all kernels of ``tests/pallas_kernels/test_hopper_compile.py`` without a GPU, prints
those that differ from the record, and updates it. A change that only moves code leaves the PTX as
it is. The test does not compile a program again that the record has without a fault. The script
needs JAX's CUDA plugin, ptxas and nvdisasm (the package nvidia-cuda-nvdisasm).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from tests.pallas_kernels.known_programs import RECORD, compilers, known_programs, write
from tests.pallas_kernels.test_hopper_compile import (
    KERNELS,
    OPS,
    XLA_OPTIONS,
    compile_in_child,
    faults_of,
    finishes_loads,
    most_spilled,
    ptxas_version,
    spilled,
)
from tests.support.machine_code import (
    digest,
    listing_of,
    main_loops,
    parse,
    ptx_of,
    unfinished_loads,
)


def record(
    op: str, before: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Returns what was compiled of an operation's kernels, and programs without a fault.

    The former has by kernel, and by entry of its PTX: digest, instructions in all, main loops. A
    loop is ``[instructions, conditional instructions, tensor core instructions]``. Of a kernel
    that must finish its loads before an arrival, the number of those that may be unfinished too.

    Args:
      before: what an older record of the same ptxas has. Equal PTX is not disassembled again.
    """
    with tempfile.TemporaryDirectory() as folder:
        results = compile_in_child(op, Path(folder), {})
    kernels: dict[str, dict[str, Any]] = {}
    programs = {}
    for name, result in results.items():
        if "error" in result:
            raise RuntimeError(f"expected {name} to compile, got {result['error']}")
        kernels[name] = {}
        for entry, ptx in ptx_of(result["report"]).items():
            old = before.get(name, {}).get(entry, {})
            is_whole = "unfinished_loads" in old or not finishes_loads(name)
            is_known = is_whole and old.get("ptx") == digest(ptx)
            kernels[name][entry] = old if is_known else counted(ptx, finishes_loads(name))
        is_finished = not any(entry.get("unfinished_loads") for entry in kernels[name].values())
        if is_finished and not faults_of(result, most_spilled(name)):
            programs[name] = {"program": result["program"], "spilled": spilled(result["report"])}
            if "unsigned" in result:
                programs[name]["unsigned"] = result["unsigned"]
    return kernels, programs


def counted(ptx: str, finishes_loads: bool) -> dict[str, Any]:
    listing = listing_of(ptx)
    code = parse(listing)
    loops = [[loop.instructions, loop.conditional, loop.tensor] for loop in main_loops(code)]
    numbers = {"ptx": digest(ptx), "instructions": len(code), "loops": loops}
    if finishes_loads:
        numbers["unfinished_loads"] = len(unfinished_loads(listing))
    return numbers


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Returns a line for each kernel that was added, removed or changed."""
    lines = [f"removed: {name}" for name in before if name not in after]
    for name, entries in after.items():
        for entry in sorted({*entries, *before.get(name, {})}):
            old, new = before.get(name, {}).get(entry), entries.get(entry)
            if old is None or new is None:
                lines.append(f"{'added' if old is None else 'removed'}: {name}, {entry}")
            elif old["ptx"] != new["ptx"]:
                lines.append(
                    f"{name}, {entry}: instructions {old['instructions']} -> {new['instructions']},"
                    f" loops {old['loops']} -> {new['loops']}"
                )
    return lines


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=Path, default=RECORD, help="file to compare and update")
    parser.add_argument("--op", choices=OPS, action="append", help="only this operation's kernels")
    arguments = parser.parse_args(words)
    old: dict[str, Any] = {"ptxas": ptxas_version(), "kernels": {}}
    if arguments.record.exists():
        old = json.loads(arguments.record.read_text())
    kernels = {
        name: entries
        for name, entries in old["kernels"].items()
        if name in KERNELS and KERNELS[name].op not in (arguments.op or OPS)
    }
    programs = {
        name: program
        for name, program in known_programs(old, XLA_OPTIONS).items()
        if name in kernels
    }
    for op in arguments.op or OPS:
        new = record(op, old["kernels"] if old["ptxas"] == ptxas_version() else {})
        kernels |= new[0]
        programs |= new[1]
    kernels, programs = (
        {name: table[name] for name in KERNELS if name in table} for table in (kernels, programs)
    )
    versions = {"jax": jax.__version__, "ptxas": ptxas_version()}
    tables = {"compilers": compilers(XLA_OPTIONS), "kernels": kernels, "programs": programs}
    write(versions | tables, arguments.record)
    lines = differences(old["kernels"], kernels)
    print("\n".join(lines) or f"the PTX of all {len(kernels)} kernels is the same")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Programs that the installed compilers have compiled before, according to machine_code.json.

A compiler's output depends only on its version, its options and the program. Most of the time of
``test_hopper_compile.py`` is compilation, and most kernels are still as they were recorded. So the
test lowers every kernel, and compiles those that the record does not have: with another program or
of other compilers. ``python -m scripts.record_machine_code`` compiles all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jax

RECORD = Path(__file__).with_name("machine_code.json")
# Attributes of a kernel's custom call with positions in the source: the bytecode of the kernel's
# module, and a digest of that. The module's text is digested instead.
_BYTECODE = re.compile(r'\b(?:kernel_hash|module) = "(?:[^"\\]|\\.)*"')


def known_programs(recorded: dict[str, Any], options: str) -> dict[str, dict[str, Any]]:
    """Returns what a record has of compiled programs, by kernel; nothing if compilers differ."""
    return recorded.get("programs", {}) if recorded.get("compilers") == compilers(options) else {}


def compilers(options: str) -> dict[str, str]:
    """Returns the versions of all that compiles a lowered program, and XLA's options."""
    plugins = [f"jax-cuda{cuda}-{part}" for cuda in (12, 13) for part in ("pjrt", "plugin")]
    versions = installed_versions("jaxlib", *plugins)
    return {**versions, "ptxas": ptxas_version(), "options": options}


def installed_versions(*names: str) -> dict[str, str]:
    """Returns the versions of those packages that are installed."""
    versions = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def ptxas_version() -> str:
    printed = subprocess.run(["ptxas", "--version"], check=True, capture_output=True, text=True)
    release = re.search(r"V([\d.]+)", printed.stdout)
    assert release is not None, printed.stdout
    return release[1]


def program_digest(lowered: jax.stages.Lowered) -> str:
    """Returns a digest of a lowered program and its Mosaic GPU kernels, without source positions.

    Raises:
      ValueError: the program has no Mosaic GPU kernel. Other kernels' code would not be digested.
    """
    module: Any = lowered.compiler_ir()
    operation = module.operation
    kernels = _kernels(operation)
    if not kernels:
        raise ValueError("expected a program with a Mosaic GPU kernel, got none")
    text = _BYTECODE.sub("", operation.get_asm(enable_debug_info=False))
    digest = hashlib.sha256(text.encode())
    for kernel in kernels:
        digest.update(kernel.encode())
    return digest.hexdigest()[:16]


def _kernels(operation: Any) -> list[str]:
    """Returns the text of each kernel's module, in the order of the operations."""
    texts = []
    for region in operation.regions:
        for block in region:
            for each in block:
                attributes = each.operation.attributes
                if "mhlo.backend_config" in attributes:
                    config = attributes["mhlo.backend_config"]
                    texts.append(_text(config["module"].value_bytes))
                texts += _kernels(each.operation)
    return texts


def _text(bytecode: bytes) -> str:
    from jax.experimental.mosaic.gpu import dialect  # pyright: ignore[reportPrivateImportUsage]
    from jaxlib.mlir import ir

    with ir.Context() as context:
        context.allow_unregistered_dialects = True  # that of serialized modules
        dialect.register_dialect(context)
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False))


def write(record: dict[str, Any], path: Path) -> None:
    """Writes a record with one kernel or program in a line."""
    tables = {name: record[name] for name in ("kernels", "programs")}
    head = {name: value for name, value in record.items() if name not in tables}
    parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    for name, table in tables.items():
        rows = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    path.write_text("{" + ", ".join(parts) + "}\n")

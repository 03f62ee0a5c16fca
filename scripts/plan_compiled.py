"""Compares the planner's memory estimates with the compilers', without the TPUs and GPUs.

    python -m scripts.plan_compiled benchmarks/results/plan_compiled.json --part tpu

compiles every program of the part (by default, of both parts), each in its own process, and merges
the compiler's numbers into the file. ``--only WORD`` selects programs whose names contain it. With
``docs/planning.md`` as second argument, it also writes the table that compares all results with the
planner's formula into that page.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any, get_args

from dsv3_jax import presets
from dsv3_jax.files import atomic_write
from dsv3_jax.plan import memory
from dsv3_jax.plan.compiled import Phase, compile_program
from dsv3_jax.plan.deployment import Deployment, EngineSettings
from dsv3_jax.plan.engine_state import default_buckets
from dsv3_jax.plan.target import Target
from dsv3_jax.plan.weights import ShardCache
from sharding import Exchange

BEGIN, END = "<!-- compiled: begin -->", "<!-- compiled: end -->"


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    target: str
    layout: str
    phase: Phase
    batch: int
    context: int
    quantization: str = "bf16"
    layers: int | None = None
    """Number of layers, or None for the whole model."""
    prefill_chunk: int = 512
    activations: str | None = None
    exchange: Exchange = "all_gather"
    serve: bool = False
    """Whether the program is an Engine's step, with a cache of default size. ``decode`` runs
    several steps; ``prefill`` has eight chunks of every shard, and all decodes."""

    @property
    def name(self) -> str:
        layers = "" if self.layers is None else f" {self.layers} layers"
        exchange = "" if self.exchange == "all_gather" else f" {self.exchange}"
        return (
            f"{self.model}{layers} {self.quantization} {self.target} {self.layout}{exchange}"
            f"{' engine' if self.serve else ''} {self.phase} {self.batch}x{self.context}"
        )

    @property
    def deployment(self) -> Deployment:
        config = presets.get(self.model)
        if self.layers is not None:
            config = dataclasses.replace(config, num_hidden_layers=self.layers)
        target = Target.parse(self.target)
        buckets = default_buckets(target, self.layout, self.batch)
        return Deployment(
            config,
            target,
            self.layout,
            self.batch,
            self.context,
            self.quantization,
            self.activations,
            exchange=self.exchange,
            prefill_chunk=self.prefill_chunk,
            engine=EngineSettings(chunks=buckets.chunks[-1], chunk_form=buckets.chunk_form)
            if self.serve
            else None,
        )


def _steps(case: Case) -> tuple[Case, ...]:
    """Both steps of an engine."""
    buckets = default_buckets(Target.parse(case.target), case.layout, case.batch)
    step = dataclasses.replace(case, prefill_chunk=buckets.chunk_tokens, serve=True)
    return tuple(dataclasses.replace(step, phase=phase) for phase in get_args(Phase))


def _both(step: Case, rows: int, chunk: int) -> tuple[Case, Case]:
    prefill = dataclasses.replace(step, phase="prefill", batch=rows, prefill_chunk=chunk)
    return step, prefill


_V3, _V32, _MOON = "deepseek-v3", "deepseek-v3.2", "moonlight-16b"

CASES = (
    *_both(Case(_V3, "tpu:v5p:4x4x8", "tpu_pod", "decode", 1024, 4096, "fp8"), 16, 4096),
    *_both(Case(_V3, "tpu:v6e:16x16", "tpu_pod", "decode", 1024, 4096, "fp8"), 32, 4096),
    Case(
        _V3, "tpu:v6e:16x16", "tpu_pod", "prefill", 32, 4096, "fp8", None, 4096, None, "all_to_all"
    ),
    *_both(Case(_V3, "tpu:tpu7x:4x4x4", "tpu_pod", "decode", 1024, 4096, "fp8"), 16, 4096),
    *_steps(Case(_V3, "tpu:v5p:4x4x8", "tpu_pod", "decode", 1024, 8192, "fp8")),
    Case(_V32, "tpu:v5p:4x4x8", "tpu_pod", "decode", 1024, 8192, "fp8"),
    Case(_V3, "tpu:v5e:16x16", "tpu_pod", "decode", 1024, 4096, "fp8"),
    Case(_V3, "tpu:v5e:16x16", "tpu_pod", "decode", 1024, 4096, "int4"),
    *_both(Case(_MOON, "tpu:v5e:2x2", "dp_attention_ep", "decode", 64, 4096), 4, 1024),
    # By the formula, the largest batch size that fits, and the smallest that does not.
    Case(_MOON, "tpu:v5e:2x2", "dp_attention_ep", "decode", 168, 4096),
    Case(_MOON, "tpu:v5e:2x2", "dp_attention_ep", "decode", 176, 4096),
    *_both(Case(_MOON, "tpu:v6e:2x2", "dp_attention_ep", "decode", 64, 4096), 4, 1024),
    *_both(Case(_MOON, "tpu:tpu7x:2x2x1", "dp_attention_ep", "decode", 64, 4096), 8, 1024),
    *_both(
        Case(_V3, "gpu:h200x8", "dp_attention_ep", "decode", 128, 4096, "fp8", None, 512, "float8"),
        8, 512,
    ),
    *_both(
        Case(
            _V32, "gpu:h200x8", "dp_attention_ep", "decode", 128, 8192, "fp8", None, 512, "float8"
        ),
        8, 512,
    ),
    *_both(
        Case(
            _V3, "gpu:h200x16", "dp_attention_ep", "decode", 256, 4096, "fp8", None, 512, "float8"
        ),
        16, 512,
    ),
    Case(_V3, "gpu:h200x4", "dp_attention_ep", "decode", 64, 4096, "fp8", None, 512, "float8"),
    *_steps(
        Case(_V3, "gpu:h200x8", "dp_attention_ep", "decode", 256, 8192, "fp8", None, 512, "float8")
    ),
    *_both(Case(_MOON, "gpu:h200x1", "single", "decode", 64, 4096), 8, 512),
    *_steps(Case(_MOON, "gpu:h200x1", "single", "decode", 256, 8192)),
    *_both(Case(_MOON, "gpu:h200x4", "dp_attention_ep", "decode", 64, 4096), 8, 512),
)  # fmt: skip


def compiled(case: Case) -> dict[str, Any]:
    """Compiles a case. Returns the compiler's bytes, or its reason to refuse."""
    row: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case), "versions": _versions()}
    try:
        program = compile_program(case.deployment, case.phase)
    except ValueError as refusal:
        return row | {"compiler_bytes": None, "refusal": str(refusal)}
    of_compiler = {
        "compiler_bytes": program.peak,
        "argument_bytes": program.arguments,
        "reused_bytes": program.reused,
    }
    return row | of_compiler | {"kernels": program.kernels, "seconds": round(program.seconds)}


@dataclasses.dataclass(frozen=True)
class Compared:
    """Bytes per device by the formula and by the compiler."""

    case: Case
    formula: int
    compiler: int | None
    """None if the compiler refuses the program."""
    kernels: int
    cache: int
    """Bytes of the cache, which are part of both."""
    reused: int
    """Bytes of the arguments that the results overwrite; 0 in old rows, which do not have it."""

    @classmethod
    def of(cls, row: dict[str, Any], shards: ShardCache) -> Compared:
        names = [each.name for each in dataclasses.fields(Case) if each.name in row]
        case = Case(**{name: row[name] for name in names})
        deployment = case.deployment
        shard = shards.of(deployment)
        use = (memory.decode if case.phase == "decode" else memory.prefill)(shard, deployment)
        kernels = sum(row["kernels"].values()) if row["compiler_bytes"] else 0
        reused = row.get("reused_bytes", 0)
        return cls(case, use.peak, row["compiler_bytes"], kernels, use.cache, reused)

    @property
    def formula_fits(self) -> bool:
        return self.formula <= self.case.deployment.target.chip.memory

    @property
    def compiler_fits(self) -> bool:
        """Whether the program fits. CUDA's compiler never refuses, so its bytes decide."""
        target = self.case.deployment.target
        if self.compiler is None or target.platform == "tpu":
            return self.compiler is not None
        return self.compiler <= target.chip.memory


def _versions() -> dict[str, str]:
    versions = {}
    for name in ("jax", "libtpu", "jax-cuda13-plugin"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def read(results: Path) -> list[dict[str, Any]]:
    """Reads the rows of a result file, in the order of CASES."""
    rows = {row["name"]: row for row in json.loads(results.read_text("utf-8"))["rows"]}
    return [rows[case.name] for case in CASES if case.name in rows]


def compared_rows(results: Path) -> list[Compared]:
    """Compares the rows of a result file with the formula."""
    shards = ShardCache()
    return [Compared.of(row, shards) for row in read(results)]


def table(compared: list[Compared]) -> str:
    """Formats a Markdown table, in GB per device."""
    lines = [
        "| model, devices, layout, program | formula | compiler | formula / compiler | kernels |",
        "|---|---:|---:|---:|---:|",
    ]
    for each in compared:
        formula, compiler = f"{each.formula / 1e9:.2f}", "refuses"
        ratio = "refuses too" if not each.formula_fits else "**fits**"
        if each.compiler is not None:
            compiler, ratio = f"{each.compiler / 1e9:.2f}", f"{each.formula / each.compiler:.3f}"
        formula += "" if each.formula_fits else ", too large"
        if each.compiler is not None and not each.compiler_fits:
            compiler += ", too large"
        kernels = f"{each.kernels:,}" if each.kernels else ""
        lines.append(f"| {each.case.name} | {formula} | {compiler} | {ratio} | {kernels} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path, nargs="?")
    parser.add_argument("--part", choices=("tpu", "gpu"))
    parser.add_argument("--only", default="")
    parsed = parser.parse_args()
    # No accelerator is needed, and none should be allocated.
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows: dict[str, dict[str, Any]] = {}
    if parsed.results.exists():
        rows = {row["name"]: row for row in read(parsed.results)}
    for case in CASES:
        if not case.target.startswith(parsed.part or "") or parsed.only not in case.name:
            continue
        # One process per program, because compilers retain memory of large programs.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            row = rows[case.name] = pool.apply(compiled, (case,))
        print(json.dumps({key: row.get(key) for key in ("name", "compiler_bytes", "seconds")}))
        compiled_rows = [rows[each.name] for each in CASES if each.name in rows]
        result = {"date": f"{datetime.date.today()}", "machine": f"{os.cpu_count()} CPU cores"}
        atomic_write(parsed.results, json.dumps(result | {"rows": compiled_rows}, indent=1) + "\n")
    if parsed.page:
        before, _, rest = parsed.page.read_text("utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        compared = table(compared_rows(parsed.results))
        atomic_write(parsed.page, f"{before}{BEGIN}\n{compared}\n{END}{after}")


if __name__ == "__main__":
    main()

"""Compares checkpoint conversion with ``cp -r``, on 14.3 GB of true DeepSeek-V3 tensor shapes.

    python scripts/bench_convert.py --work /var/tmp/bench_convert

The checkpoint has one dense layer, one layer of 64 experts and the MTP layer, in shards of 3.6 GB,
with every scale in another shard than its weight. Its values are random but plausible: float8 of
normally distributed weights, positive scales, and an MTP layer whose embedding and head are copies.
``cp -r`` and ``dsv3 convert`` run as alternating processes. Before each, the disk is synced and the
source is read, so that it is in the page cache as far as it fits. Results are medians. A ratio is
the time of ``cp -r`` divided by that of the conversion: 1 is as fast as copying. Times are taken
both when the process exits and when a subsequent ``sync`` has returned.

Then the float8 store is exported and compared byte by byte with the source, and a dry run converts
the whole DeepSeek-V3, as 163 sparse files with true headers.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from dsv3_jax.files import atomic_write

TARGETS = ("fp8", "bf16", "int8", "int4")
DSV3 = (
    *(sys.executable, "-c"),
    "import sys; from dsv3_jax.cli.main import main; sys.exit(main(sys.argv[1:]))",
)
POOL_ELEMENTS = 2**24  # random values, generated once and reused
SMALL = {"vocab_size": 1280, "hidden_size": 512, "n_routed_experts": 16, "n_group": 4}


class Measured(NamedTuple):
    """Measurements of one process."""

    seconds: float
    synced_seconds: float
    """Seconds until a ``sync`` after the process has returned."""
    peak_bytes: int
    """Peak resident memory."""
    output: str


# ---- the checkpoint ------------------------------------------------------------------------------


def published(*, small: bool, whole: bool) -> Any:
    """Returns the configuration of the checkpoint, or of DeepSeek-V3 itself if ``whole``."""
    from dsv3_jax.presets import DEEPSEEK_V3

    if whole:
        return DEEPSEEK_V3
    few = dataclasses.replace(
        DEEPSEEK_V3, num_hidden_layers=2, first_k_dense_replace=1, n_routed_experts=64
    )
    return dataclasses.replace(few, **SMALL) if small else few


def write_source(directory: Path, config: Any, shards: int, *, holes: bool) -> None:
    """Writes config.json, index and shards. With ``holes``, the files are sparse without values."""
    from dsv3_jax.checkpoint.tensor_table import copies

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    pools = None if holes else draw_pools()
    repeated = copies(config)
    weight_map: dict[str, str] = {}
    for number, content in enumerate(layout(config, shards), 1):
        name = f"model-{number:05d}-of-{shards:05d}.safetensors"
        weight_map |= dict.fromkeys(content, name)
        with (directory / name).open("wb") as file:
            size = write_header(file, content)
            if pools is None:
                file.truncate(size)
                continue
            for tensor, spec in content.items():
                write_values(file, pools[spec.dtype], repeated.get(tensor, tensor), spec)
            assert file.tell() == size
    total = sum(spec.nbytes for content in layout(config, shards) for spec in content.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def layout(config: Any, shards: int) -> list[dict[str, Any]]:
    """Returns the tensors of each shard. Scales are one shard after their weights."""
    from dsv3_jax.checkpoint.tensor_table import tensor_table

    table = tensor_table(config)
    total, before = sum(spec.nbytes for spec in table.values()), 0
    files: list[dict[str, Any]] = [{} for _ in range(shards)]
    for name, spec in table.items():
        is_scale = name.endswith("_scale_inv")
        files[(before * shards // total + is_scale) % shards][name] = spec
        before += spec.nbytes
    return files


def write_header(file: BinaryIO, content: Mapping[str, Any]) -> int:
    """Writes length and header of a safetensors file. Returns the size of the complete file."""
    header, end = {}, 0
    for name, spec in content.items():
        begin, end = end, end + spec.nbytes
        header[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    file.write(len(text).to_bytes(8, "little") + text)
    return 8 + len(text) + end


def draw_pools() -> dict[str, bytes]:
    """Returns random bytes by dtype: weights up to 448, scales about 1e-4, others about 0.02."""
    import ml_dtypes
    import numpy as np

    normal = np.random.default_rng(0).standard_normal(POOL_ELEMENTS, np.float32)
    return {
        "F8_E4M3": np.clip(normal * 100, -448, 448).astype(ml_dtypes.float8_e4m3fn).tobytes(),
        "BF16": (normal * 0.02).astype(ml_dtypes.bfloat16).tobytes(),
        "F32": (1e-4 * np.exp(0.3 * normal[: 2**20])).tobytes(),
    }


def write_values(file: BinaryIO, pool: bytes, name: str, spec: Any) -> None:
    """Writes values from the pool, from an offset that depends only on the name."""
    itemsize = spec.nbytes // spec.size
    offset = zlib.crc32(name.encode()) % (len(pool) // itemsize) * itemsize
    remaining = spec.nbytes
    while remaining:
        piece = memoryview(pool)[offset : offset + remaining]
        file.write(piece)
        remaining, offset = remaining - len(piece), 0


# ---- measuring -----------------------------------------------------------------------------------


def measured(*command: object) -> Measured:
    """Runs a command after syncing the disk, and measures it.

    Raises:
      RuntimeError: the command failed. The message has its output.
    """
    os.sync()
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output_file:
        process = subprocess.Popen(
            [str(c) for c in command], stdout=output_file, stderr=output_file
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        os.sync()
        synced = time.perf_counter() - began
        output_file.seek(0)
        output = output_file.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{command[-4:]} ended with {process.returncode}: {output[-2000:]}")
    return Measured(seconds, synced, usage.ru_maxrss * 1024, output)


def warm(directory: Path) -> None:
    """Reads every file, so that the page cache contains as much of them as fits."""
    for path in sorted(directory.iterdir()):
        with path.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def run_in_child(function: str, *arguments: object) -> None:
    """Runs a function of this script in a child process, so that this process stays small.

    The peak memory of a forking process is counted to its children too.
    """
    subprocess.run([sys.executable, __file__, function, *map(str, arguments)], check=True)


def compare(source: Path, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs copies and conversions in turn. Returns their rows, and keeps the last float8 store."""
    runs: dict[str, list[Measured]] = {}
    float8_store = arguments.work / "store"
    for repeat in range(arguments.repeats):
        for what in ("cp -r", *arguments.to):
            out = arguments.work / "out"
            if what == "cp -r":
                command = ("cp", "-r", source, out)
            else:
                options = ("--workers", arguments.workers) if arguments.workers else ()
                command = (*DSV3, "convert", source, out, "--to", what, *options)
            warm(source)
            runs.setdefault(what, []).append(measured(*command))
            print(f"{repeat + 1}. {what}: {runs[what][-1].seconds:.1f} s", flush=True)
            size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
            runs[what][-1] = runs[what][-1]._replace(output=str(size))
            if what == "fp8" and repeat == arguments.repeats - 1:
                out.rename(float8_store)
            else:
                shutil.rmtree(out)
    copied = statistics.median(run.seconds for run in runs["cp -r"])
    copied_synced = statistics.median(run.synced_seconds for run in runs["cp -r"])
    read = sum(path.stat().st_size for path in source.iterdir())
    rows = []
    for what, all_runs in runs.items():
        seconds = statistics.median(run.seconds for run in all_runs)
        synced = statistics.median(run.synced_seconds for run in all_runs)
        rows.append(
            {
                "what": what,
                "seconds": round(seconds, 2),
                "all_seconds": [round(run.seconds, 2) for run in all_runs],
                "with_sync": round(synced, 2),
                "all_with_sync": [round(run.synced_seconds, 2) for run in all_runs],
                "source_gb_per_s": round(read / seconds / 1e9, 3),
                "ratio_to_cp": round(copied / seconds, 2),
                "ratio_to_cp_with_sync": round(copied_synced / synced, 2),
                "bytes_written": int(all_runs[-1].output),
                "peak_bytes": max(run.peak_bytes for run in all_runs),
            }
        )
    return rows


def plan_whole(work: Path) -> dict[str, Any]:
    """Measures a dry run of the whole DeepSeek-V3."""
    source = work / "whole"
    run_in_child("write", source, "--whole", "--shards", 163)
    allocated = sum(path.stat().st_blocks * 512 for path in source.iterdir())
    rows = {}
    for to in TARGETS:
        # Too little disk space is an error (status 2), but is reported only after the plan.
        command = (*DSV3, "convert", source, work / "out", "--to", to, "--dry-run")
        try:
            run = measured("sh", "-c", '"$@" || test $? = 2', "sh", *command)
        finally:
            assert not (work / "out").exists()
        rows[to] = {
            "seconds": round(run.seconds, 2),
            "peak_bytes": run.peak_bytes,
            "said": run.output.replace(str(work), "WORK").splitlines(),
        }
    shutil.rmtree(source)
    return {"bytes_on_disk": allocated, "targets": rows}


def export(source: Path, store: Path, work: Path) -> dict[str, Any]:
    """Exports the float8 store, and compares the files with the source."""
    out = work / "exported"
    run = measured(*DSV3, "export", store, out)
    names = {path.name for path in source.iterdir()}
    same = {path.name for path in out.iterdir()} == names and all(
        same_bytes(source / name, out / name) for name in sorted(names)
    )
    shutil.rmtree(out)
    return {
        "seconds": round(run.seconds, 2),
        "with_sync": round(run.synced_seconds, 2),
        "peak_bytes": run.peak_bytes,
        "same_files_and_bytes": same,
    }


def same_bytes(a: Path, b: Path) -> bool:
    with a.open("rb", buffering=0) as one, b.open("rb", buffering=0) as other:
        while True:
            remaining, right = one.read(2**24), other.read(2**24)
            if remaining != right:
                return False
            if not remaining:
                return True


# ---- the command ---------------------------------------------------------------------------------


def bench(arguments: argparse.Namespace) -> None:
    arguments.work.mkdir(parents=True)
    source = arguments.work / "source"
    small = ("--small",) if arguments.small else ()
    began = time.perf_counter()
    run_in_child("write", source, "--shards", 4, *small)
    size = sum(path.stat().st_size for path in source.iterdir())
    print(f"{size:,} bytes written in {time.perf_counter() - began:.0f} s", flush=True)
    packages = ("numpy", "ml_dtypes", "tensorstore", "orbax-checkpoint", "jax", "xxhash")
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "system": platform.platform(),
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
        "source": {
            "bytes": size,
            "shards": 4,
            "true_shapes": not arguments.small,
        },
        "workers": arguments.workers or "default",
        "repeats": arguments.repeats,
    }
    if "convert" not in arguments.skip:
        result["rows"] = compare(source, arguments)
        print_rows(result["rows"])
    store = arguments.work / "store"
    if "export" not in arguments.skip and store.is_dir():
        result["export"] = export(source, store, arguments.work)
        print(f"export: {result['export']}", flush=True)
    if not arguments.keep:
        shutil.rmtree(source)
        shutil.rmtree(store, ignore_errors=True)
    if "dry-run" not in arguments.skip:
        result["dry_run_of_deepseek_v3"] = plan_whole(arguments.work)
        for to, row in result["dry_run_of_deepseek_v3"]["targets"].items():
            print(
                f"dry run of DeepSeek-V3 to {to}: {row['seconds']} s, {row['peak_bytes']:,} bytes"
            )
    if not arguments.keep:
        shutil.rmtree(arguments.work)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")


def cpu_name() -> str:
    """Returns the CPU's model name as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'':6} {'s':>8} {'with sync':>10} {'GB/s':>6} {'of cp':>6} {'synced':>7} {'peak MB':>8}"
    )
    for row in rows:
        print(
            f"{row['what']:6} {row['seconds']:8.2f} {row['with_sync']:10.2f} "
            f"{row['source_gb_per_s']:6.2f} {row['ratio_to_cp']:6.2f} "
            f"{row['ratio_to_cp_with_sync']:7.2f} {math.ceil(row['peak_bytes'] / 1e6):8}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare dsv3 convert with cp -r.")
    if sys.argv[1:2] == ["write"]:  # called by run_in_child
        parser.add_argument("write")
        parser.add_argument("directory", type=Path)
        parser.add_argument("--shards", type=int, required=True)
        parser.add_argument("--small", action="store_true")
        parser.add_argument("--whole", action="store_true")
        given = parser.parse_args()
        config = published(small=given.small, whole=given.whole)
        write_source(given.directory, config, given.shards, holes=given.whole)
        return
    add = parser.add_argument
    add("--work", type=Path, required=True, help="a new directory, on a disk with 50 GB free")
    add("--out", type=Path, default=Path("benchmarks/results/convert_cpu.json"))
    add("--to", nargs="+", choices=TARGETS, default=list(TARGETS))
    add("--repeats", type=int, default=3)
    add("--workers", type=int, help="workers of dsv3 convert (default: the command's own)")
    add("--skip", nargs="+", choices=("convert", "export", "dry-run"), default=[])
    add("--small", action="store_true", help="use small tensors, to try the script")
    add("--keep", action="store_true", help="keep the source and the store")
    bench(parser.parse_args())


if __name__ == "__main__":
    main()

"""The Hopper kernels beside the best of others, on one H100 or H200.

    python -m scripts.bench_kernels --peers PEERS [--ops mla_decode ...] [--shapes "h128 b64" ...]
        [--time-budget 560] [--repeats 1000] [--out benchmarks/results/kernels_h200.json]

Each op is checked before it is timed, through the functions of pallas_kernels: on ragged inputs
whose unused slots hold NaN, against float32 at full precision, ``--repeats`` runs equal bit by bit;
and on samples of every timed shape. One that is wrong is not timed. Then every shape: ours, XLA's
own lowering, and the peers out of the directory PEERS (``python -m benchmarks.kernels.pack_peers``
makes it) and of torch, each checked too, beside the ceilings of the same run. Times are medians
over rotated random inputs, larger than the L2 cache where that takes no more than 32 sets.

JAX and torch run in two processes that take turns. ``ratio`` is the best peer's time by ours: above
1 ours is faster. ``roof_fraction`` is the least time that the run's ceilings allow by ours. What
the time budget left undone is named in the result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.kernels import pack_peers, report
from benchmarks.kernels.shapes import (
    CALLS,
    OPS,
    Case,
    Grouped,
    cases,
    check_key,
    encoded,
    key,
    select,
)
from benchmarks.kernels.workers import Worker

BATCH = 8  # cases that compile at once, while the peers are timed
ROW_S = 60  # seconds for a case, after which its process is ended
CHECK_S = 180
WARM_WORKERS = 8
RIGHT = "right"


class Bench:
    """Runs cases, and keeps what was found so far in ``result``."""

    def __init__(self, arguments: argparse.Namespace):
        self._arguments = arguments
        self._began = time.monotonic()
        logs = Path(tempfile.mkdtemp(prefix="bench_kernels_"))
        self._log = str(logs / "log.txt")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        name = arguments.implementation
        self._ours = Worker(
            "benchmarks.kernels.ours", [name, str(arguments.calls)], str(logs / "ours.txt")
        )
        self._peers: Worker | None = None
        if arguments.peers is not None:
            unpacked = Path(tempfile.gettempdir()) / "dsv3_kernel_peers"
            pack_peers.unpack(arguments.peers, unpacked)
            self._peer_command = ("benchmarks.kernels.peers", [str(unpacked)])
            self._peers = Worker(*self._peer_command, str(logs / "peers.txt"))
        print("logs in", logs, flush=True)
        self.result: dict[str, Any] = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{os.cpu_count()} CPU cores, {platform.machine()}",
            "versions": {"python": platform.python_version()} | _tools(),
            "repeats": arguments.repeats,
            "checks": {},
            "ceilings": {},
            "rows": [],
            "not_run": [],
        }
        self._measured: dict[str, Any] = {}
        self._raw: list[tuple[Case, dict[str, Any], dict[str, Any]]] = []

    def left(self) -> float:
        return self._arguments.time_budget - (time.monotonic() - self._began)

    def run(self, chosen: Sequence[Case]) -> None:
        started = self._ours.ask({"do": "start"}, 120)
        self._note("ours", started)
        self._compile(chosen[:BATCH])
        if self._peers:
            self._note("peers", self._peers.ask({"do": "start"}, 120))
            self._warm(chosen)
        for worker in filter(None, (self._peers, self._ours)):
            self._measured |= worker.ask({"do": "ceilings"}, 120)
        self.save()
        for first in range(0, len(chosen), BATCH):
            batch = chosen[first : first + BATCH]
            if first:
                self._compile(batch)
            found = [self._of_peers(case) for case in batch]
            for case, peers in zip(batch, found, strict=True):
                if self.left() < 0:
                    self.result["not_run"].append(key(case))
                    continue
                ours = self._of_ours(case, not any("us" in each for each in peers.values()))
                self._raw.append((case, ours, peers))
                line = report.row(case, ours, peers, report.ceilings(self._measured))
                print(report.table([line]).splitlines()[1], f"{self.left():.0f} s", flush=True)
            self.save()

        for case, ours, _ in self._raw:
            if "xla" not in ours and self.left() > 0:
                ours |= self._ask_ours(case, False, True)
        self.save()

    def _note(self, who: str, started: dict[str, Any]) -> None:
        self.result["versions"] |= started.get("versions", {})
        if "gpu" in started:
            self.result["gpu"] = started["gpu"]
        if "error" in started:
            self.result.setdefault("errors", {})[who] = started["error"]

    def _warm(self, chosen: Sequence[Case]) -> None:
        """DeepGEMM compiles for each shape, ten seconds at a time: in several processes at once."""
        compiled = [
            encoded(c) for c in chosen if isinstance(c, Grouped) and c.dtype in ("bf16", "fp8")
        ]
        count = min(WARM_WORKERS, len(compiled))
        workers = [Worker(*self._peer_command, self._log) for _ in range(count)]
        for i, worker in enumerate(workers):
            worker.send({"do": "warm", "cases": compiled[i::count]})
        until = time.monotonic() + min(240, self._arguments.time_budget / 3)
        for worker in workers:
            worker.receive(until - time.monotonic())
            worker.stop()

    def _compile(self, batch: Sequence[Case]) -> None:
        """Nobody waits for the reply: it goes on while the peers are timed."""
        self._ours.send({"do": "compile", "cases": [encoded(case) for case in batch]})

    def _of_peers(self, case: Case) -> dict[str, Any]:
        if self._peers is None or self.left() < 0:
            return {}
        reply = self._peers.ask({"do": "run", "case": encoded(case)}, self._patience(ROW_S))
        return reply.get("peers", {"torch": reply})

    def _patience(self, seconds: float) -> float:
        return min(seconds, max(10.0, self.left() + 20))

    def _of_ours(self, case: Case, xla: bool) -> dict[str, Any]:
        """XLA's lowering at once where there is no other peer, else when all else is done."""
        repeats, checked = self._arguments.repeats, check_key(case)
        checks = self.result["checks"]
        if checked not in checks:
            request = {"do": "check", "case": encoded(case), "repeats": repeats}
            reply = self._ours.ask(request, self._patience(CHECK_S))
            checks[checked] = reply.get("wrong") or reply.get("error") or RIGHT
        right = checks[checked] == RIGHT
        if not right:
            found = self._ask_ours(case, False, xla) if xla else {}
            return found | {"error": checks[checked]}
        return self._ask_ours(case, True, xla)

    def _ask_ours(self, case: Case, ours: bool, xla: bool) -> dict[str, Any]:
        request = {"do": "run", "case": encoded(case), "ours": ours, "xla": xla}
        found = self._ours.ask(request, self._patience(ROW_S))
        if not ours and "error" in found:
            return {"xla": {"error": found["error"]}}
        return found

    def save(self) -> None:
        best = report.ceilings(self._measured)
        self.result["ceilings"] = {
            name: round(value, 1) if isinstance(value, float) else value
            for name, value in (self._measured | {f"best_{k}": v for k, v in best.items()}).items()
        }
        self.result["rows"] = [report.row(*each, best) for each in self._raw]
        out = self._arguments.out or Path(
            f"benchmarks/results/kernels_{_short_name(self.result.get('gpu', 'none'))}.json"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(self.result, indent=1) + "\n")

    def stop(self) -> None:
        for worker in filter(None, (self._peers, self._ours)):
            worker.stop()


def _short_name(gpu: str) -> str:
    """h200 of "NVIDIA H200"."""
    found = re.search(r"[A-Za-z]+\d+", gpu)
    return found[0].lower() if found else "none"


def _tools() -> dict[str, str]:
    """The driver's version and ptxas', where they can be asked."""
    versions = {}
    for name, command, pattern in (
        ("driver", ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"\S+"),
        ("ptxas", ["ptxas", "--version"], r"release (\S+),"),
    ):
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
        except (OSError, subprocess.TimeoutExpired):
            continue
        if found := re.search(pattern, said):
            versions[name] = found[found.re.groups]
    return versions


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hopper kernels beside their peers.")
    parser.add_argument("--ops", nargs="*", default=[], choices=OPS)
    parser.add_argument("--shapes", nargs="*", default=[], help="parts of 'op dtype shape'")
    parser.add_argument("--all", action="store_true", help="every shape, not the core alone")
    parser.add_argument("--peers", type=Path, help="directory of the packed peers; none without")
    parser.add_argument("--time-budget", type=float, default=3600, help="seconds in all")
    parser.add_argument("--repeats", type=int, default=20, help="equal runs of a check")
    parser.add_argument("--implementation", default="mosaic_gpu")
    parser.add_argument("--calls", type=int, default=CALLS, help="of our programs, at most")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(words)


def main() -> None:
    arguments = parse(sys.argv[1:])
    chosen = select(cases(), arguments.ops, arguments.shapes, everything=arguments.all)
    bench = Bench(arguments)
    print(len(chosen), "shapes", flush=True)
    try:
        bench.run(chosen)
    finally:
        bench.stop()
        bench.save()
    result = bench.result
    print("\n" + json.dumps({k: result[k] for k in ("versions", "ceilings")}))
    for name, verdict in result["checks"].items():
        print(f"{name}: {verdict}")
    print(report.table(result["rows"]))
    if result["not_run"]:
        print("not run, for want of time:", ", ".join(result["not_run"]))


if __name__ == "__main__":
    main()

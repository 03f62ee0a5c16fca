"""The Hopper kernels beside the best of others, on one H100 or H200.

    python -m scripts.bench_kernels --peers PEERS [--ops mla_decode ...] [--shapes "h128 b64" ...]
        [--time-budget 560] [--repeats 1000] [--out benchmarks/results/kernels_h200.json]

Each op is checked before it is timed, through the functions of pallas_kernels: on ragged inputs
whose unused slots hold NaN, against float32 at full precision, ``--repeats`` runs equal bit by bit;
and on samples of every timed shape. One that is wrong is not timed. Then every shape: ours, XLA's
own lowering, and the peers out of the directory PEERS (``python -m benchmarks.kernels.pack_peers``
makes it) and of torch, each checked too, beside the ceilings of the same run. Inputs are random and
rotated, larger than the L2 cache where that takes no more than 32 sets.

JAX and torch run in two processes that take turns, two a shape, each on a GPU that was busy with
the same work just before; a time is the median of the windows of both turns. Nothing compiles and
no other shape is prepared meanwhile. ``ratio`` is the best peer's time by ours: above 1 ours is
faster. ``roof_fraction`` is the least time that the run's ceilings allow by ours; a row beyond them
has no time. ``kernels_a_call`` counts what one call launches: ours, and what XLA puts beside it.
What the time budget left undone is named in the result.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
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
    WARM_S,
    Case,
    Decode,
    Grouped,
    cases,
    check_key,
    encoded,
    key,
    select,
)
from benchmarks.kernels.workers import Worker

BATCH = 32  # cases that compile at once, before the first of them is timed
TURNS = "peers", "ours", "ours", "peers"  # what the chip loses by warming is lost by both
CLOSE = 1.3  # peers slower than the best by this have one turn
FIRST_WARM_S = 1.0  # of a process that has not timed anything yet
COMPILE_S = 180
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
        self._warmed: set[str] = set()
        self._raw: list[tuple[Case, dict[str, Any], dict[str, Any]]] = []

    def left(self) -> float:
        return self._arguments.time_budget - (time.monotonic() - self._began)

    def run(self, chosen: Sequence[Case]) -> None:
        for worker in self._workers():
            worker.send({"do": "start"})
        for who, worker in zip(("ours", "peers"), self._workers(), strict=False):
            self._note(who, worker.receive(120))
        self.save()
        for first in range(0, len(chosen), BATCH):
            self._batch(chosen[first : first + BATCH], chosen if first == 0 else ())
        self._time_xla([raw for raw in self._raw if "xla" not in raw[1]])

    def _workers(self) -> list[Worker]:
        return [self._ours] + ([self._peers] if self._peers else [])

    def _batch(self, batch: Sequence[Case], to_warm: Sequence[Case]) -> None:
        if self.left() < 0:
            self.result["not_run"] += map(key, batch)
            self.save()
            return
        began = time.monotonic()
        parts = [["check", "ours"] + ["xla"] * (not self._has_peers(case)) for case in batch]
        self._ours.send(_compilation(batch, parts))
        if to_warm:
            self._warm(to_warm)
        self._ours.receive(COMPILE_S)
        print(f"compiled {len(batch)} shapes in {time.monotonic() - began:.0f} s", flush=True)
        if to_warm:
            for worker in self._workers():
                self._measured |= worker.ask({"do": "ceilings"}, 120)
        self.save()
        for case in batch:
            if self.left() < 0:
                self.result["not_run"].append(key(case))
                continue
            began = time.monotonic()
            ours, peers = self._case(case)
            ours["seconds"] = round(time.monotonic() - began, 1)
            self._raw.append((case, ours, peers))
            line = report.row(case, ours, peers, report.ceilings(self._measured))
            print(report.table([line]).splitlines()[1], f"{self.left():.0f} s", flush=True)
        self._ours.ask({"do": "drop", "cases": [encoded(case) for case in batch]}, ROW_S)
        self.save()

    def _time_xla(self, rows: Sequence[tuple[Case, dict[str, Any], dict[str, Any]]]) -> None:
        """Of the cases that another peer was timed beside: when all else is done."""
        for first in range(0, len(rows), BATCH // 2):
            batch = rows[first : first + BATCH // 2]
            if self.left() > 0:
                cases = [case for case, _, _ in batch]
                self._ours.ask(
                    _compilation(cases, [["xla"]] * len(cases)), self._patience(COMPILE_S)
                )
            for case, ours, _ in batch:
                if self.left() > 0:
                    ours["xla"] = self._xla(case)
            self.save()

    def _note(self, who: str, started: dict[str, Any]) -> None:
        self.result["versions"] |= started.get("versions", {})
        if "gpu" in started:
            self.result["gpu"] = started["gpu"]
        if "error" in started:
            self.result.setdefault("errors", {})[who] = started["error"]

    def _warm(self, chosen: Sequence[Case]) -> None:
        """While ours compile: DeepGEMM takes ten seconds a shape, so in several processes."""
        compiled = [
            encoded(c) for c in chosen if isinstance(c, Grouped) and c.dtype in ("bf16", "fp8")
        ]
        count = min(WARM_WORKERS, len(compiled)) if self._peers else 0
        workers = [Worker(*self._peer_command, self._log) for _ in range(count)]
        for i, worker in enumerate(workers):
            worker.send({"do": "warm", "cases": compiled[i::count]})
        until = time.monotonic() + min(240, self._arguments.time_budget / 3)
        for worker in workers:
            worker.receive(until - time.monotonic())
            worker.stop()

    def _has_peers(self, case: Case) -> bool:
        """Whether anything but XLA's own lowering may be timed beside ours."""
        with_peers = ("bf16",) if isinstance(case, Decode) else ("bf16", "fp8")
        return self._peers is not None and case.dtype in with_peers

    def _patience(self, seconds: float) -> float:
        return min(seconds, max(10.0, self.left() + 20))

    def _case(self, case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
        """What :func:`report.row` takes: ours, and the peers'."""
        request = {"do": "prepare", "case": encoded(case)}
        if self._peers:
            self._peers.send(request)
        fault = self._check(case)
        ours: dict[str, Any] = {"error": fault}
        if not fault:
            ours = self._ours.ask(request, self._patience(ROW_S))
        peers: dict[str, Any] = {}
        if self._peers:
            reply = self._peers.receive(self._patience(ROW_S))
            peers = reply.get("peers", {"torch": reply})
        self._time(ours, peers)
        for worker in self._workers():
            worker.ask({"do": "release"}, ROW_S)
        if not any("us" in each for each in peers.values()):
            ours["xla"] = self._xla(case)
        return ours, peers

    def _check(self, case: Case) -> str | None:
        """What is wrong on ragged inputs; cases that share the check share the answer."""
        checks, name = self.result["checks"], check_key(case)
        if name not in checks:
            request = {"do": "check", "case": encoded(case), "repeats": self._arguments.repeats}
            reply = self._ours.ask(request, self._patience(CHECK_S))
            checks[name] = reply.get("wrong") or reply.get("error") or RIGHT
        return None if checks[name] == RIGHT else checks[name]

    def _time(self, ours: dict[str, Any], peers: dict[str, Any]) -> None:
        """Adds "us" to those that were prepared."""
        of_peers = {name: [] for name, each in peers.items() if "error" not in each}
        of_ours: list[float] = []
        for who in TURNS:
            if who == "ours" and "error" not in ours:
                request = {"do": "time", "warm_s": self._warm_s(who)}
                reply = self._ours.ask(request, self._patience(ROW_S))
                of_ours += reply.get("us", [])
                if "error" in reply:
                    ours["error"] = reply["error"]
            elif who == "peers" and self._peers and (names := _close(of_peers)):
                request = {"do": "time", "names": names, "warm_s": self._warm_s(who)}
                reply = self._peers.ask(request, self._patience(ROW_S))
                if "error" in reply:
                    peers |= {name: {"error": reply["error"]} for name in of_peers}
                    of_peers = {}
                for name, windows in reply.get("us", {}).items():
                    of_peers[name] += windows
        for name, windows in of_peers.items():
            peers[name] = {"us": statistics.median(windows)}
        if of_ours and "error" not in ours:
            ours["us"] = statistics.median(of_ours)
            ours["spread"] = round((max(of_ours) - min(of_ours)) / ours["us"], 4)

    def _warm_s(self, who: str) -> float:
        """Seconds of work before the first window of a turn."""
        seconds = WARM_S if who in self._warmed else FIRST_WARM_S
        self._warmed.add(who)
        return seconds

    def _xla(self, case: Case) -> dict[str, Any]:
        reply = self._ours.ask({"do": "xla", "case": encoded(case)}, self._patience(ROW_S))
        return {"us": statistics.median(reply["us"])} if "us" in reply else reply

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
        for worker in self._workers():
            worker.stop()


def _compilation(batch: Sequence[Case], parts: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {"do": "compile", "cases": [encoded(case) for case in batch], "parts": parts}


def _close(windows: dict[str, list[float]]) -> list[str]:
    """The fastest, and those that may be it; all that were not timed yet."""
    medians = {name: statistics.median(each) if each else 0.0 for name, each in windows.items()}
    return [name for name, us in medians.items() if us <= CLOSE * min(medians.values())]


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

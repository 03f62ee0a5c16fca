"""Compares the simulator with measured replays of the engine.

    python -m scripts.simulate_measured docs/planning.md \\
        --out benchmarks/results/simulated_replays.json

simulates every replay of two result files of ``scripts/bench_engine.py``, and writes the table
between its two marks in the file. The parameters of each machine come from one replay,
:data:`CALIBRATION`, which is therefore no evidence; the others are.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dsv3_jax.files import atomic_write
from dsv3_jax.simulator.measured_run import MeasuredRun, MeasuredTimes, label, programs_of
from dsv3_jax.simulator.replica import HostCosts
from dsv3_jax.simulator.report import summary
from dsv3_jax.simulator.step_times import StepTimes, measured
from dsv3_jax.simulator.workload import SubmitCosts
from scripts.marked_text import replace_between

CALIBRATION = ("chat", 24.0)
"""Trace and rate of the replay that gives the parameters."""

MORE = ("chat", None)
"""The replay that gives the host's time together with :data:`CALIBRATION`, and the ratios of
programs that do not run there."""

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
RUNS = {
    "H200": "engine_moonlight_h200.json",
    "H100": "engine_moonlight_h100.json",
    "H100, steps planned late": "engine_moonlight_h100_late_planning.json",
    "H200, steps planned late": "engine_moonlight_512_h200.json",
}
"""Result files. The third one does not say that its engine planned steps late."""

SUBMISSIONS = {
    "H200": "4794243",
    "H100": "03dc8c4",
    "H100, steps planned late": "dde8d4d",
    "H200, steps planned late": "dde8d4d",
}
"""The commit of each run's engine in ``submission_time.json``: how long the client, in the process
of the engine, was busy with its submissions. The first one checked the ids of prompts one by one.
The last two are of different engines, which submit in the same way. Those times are of another
machine's CPU."""

KERNELS = ("decode_moonlight_h200_2.json", "prefill_moonlight_h200.json")
"""Decode and prefill of the Generator on an H200, from which the shares of its peak rates come."""

METRICS = {
    "output_tokens_per_second": lambda figures: figures["output_tokens_per_second"],
    "ttft_p50_ms": lambda figures: figures["ttft_ms"]["p50"],
    "tpot_p50_ms": lambda figures: figures["tpot_ms"]["p50"],
}


def read(name: str) -> MeasuredRun:
    """Returns one of :data:`RUNS`."""
    return MeasuredRun.read(
        RESULTS / RUNS[name], plans_late=name.endswith("late"), submit=submit_costs(name)
    )


def submit_costs(name: str) -> SubmitCosts:
    """Returns the time of a submission in one of :data:`RUNS`: the line through two traces."""
    measured = json.loads((RESULTS / "submission_time.json").read_text("utf-8"))
    traces = measured["commits"][SUBMISSIONS[name]].values()
    sizes = [[each["requests"], each["prompt_tokens"]] for each in traces]
    request, token = np.linalg.solve(sizes, [each["seconds"] for each in traces]).tolist()
    return SubmitCosts(request, token)


def compare(machine_name: str, run: MeasuredRun) -> list[dict[str, Any]]:
    """Returns a row for each replay: measured and simulated figures, and their ratios."""
    givers = [run.find(*CALIBRATION), run.find(*MORE)]
    host = run.host_costs(*givers)
    times = calibrated(run, host)
    rows = []
    for replay in run.replays:
        rows.append(_row(machine_name, run, replay, times, host))
        rows[-1]["gives_parameters"] = any(replay is giver for giver in givers)
    return rows


def calibrated(run: MeasuredRun, host: HostCosts) -> MeasuredTimes:
    """Returns step times whose ratios come from :data:`CALIBRATION`, as far as it has them."""
    times = run.calibrated(run.find(*CALIBRATION), host)
    if all(programs_of(replay).keys() <= times.ratios.keys() for replay in run.replays):
        return times
    more = run.calibrated(run.find(*MORE), host).ratios
    return MeasuredTimes(run.model, run.buckets, more | times.ratios)


def compare_model(machine_name: str, run: MeasuredRun) -> list[dict[str, Any]]:
    """Returns a row for each replay, with step times of the planner's model alone. They know
    neither the sizes that programs are compiled for nor anything else of the engine."""
    decode, prefill = (json.loads((RESULTS / name).read_text("utf-8"))["rows"] for name in KERNELS)
    times = run.model.reaching(measured(run.model, decode, prefill))
    return [_row(machine_name, run, replay, times, HostCosts()) for replay in run.replays]


def _row(
    machine_name: str,
    run: MeasuredRun,
    replay: Mapping[str, Any],
    times: StepTimes,
    host: HostCosts,
) -> dict[str, Any]:
    if isinstance(times, MeasuredTimes):
        times.counts.clear()
    began = time.process_time()
    simulated = summary(run.simulate(replay, times, host))
    row: dict[str, Any] = {
        "machine": machine_name,
        "replay": label(replay),
        "requests": replay["requests"],
        "cpu_seconds": round(time.process_time() - began, 2),
    }
    if isinstance(times, MeasuredTimes):
        row["steps"] = {
            name: [program.count, times.counts[name]]
            for name, program in programs_of(replay).items()
        }
    for name, of in METRICS.items():
        measured = of(replay)
        row[name] = {
            "measured": measured,
            "simulated": of(simulated),
            "ratio": round(of(simulated) / measured, 4),
        }
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats a Markdown table, with the differences in per cent."""
    lines = [
        "| machine | replay | output tokens/s | TTFT p50, ms | TPOT p50, ms |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        note = " (gives the parameters)" if row.get("gives_parameters") else ""
        cells = []
        for name, digits in (
            ("output_tokens_per_second", 0),
            ("ttft_p50_ms", 1),
            ("tpot_p50_ms", 1),
        ):
            each = row[name]
            cells.append(
                f"{each['measured']:,.{digits}f} → {each['simulated']:,.{digits}f}"
                f" ({each['ratio'] - 1:+.1%})"
            )
        lines.append(f"| {row['machine']} | {row['replay']}{note} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Compare the simulator with measured replays.")
    parser.add_argument("page", type=Path, nargs="?", help="Markdown file with the table")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(words)
    rows = [row for name in RUNS for row in compare(name, read(name))]
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m scripts.simulate_measured",
        "parameters_from": dict(zip(("trace", "rate"), CALIBRATION, strict=True)),
        "runs": RUNS,
        "rows": rows,
        "model_only": compare_model("H200", read("H200")),
    }
    if arguments.out:
        atomic_write(arguments.out, json.dumps(result, indent=1) + "\n")
    tables = {"simulated": table(rows), "model": table(result["model_only"])}
    if arguments.page:
        for name, text in tables.items():
            replace_between(arguments.page, name, text)
    print(*tables.values(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

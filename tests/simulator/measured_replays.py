"""The simulator compared with measured replays of the engine.

    python -m tests.simulator.measured_replays

simulates every replay of four result files of ``scripts/bench_engine.py``, and writes the
comparison to :data:`RECORD`. The parameters of each run come from two replays, :data:`CALIBRATION`
and :data:`MORE`, which are therefore no evidence; the others are.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dsv3_jax.files import atomic_write
from dsv3_jax.simulator.measured_run import MeasuredRun, MeasuredTimes, label, programs_of
from dsv3_jax.simulator.replica import HostCosts
from dsv3_jax.simulator.report import summary
from dsv3_jax.simulator.workload import SubmitCosts

CALIBRATION = ("chat", 24.0)
"""Trace and rate of the replay that gives the parameters."""

MORE = ("chat", None)
"""The replay that gives the host's time together with :data:`CALIBRATION`, and the ratios of
programs that do not run there."""

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORD = RESULTS / "simulated_replays.json"
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
        rows.append(row_of(machine_name, run, replay, times, host))
        rows[-1]["gives_parameters"] = any(replay is giver for giver in givers)
    return rows


def calibrated(run: MeasuredRun, host: HostCosts) -> MeasuredTimes:
    """Returns step times whose ratios come from :data:`CALIBRATION`, as far as it has them."""
    times = run.calibrated(run.find(*CALIBRATION), host)
    if all(programs_of(replay).keys() <= times.ratios.keys() for replay in run.replays):
        return times
    more = run.calibrated(run.find(*MORE), host).ratios
    return MeasuredTimes(run.model, run.buckets, more | times.ratios)


def row_of(
    machine_name: str,
    run: MeasuredRun,
    replay: Mapping[str, Any],
    times: MeasuredTimes,
    host: HostCosts,
) -> dict[str, Any]:
    """Returns the measured and the simulated figures of one replay."""
    times.counts.clear()
    began = time.process_time()
    simulated = summary(run.simulate(replay, times, host))
    row: dict[str, Any] = {
        "machine": machine_name,
        "replay": label(replay),
        "requests": replay["requests"],
        "cpu_seconds": round(time.process_time() - began, 2),
    }
    row["steps"] = {
        name: [program.count, times.counts[name]] for name, program in programs_of(replay).items()
    }
    for name, of in METRICS.items():
        measured = of(replay)
        row[name] = {
            "measured": measured,
            "simulated": of(simulated),
            "ratio": round(of(simulated) / measured, 4),
        }
    return row


if __name__ == "__main__":
    result = {
        "date": datetime.date.today().isoformat(),
        "command": "python -m tests.simulator.measured_replays",
        "parameters_from": dict(zip(("trace", "rate"), CALIBRATION, strict=True)),
        "runs": RUNS,
        "rows": [row for name in RUNS for row in compare(name, read(name))],
    }
    atomic_write(RECORD, json.dumps(result, indent=1) + "\n")

"""The simulator compared with measured replays: the committed figures, and the comparison."""

from __future__ import annotations

import json

import pytest

from dsv3_jax.simulator.measured_run import MeasuredRun
from dsv3_jax.simulator.replica import HostCosts
from tests.simulator import measured_replays
from tests.simulator.measured_replays import CALIBRATION, METRICS, MORE, RECORD, RESULTS, RUNS

COMPARED = json.loads(RECORD.read_text("utf-8"))["rows"]
TOLERANCE = 0.10


@pytest.mark.parametrize("row", COMPARED, ids=lambda row: f"{row['machine']} {row['replay']}")
def test_the_committed_comparison_is_within_ten_per_cent(row):
    assert {name for name in METRICS if abs(row[name]["ratio"] - 1) > TOLERANCE} == set()


def test_the_committed_comparison_is_complete():
    names = {(row["machine"], row["replay"]) for row in COMPARED}
    replays = [json.loads((RESULTS / file).read_text("utf-8"))["replays"] for file in RUNS.values()]
    assert len(names) == len(COMPARED) == sum(map(len, replays)) == 21
    assert sum(row["gives_parameters"] for row in COMPARED) == 8


@pytest.mark.slow
@pytest.mark.parametrize("replay", [("chat", None), ("prefixed", 24.0)])
def test_the_committed_comparison_is_that_of_this_code(replay):
    run = measured_replays.read("H100")
    host = run.host_costs(run.find(*CALIBRATION), run.find(*MORE))
    times = measured_replays.calibrated(run, host)
    row = measured_replays.row_of("H100", run, run.find(*replay), times, host)
    (committed,) = (
        each for each in COMPARED if (each["machine"], each["replay"]) == ("H100", row["replay"])
    )
    for name in METRICS:
        assert row[name] == committed[name]
    assert row["steps"] == committed["steps"]


def test_refused_results(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"x\.json: expected a result of scripts/bench_engine\.py"):
        MeasuredRun.read(path)
    run = MeasuredRun.read(RESULTS / RUNS["H200"])
    with pytest.raises(ValueError, match="replay: expected one of chat offline, chat at 8/s, "):
        run.find("chat", 5)
    with pytest.raises(ValueError, match="step times: expected a result"):
        run.calibrated(
            {**run.replays[0], "engine": {**run.replays[0]["engine"], "dispatches": {}}},
            HostCosts(),
        )
    with pytest.raises(ValueError, match="host times: expected more for steps of more requests"):
        run.host_costs(run.replays[0], _with_host_us(run.replays[1], 1e6))


def _with_host_us(replay, us):
    """Returns a replay whose host takes another time in each step."""
    parts = dict.fromkeys(("planning", "dispatching", "processing"), us)
    return {**replay, "engine": {**replay["engine"], "host_us": parts}}


def test_the_hosts_time_is_a_part_per_step_and_a_part_per_request():
    run = MeasuredRun.read(RESULTS / RUNS["H200"])
    few, many = (run.find("chat", rate) for rate in (8.0, None))
    per_step = [replay["output_tokens"] / replay["engine"]["steps"] for replay in (few, many)]
    replays = [
        _with_host_us(replay, 100 + 3 * requests)
        for replay, requests in zip((few, many), per_step, strict=True)
    ]
    for pair in (replays, replays[::-1]):
        costs = run.host_costs(*pair)
        assert vars(costs) == pytest.approx(
            {"plan": 2e-4, "plan_request": 6e-6, "read": 1e-4, "read_request": 3e-6}
        )

"""Runs scripts/bench_cold_start.py with a tiny model on a CPU."""

import json
import sys
import time

import pytest

from scripts import bench_cold_start
from tests.support.checkpoints import tiny_config


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["bench_cold_start", *map(str, words)])
    bench_cold_start.main()


@pytest.mark.slow
def test_cold_and_warm(monkeypatch, tmp_path, capsys):
    path, out = tmp_path / "config.json", tmp_path / "out.json"
    path.write_text(json.dumps(tiny_config()))
    words = ["--dtype", "float32", "--layers", 2, "--prompt", 20]
    began = time.monotonic()
    run(monkeypatch, "--model", path, "--out", out, *words)
    took = time.monotonic() - began
    result = json.loads(out.read_text())
    cold, warm = result["rows"]
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    for row in result["rows"]:
        assert row["layers"] == 2
        assert row["first_token_s"] == pytest.approx(sum(row["phases_s"].values()))
        assert row["of_programs_s"]["trace"] > 0
        assert row["second_call_s"] < row["phases_s"]["programs"]
    # Each process also generates a second time, and exits.
    assert took / 2 < sum(row["first_token_s"] for row in result["rows"]) < took
    # Compiling takes seconds, reading the compilation cache does not.
    assert warm["of_programs_s"]["compile"] < cold["of_programs_s"]["compile"] / 2
    assert "2 layers, warm" in capsys.readouterr().out


def test_unknown_model(monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match=r"^expected a config.json, found none at"):
        run(monkeypatch, "--model", tmp_path / "config.json")


@pytest.mark.slow
def test_error_of_a_failed_process(monkeypatch, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_config()))
    with pytest.raises(SystemExit, match=r"(?s)of 2 layers: .*max_len: expected"):
        run(monkeypatch, "--model", path, "--layers", 2, "--prompt", 10**6)

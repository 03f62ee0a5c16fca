"""Runs scripts/profile_step.py with a tiny model on a CPU."""

import json
import sys

import pytest

from benchmarks.decode import steps
from benchmarks.profile.trace import TO_HOST, Event, busy_fraction, by_name, host_waits_us, kernels
from scripts import profile_step
from tests.support.checkpoints import tiny_config
from tests.test_bench_decode import a_millisecond_a_step


@pytest.mark.slow
def test_a_tiny_model(tmp_path, monkeypatch, capsys):
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(tiny_config()))
    words = "--dtype float32 --weights fp8 --batches 2 --cached 9 --out"
    monkeypatch.setattr(
        sys, "argv", ["profile_step", "--model", str(config), *words.split(), str(out)]
    )
    monkeypatch.setattr(steps, "WINDOWS", 1)
    monkeypatch.setattr(steps.Compiled, "__call__", a_millisecond_a_step)
    profile_step.main()
    (profile,) = json.loads(out.read_text())["profiles"]
    assert (profile["weights"], profile["step"]) == ("fp8", "decode 2 x 1, 9 cached")
    assert profile["wall_us"] > 0
    assert 0 < profile["busy"] <= 1
    assert profile["host_waits_us"] == 0  # on a CPU
    assert {"dense matmul", "router", "sort, permute, sum"} <= set(profile["kinds_us"])
    assert len(profile["kernels"]) == len(profile["captured"]) == profile_step.MAX_KERNELS
    assert "of the time" in capsys.readouterr().out


def test_events_are_summed():
    events = [Event("a", "x", 0, 10), Event("a", "x", 20, 5), Event("b", "", 25, 5)]
    assert [(k.name, k.operation, k.count, k.ns) for k in kernels(events)] == [
        ("a", "x", 2, 15),
        ("b", "", 1, 5),
    ]


def test_kernels_by_name():
    events = [Event("a", "x", 0, 1000), Event("b", "x", 0, 9000), Event("a", "y", 5, 3000)]
    assert by_name(events, 2) == [
        {"us": 4.5, "launches": 0.5, "kernel": "b"},
        {"us": 2.0, "launches": 1.0, "kernel": "a"},
    ]


def test_busy_fraction():
    events = [Event("", "", start, ns) for start, ns in [(10, 10), (12, 4), (15, 10), (30, 5)]]
    assert busy_fraction(events) == pytest.approx(20 / 25)  # 10 to 25 and 30 to 35


def test_pauses_after_copies_to_the_host():
    names = ["a", TO_HOST, "a", "b", TO_HOST, "a", "c"]
    starts = [0, 1000, 6000, 7000, 10_000, 10_500, 30_000]
    events = [Event(n, "", at, 1000) for n, at in zip(names, starts, strict=True)]
    # 4 us after the first copy; the second ends while "a" is already running; "c" follows a kernel.
    assert host_waits_us(events, 2) == pytest.approx(2.0)

"""Runs scripts/profile_step.py with a tiny model on a CPU."""

import json
import sys

import pytest

from benchmarks.decode import steps
from benchmarks.profile.chain import last_loop
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


LOOP = """\
%add (a: s32[], b: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %sum = s32[] add(%a, %b)
}

%body (arg: (s32[], f32[8])) -> (s32[], f32[8]) {
  %arg = (s32[], /*index=1*/f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[8]{0} get-tuple-element(%arg), index=1
  %next = s32[] fusion(%i), kind=kLoop, calls=%add
  %gemm_fusion_dot.1 = f32[8]{0} fusion(%x, %next), kind=kCustom, calls=%add
  %gemm_fusion_dot.2 = (f32[8]{0}, (f32[], s32[])) fusion(%gemm_fusion_dot.1), kind=kCustom
  %logits = f32[8]{0} get-tuple-element(%gemm_fusion_dot.2), index=0
  %best = f32[] fusion(%logits), kind=kInput, calls=%add
  %sorted = f32[8]{0} sort(%logits), dimensions={0}, to_apply=%add
  %bits = f32[] bitcast(%best)
  %total = f32[8]{0} fusion(%logits, %bits, %next), kind=kLoop, calls=%add
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%next, %total)
}

%proceed (arg: (s32[], f32[8])) -> pred[] {
  %arg.1 = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%arg.1), index=0
  ROOT %less = pred[] fusion(%j), kind=kLoop, calls=%add
}

ENTRY %main (start: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = (s32[], f32[8]{0}) parameter(0)
  ROOT %while = (s32[], f32[8]{0}) while(%start), condition=%proceed, body=%body
}
"""


def test_all_kernels_of_a_step():
    loop = last_loop(LOOP, None)
    assert loop.body == len(loop.kernels) == 6
    assert {kernel.name: kernel.depth for kernel in loop.kernels} == {
        "next": 1, "gemm_fusion_dot.1": 2, "gemm_fusion_dot.2": 3, "best": 4, "sorted": 4,
        "total": 5,
    }  # fmt: skip
    assert loop.longest() == ["next", "gemm_fusion_dot.1", "gemm_fusion_dot.2", "best", "total"]


def test_kernels_behind_the_lm_head():
    loop = last_loop(LOOP, "gemm_fusion_dot")
    assert (loop.body, loop.condition) == (6, 1)
    assert [(kernel.depth, kernel.name) for kernel in loop.kernels] == [
        (1, "best"),
        (1, "sorted"),
        (2, "total"),
    ]
    assert loop.longest() == ["best", "total"]
    with pytest.raises(ValueError, match="beginning of a kernel's name, got 'cublas'"):
        last_loop(LOOP, "cublas")
    with pytest.raises(ValueError, match="expected a loop"):
        last_loop(LOOP.partition("ENTRY")[0], "gemm_fusion_dot")

"""Runs scripts/profile_step.py with a tiny model on a CPU."""

import json
import sys

import pytest

from benchmarks.decode import steps
from benchmarks.profile.operations import Operation, operations
from benchmarks.profile.trace import (
    TO_HOST,
    Event,
    Kernel,
    busy_fraction,
    by_name,
    host_waits_us,
    kernels,
    summed,
)
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
    assert {"layers/linear", "layers/router", "layers/moe"} <= set(profile["kinds_us"])
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


TEXT = """HloModule jit_run, is_scheduled=true

FileNames
1 "/a/dsv3_jax/layers/norm.py"
2 "/a/dsv3_jax/layers/router.py"
3 "/a/pallas_kernels/mla_decode/mosaic_gpu.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=21}
2 {file_name_id=2 function_name_id=2 line=51}
3 {file_name_id=3 function_name_id=3 line=60}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}

%fused (p: bf16[8]) -> f32[8] {
  %p = bf16[8]{0} parameter(0), metadata={op_name="x" stack_frame_id=1}
  %c = f32[8]{0} convert(%p), metadata={op_name="x" stack_frame_id=1}
  %m = f32[8]{0} multiply(%c, %c), metadata={op_name="jit(run)/mul" stack_frame_id=2}
  ROOT %r = f32[8]{0} rsqrt(%m), metadata={op_name="jit(run)/rsqrt" stack_frame_id=2}
}

ENTRY %main (a: bf16[8]) -> (f32[8], /*index=1*/f32[8]) {
  %a = bf16[8]{0} parameter(0)
  %loop_fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused, metadata={stack_frame_id=1}
  %call.2 = (f32[8]{0}, f32[4]{0}) custom-call(%a), custom_call_target="k", metadata={op_name="jit(run)/mpmd_map" stack_frame_id=3}
  %sort.3 = (f32[8]{0}, s32[8]{0}) sort(%b, %c), metadata={op_name="jit(run)/top_k" source_file="/b/dsv3_jax/layers/router.py" source_line=3}
  %copy.4 = f32[8]{0} copy(%b)
  %while.5 = (s32[]) while(%t), condition=%c, body=%d
  ROOT %tuple.6 = (f32[8]{0}, f32[8]{0}) tuple(%b, %b)
}
"""  # noqa: E501


def test_operations():
    result = operations(TEXT)
    assert result["loop_fusion.1"] == Operation("fusion", "", "layers/norm")
    assert result["call.2"] == Operation("custom-call", "jit(run)/mpmd_map", "mla_decode")
    assert result["sort.3"] == Operation("sort", "jit(run)/top_k", "layers/router")
    assert result["copy.4"].kind == "copies"


def test_times_are_summed_by_kind():
    kernels = [
        Kernel("fusion_1", "loop_fusion.1", 4, 8000.0),
        Kernel("mosaic", "call.2", 2, 60000.0),
        Kernel("while", "while.5", 2, 90000.0),
        Kernel("nvjet_tst_64x8", "", 2, 1000.0),
        Kernel("MemcpyD2D", "", 2, 500.0),
        Kernel("mystery", "gone.9", 2, 250.0),
    ]
    result = summed(kernels, operations(TEXT), runs=2)
    assert result["kinds_us"] == {
        "mla_decode": 30.0, "layers/norm": 4.0, "dense matmul": 0.5, "copies": 0.25, "other": 0.12,
    }  # fmt: skip
    assert result["launches"] == 6
    first = result["kernels"][0]
    assert (first["kernel"], first["us"], first["traced"]) == ("mosaic", 30.0, "jit(run)/mpmd_map")

"""Runs scripts/profile_layer.py with a tiny layer on a CPU; parsing of optimised HLO."""

import json
import sys

import pytest

from benchmarks.profile.operations import Operation, operations
from benchmarks.profile.trace import Kernel, summed
from scripts import profile_layer
from tests.support.checkpoints import tiny_config


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "step"),
    [
        ("--weights bf16 --decode --prefill 9", "bf16 prefill 1 x 9, 0 cached"),
        ("--weights fp8 --decode 2 --cached 70 --prefill", "fp8 decode 2 x 1, 70 cached"),
    ],
)
def test_a_tiny_layer(tmp_path, monkeypatch, capsys, words, step):
    config, out = tmp_path / "config.json", tmp_path / "out.json"
    config.write_text(json.dumps(tiny_config()))
    given = ["--model", str(config), "--dtype", "float32", "--runs", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["profile_layer", *given, *words.split()])
    monkeypatch.setattr(profile_layer, "WINDOW_S", 0.001)
    profile_layer.main()
    (profile,) = json.loads(out.read_text())["profiles"]
    assert f"{profile['weights']} {profile['step']}" == step
    assert profile["wall_us"] > 0
    assert profile["kernels_us"] == pytest.approx(sum(profile["kinds_us"].values()), abs=0.1)
    assert {"dense matmul", "router", "sort, permute, sum"} <= set(profile["kinds_us"])
    printed = capsys.readouterr().out
    assert f"{step}: wall" in printed
    assert "dense matmul" in printed


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
    assert result["loop_fusion.1"] == Operation("fusion", "", "norm")
    assert result["call.2"] == Operation("custom-call", "jit(run)/mpmd_map", "attention")
    assert result["sort.3"] == Operation("sort", "jit(run)/top_k", "router")
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
        "attention": 30.0, "norm": 4.0, "dense matmul": 0.5, "copies": 0.25, "other": 0.12,
    }  # fmt: skip
    assert result["launches"] == 6
    first = result["kernels"][0]
    assert (first["kernel"], first["us"], first["traced"]) == ("mosaic", 30.0, "jit(run)/mpmd_map")

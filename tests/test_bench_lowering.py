"""scripts/bench_lowering.py: a tiny model's programs, and the comparison of both ways."""

import importlib.util
import json
import subprocess
import types

import pytest

from pallas_kernels.hopper import lowered_once
from scripts import bench_lowering
from tests.support.checkpoints import tiny_config

WAYS = bench_lowering.WAYS


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra gpu"
)
@pytest.mark.parametrize("way", WAYS)
def test_programs_of_a_tiny_model(tmp_path, monkeypatch, way):
    monkeypatch.setattr(lowered_once.Exports, "caller", lowered_once.Exports.caller)
    config = tmp_path / "config.json"
    # Routed by a kernel, with twice as many experts as its least.
    experts = {"n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1}
    config.write_text(json.dumps(tiny_config() | experts))
    words = ["--model", str(config), "--programs", "2", "--way", way]
    result = bench_lowering.lower(bench_lowering.parse(words))
    assert result["way"] == way
    assert len({row["shape"] for row in result["programs"]}) == 2
    assert all(row["kernels"] > 0 for row in result["programs"])
    assert result["cpu_s"] == pytest.approx(sum(row["cpu_s"] for row in result["programs"]), 0.02)


def test_ways_alternate(tmp_path, monkeypatch, capsys):
    commands, seconds = [], iter([9.0, 5.0, 6.0, 8.0])

    def run(command, **_):
        commands.append(command)
        result = {"way": command[-1], "cpu_s": next(seconds), "programs": []}
        return types.SimpleNamespace(returncode=0, stdout=f"a line\n{json.dumps(result)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "out.json"
    bench_lowering.main(["--pairs", "2", "--programs", "3", "--out", str(out)])
    assert [command[-1] for command in commands] == [WAYS[0], WAYS[1], WAYS[1], WAYS[0]]
    assert all(command[command.index("--programs") + 1] == "3" for command in commands)
    result = json.loads(out.read_text())
    assert result["cpu_s"] == {WAYS[0]: [9.0, 8.0], WAYS[1]: [5.0, 6.0]}
    assert result["median_cpu_s"] == {WAYS[0]: 8.5, WAYS[1]: 5.5}
    assert len(result["runs"]) == 4
    assert '"median_cpu_s"' in capsys.readouterr().out


def test_a_failed_process_is_an_error(monkeypatch):
    failed = types.SimpleNamespace(returncode=3, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="once per program: exit status 3"):
        bench_lowering.main([])


def test_the_largest_shape_comes_first():
    shapes = [types.SimpleNamespace(decodes=d, chunks=c, chunk_tokens=64) for d, c in SIZES]
    assert [s.decodes for s in bench_lowering.spread(shapes, None)] == [8, 512, 128, 16]
    assert [s.decodes for s in bench_lowering.spread(shapes, 2)] == [8, 128]


SIZES = (512, 0), (16, 0), (8, 32), (128, 0)

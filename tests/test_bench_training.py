"""Tests of the command that times training steps, on a tiny model."""

import json

import pytest

from benchmarks.profile.operations import Operation
from benchmarks.profile.trace import Event
from scripts import bench_training
from tests.training.tiny import CONFIG


def test_layers_of_a_preset():
    config = bench_training.model_config("moonlight-16b", 8, 4096)
    assert (config.num_hidden_layers, config.hidden_size, config.quantization) == (8, 2048, None)
    assert config.max_position_embeddings == 8192
    longer = bench_training.model_config("moonlight-16b", 0, 32768)
    assert (longer.num_hidden_layers, longer.max_position_embeddings) == (27, 32768)


@pytest.mark.slow
def test_figures(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    words = f"--config {path} --layers 0 --batch 2 --length 12 --steps 3 --warm-up 1"
    words += " --remat norms --compute-dtype float32 --documents 3 --profile"
    bench_training.main(words.split())
    printed = capsys.readouterr()
    figures = json.loads(printed.out)
    assert (figures["remat"], figures["documents"]) == ("norms", 3)
    assert figures["mfu"] is None  # that of a CPU is unknown
    assert len(figures["losses"]) == 5
    assert figures["losses"][-1] < figures["losses"][0]
    rate = 2 * 12 * 1000 / figures["ms"]
    assert figures["tokens_per_second"] == pytest.approx(rate)
    modules = {row["module"] for row in figures["profile"]["kernels"]}
    assert {"layers/linear", "layers/moe"} <= modules
    assert figures["profile"]["kernels_ms"] > 0
    assert printed.err.splitlines()[-1].split()[1] == "ms"


@pytest.mark.slow
def test_low_rank_updates_of_quantized_weights(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    words = f"--config {path} --layers 0 --batch 2 --length 12 --steps 1 --warm-up 1"
    bench_training.main([*words.split(), "--lora-rank", "2", "--base", "fp8"])
    figures = json.loads(capsys.readouterr().out)
    assert (figures["base"], figures["lora_rank"]) == ("fp8", 2)
    assert figures["losses"][-1] < figures["losses"][0]
    with pytest.raises(SystemExit):
        bench_training.main(["--base", "fp8"])
    assert "--base: expected --lora-rank with it" in capsys.readouterr().err


OPERATIONS = {
    "loop_fusion.3": Operation("fusion", "jit(training_step)/add", "layers/norm"),
    "loop_fusion.4": Operation("fusion", "jit(training_step)/mul", "training/optimizer"),
    "cublas.1": Operation("custom-call", "jit(training_step)/dot_general", "layers/linear"),
    "while.2": Operation("while", "jit(training_step)/while", "layers/moe"),
}
EVENTS = [
    Event("nvjet_sm90_tst_128x160", "cublas.1", 0, 3e6),
    Event("void cublasLt::splitKreduce_kernel<32>", "cublas.1", 3e6, 1e6),
    Event("grouped_matmul_mosaic_gpu_kernel", "", 4e6, 5e6),
    Event("cudnn_generated_fort_native_sdpa", "", 9e6, 2e6),
    Event("loop_fusion", "loop_fusion.3", 11e6, 1e6),
    Event("loop_fusion", "loop_fusion.4", 12e6, 6e6),
    Event("while", "while.2", 0, 18e6),
    Event("Memset 3", "", 18e6, 0.5e6),
    Event("void cub::sort", "", 20e6, 0.5e6),
]


def test_a_profile_sums_kernels_by_group_and_by_name():
    profile = bench_training.profile(EVENTS, OPERATIONS)
    assert profile["groups_ms"] == {
        "XLA fusions": 3.5, "grouped_matmul": 2.5, "dense matmuls": 2.0, "cuDNN": 1.0,
        "copies": 0.25, "other": 0.25,
    }  # fmt: skip
    assert list(profile["groups_ms"])[:2] == ["XLA fusions", "grouped_matmul"]
    assert profile["kernels_ms"] == 9.5  # a loop counts by its body
    assert profile["wall_ms"] == 10.25
    assert profile["busy"] == pytest.approx(19 / 20.5)
    first = profile["kernels"][0]
    assert (first["kernel"], first["ms"], first["launches"]) == ("loop_fusion", 3.5, 1.0)
    assert (first["module"], first["traced"]) == ("training/optimizer", "jit(training_step)/mul")


def test_the_table_of_a_profile():
    lines = bench_training.table(bench_training.profile(EVENTS, OPERATIONS)).splitlines()
    assert lines[0] == "kernels 9.5 ms per step, traced step 10.2 ms, busy 92.7%"
    assert lines[1].split() == ["3.500", "ms", "36.8%", "XLA", "fusions"]
    assert len(lines) == 1 + 6 + 7
    kernel = "3.500 ms 1.0x loop_fusion training/optimizer jit(training_step)/mul"
    assert lines[7].split() == kernel.split()

"""Tests of the command that times training steps, on a tiny model."""

import json

import pytest

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
    words += " --remat norms --compute-dtype float32 --documents 3"
    bench_training.main(words.split())
    figures = json.loads(capsys.readouterr().out)
    assert (figures["remat"], figures["documents"]) == ("norms", 3)
    assert figures["mfu"] is None  # that of a CPU is unknown
    assert len(figures["losses"]) == 5
    assert figures["losses"][-1] < figures["losses"][0]
    rate = 2 * 12 * 1000 / figures["ms"]
    assert figures["tokens_per_second"] == pytest.approx(rate)


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

"""The checkpoint with sparse attention in the package."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dsv3_jax
from dsv3_jax.checkpoint.find import DEMO, DEMOS
from dsv3_jax.checkpoint.tensor_table import tensor_table
from dsv3_jax.config import ModelConfig
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device.buckets import Buckets
from dsv3_jax.offline.generator import Generator
from tests.checkpoint.files import read_directory
from tests.support.command import run
from tests.support.running import forward

ROOT = Path(__file__).parents[1]
SPARSE = DEMOS["demo-sparse"]
PROMPT = '''def read_lines(path, encoding="utf-8"):
    """Yields the lines of a file without their ends."""
    with open(path, encoding=encoding) as file:
        for line in file:
'''
NEW = 24


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(SPARSE)


def test_it_is_the_demo_with_indexers(config):
    """Its config is that of a V3.2. Its tokenizer, and every tensor outside the indexers, have the
    names and shapes of the demo's, and its weights are about as many bytes."""
    assert config.model_type == "deepseek_v32"
    assert config.index_topk is not None
    assert config.index_topk <= 32, "expected attention to be sparse in short texts"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (SPARSE / name).read_bytes() == (DEMO / name).read_bytes()
    stored, dense = (read_directory(directory) for directory in (SPARSE, DEMO))
    table = {name: (spec.shape, spec.dtype) for name, spec in tensor_table(config).items()}
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()} == table
    without = {name: each for name, each in stored.items() if ".indexer." not in name}
    shapes = [{name: each.shape for name, each in some.items()} for some in (without, dense)]
    assert shapes[0] == shapes[1]
    assert len(without) < len(stored)
    sizes = [sum(path.stat().st_size for path in folder.iterdir()) for folder in (SPARSE, DEMO)]
    assert sizes[0] < 1.03 * sizes[1] < 16_500_000


def test_the_record_is_of_this_checkpoint(config):
    result = json.loads((ROOT / "benchmarks/results/sparse_demo.json").read_text("utf-8"))
    assert result["index_topk"] == config.index_topk
    sizes = {
        name: sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        for name, directory in DEMOS.items()
    }
    assert result["file_bytes"] == sizes


def test_sparse_attention_costs_little():
    """In the record, random indexers cost much, each stage of training pays, and in every layer
    the selected tokens have more of dense attention than random ones."""
    result = json.loads((ROOT / "benchmarks/results/sparse_demo.json").read_text("utf-8"))
    rows = {(row["model"], row["length"]): row for row in result["rows"]}
    for length in {row["length"] for row in result["rows"]}:
        random, warm, trained = (
            rows[name, length] for name in ("random indexers", "warm-up", "demo-sparse")
        )
        demo = rows["demo", length]["dense_loss"]
        assert random["sparse_loss"] > warm["sparse_loss"] > trained["sparse_loss"]
        assert trained["sparse_loss"] < demo + 0.05 * (random["sparse_loss"] - demo)
        for ours, by_chance in zip(trained["mass"], random["mass"], strict=True):
            assert ours > 1.5 * by_chance


@pytest.mark.slow
def test_greedy_tokens_are_the_same_in_every_form(capsys):
    """A Generator, an engine, the command, and passes over the whole text agree."""
    model, tokenizer = dsv3_jax.load("demo-sparse", dtype=jnp.float32, mtp=False)
    assert tokenizer is not None
    settings = {"max_new_tokens": NEW, "ignore_eos": True}
    generator = Generator(model, tokenizer, 128, batch_sizes=(1,), prefill_chunk=32)
    tokens = generator.generate([PROMPT], **settings)[0].tokens
    assert len(tokens) == NEW
    engine = Engine(
        model, tokenizer, 128, max_running=1, background=False, buckets=Buckets((1,), (1,), 32, 2)
    )
    handle = engine.submit(PROMPT, **settings)
    while engine.step():
        pass
    assert handle.result(0).tokens == tokens
    prompt = tokenizer.encode(PROMPT)
    assert len(prompt) > 1.5 * model.config.index_topk
    best = np.asarray(forward(model, np.array([prompt + tokens]))[0]).argmax(axis=-1)[0]
    np.testing.assert_array_equal(best[len(prompt) - 1 : -1], tokens)
    command = ("generate", "--model", "demo-sparse", "--dtype", "float32", "--draft", "none")
    flags = ("--prompt", PROMPT, "--max-new-tokens", str(NEW), "--ignore-eos", "--json")
    assert run(*command, *flags) == 0
    assert json.loads(capsys.readouterr().out)["completions"][0]["tokens"] == tokens

"""dsv3 eval, in this process, on a model that compiles in seconds."""

import json
import math
import shutil
from pathlib import Path

import pytest

from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.cli import eval as evaluation
from dsv3_jax.training.perplexity import Evaluator
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.command import run
from tests.training.tiny import CONFIG

pytestmark = pytest.mark.usefixtures("own_compile_cache")

SMALL = ("--length", "32", "--batch", "2", "--dtype", "float32")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    lines = [{"text": f"def f{i}(x):\n    return x + {i}\n" * (1 + i % 3)} for i in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> list[Path]:
    """Two models with the demo's tokenizer and different weights."""
    directories = []
    for seed in (1, 2):
        directory = tmp_path_factory.mktemp("model")
        config = CONFIG | {"vocab_size": 2048, "num_nextn_predict_layers": 0}
        write_checkpoint(directory, config, random_tensors(config, seed=seed))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(DEMO / name, directory / name)
        directories.append(directory)
    return directories


def evaluate(*arguments: object) -> int:
    return run("eval", *SMALL, *arguments)


def result(capsys, *arguments: object) -> dict:
    assert evaluate("--json", *arguments) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


def test_an_interrupted_command_continues(text, models, tmp_path, capsys, monkeypatch):
    """The sums are those of an undisturbed command, bit for bit, and what differs is refused."""
    data = ("--model", models[0], "--data", text)
    want = result(capsys, *data)
    assert want["documents"] == 9
    assert want["bytes"] == sum(
        len(json.loads(line)["text"]) for line in text.read_text().splitlines()
    )
    assert want["perplexity"] == pytest.approx(math.exp(want["nats_per_token"]))
    assert want["bits_per_byte"] == pytest.approx(
        want["nats_per_token"] * want["tokens"] / want["bytes"] / math.log(2)
    )
    assert (want["length"], want["stride"], want["batch"], want["cache"]) == (32, 32, 2, None)

    nats, out = Evaluator.nats, tmp_path / "sums.json"

    def interrupted(self, index):
        if index == 3:
            raise KeyboardInterrupt
        return nats(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "nats", interrupted)
        assert evaluate(*data, "--out", out) == 130
    assert f"{out} has the sums of 3 of " in capsys.readouterr().err
    assert json.loads(out.read_text())["batches"] == 3

    for arguments, message in (
        ((*data, "--out", out), f"--out: {out} exists; expected a new file, or --resume"),
        ((*data, "--out", out, "--resume", "--length", "16"), "length differs"),
        ((*data, "--data", __file__, "--out", out, "--resume"), "--resume: data differs"),
        ((*data, "--out", out, "--resume", "--model", models[1]), "weights differs"),
    ):
        assert evaluate(*arguments) == 2
        assert message in capsys.readouterr().err

    read = []
    monkeypatch.setattr(Evaluator, "nats", lambda self, i: read.append(i) or nats(self, i))
    got = result(capsys, *data, "--out", out, "--resume")
    assert read[0] == 3
    for name in ("nats_per_token", "tokens", "bytes", "documents"):
        assert got[name] == want[name], name
    read.clear()
    assert (
        result(capsys, *data, "--out", out, "--resume")["nats_per_token"]
        == (want["nats_per_token"])
    )
    assert read == []


@pytest.mark.slow
def test_the_cache_gives_the_same_perplexity(text, models, capsys):
    data = ("--model", models[0], "--data", text)
    want = result(capsys, *data)
    for cache in ("1", "16"):
        got = result(capsys, *data, "--cache", cache)
        assert got["cache"] == int(cache)
        assert got["nats_per_token"] == pytest.approx(want["nats_per_token"], rel=1e-5)
    assert evaluate(*data, "--cache") == 0
    line = capsys.readouterr().out
    assert line.startswith(f"{want['nats_per_token']:.4f} nats per token, perplexity ")
    assert line.endswith(f"{want['tokens']} tokens and {want['bytes']} bytes in 9 documents\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume: expected --out with the file to continue, got none"),
        (
            ["--out", "nowhere/sums.json"],
            "--out: nowhere/sums.json: expected a file in a directory",
        ),
        (["--stride", "33"], "--stride: expected at most length, 32, got 33"),
        (["--cache", "0"], "--cache: expected at least 1, got 0"),
        (["--model", "nowhere"], "nowhere"),
        (["--activations", "float8"], "--activations: expected --quantization fp8 or int4"),
    ],
)
def test_bad_usage_is_one_line(arguments, message, text, capsys):
    assert evaluate("--data", text, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("dsv3 eval: error: ")
    assert message in err.splitlines()[-1]


def test_a_file_of_something_else_is_refused(tmp_path):
    out = tmp_path / "sums.json"
    identity = {"length": 8}
    for content in ("{", "[1]", '{"eval": 1}', '{"eval": {"length": 8}, "batches": 9}'):
        out.write_text(content)
        with pytest.raises(ValueError, match="expected a file of dsv3 eval, got another"):
            evaluation._read(out, identity, 8)
    sums = {"eval": identity, "batches": 8, "nats": 1.5, "seconds": 2}
    out.write_text(json.dumps(sums))
    assert evaluation._read(out, identity, 8) == ((8, 1.5), 2.0)
    out.write_text(json.dumps(sums | {"nats": math.nan}))
    with pytest.raises(ValueError, match="expected a file of dsv3 eval"):
        evaluation._read(out, identity, 8)

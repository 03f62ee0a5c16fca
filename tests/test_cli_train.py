"""dsv3 train and dsv3 export, in this process, on a model that compiles in seconds."""

import argparse
import dataclasses
import io
import json
import re
import shutil
import signal
import subprocess
import sys
import typing
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import dsv3_jax
from dsv3_jax import presets
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.reader import CheckpointReader
from dsv3_jax.cli import export, flags
from dsv3_jax.cli.arguments.train import RUN_HELP, TRAINING_HELP
from dsv3_jax.cli.main import parser
from dsv3_jax.cli.progress import TrainingProgress
from dsv3_jax.cli.train import _base
from dsv3_jax.quantization import INT8, BlockQuantization
from dsv3_jax.training.config import RematChoice, TrainingConfig
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.metrics_log import read_metrics
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trainer import Trainer
from sharding import abstract_layout
from tests.support.checkpoints import BIAS
from tests.support.command import run
from tests.support.oracle import relative_error
from tests.support.running import forward
from tests.training.tiny import CONFIG

pytestmark = pytest.mark.usefixtures("own_compile_cache")

CACHE = str(Path(__file__).parents[1] / ".jax_cache")
TEXT = "def read(path):\n    with open(path) as file:\n        return file.read()\n\n\n"
SMALL = ("--batch", "2", "--length", "16", "--eval-batches", "1", "--compute-dtype", "float32")


def train(*arguments: object) -> int:
    return run("train", "--compile-cache", CACHE, *arguments)


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """config.json of the tiny model with the demo's vocabulary, and a folder of text."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 2048}))
    (folder / "text").mkdir()
    for i in range(30):
        (folder / "text" / f"{i}.py").write_text(TEXT * (i + 1))
    return folder


@pytest.fixture(scope="module")
def trained(files) -> Path:
    """A finished run of four steps."""
    out = files / "run"
    status = train(
        *("--config", files / "config.json", "--data", files / "text", "--tokenizer", "demo"),
        *("--out", out, "--steps", 4, "--save-every", 2, "--log-every", 1, "--plot", *SMALL),
    )
    assert status == 0
    return out


# ---- train ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_leaves_its_files(trained):
    assert {path.name for path in trained.iterdir()} == {
        *("run.json", "metrics.jsonl", "expert_load.npy", "checkpoints", "tokenizer", "model"),
        *("loss.png", "expert_load.png"),
    }
    assert [entry["step"] for entry in read_metrics(trained / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for copy in (trained / "tokenizer" / name, trained / "model" / name):
            assert copy.read_bytes() == (DEMO / name).read_bytes()


@pytest.mark.slow
def test_the_trained_model_loads(trained):
    model, tokenizer = dsv3_jax.load(trained / "model", dtype=jnp.float32)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("import os")) == "import os"
    assert len(model.mtp) == 1


@pytest.mark.slow
def test_json_and_stderr(trained, capsys):
    """Resuming a finished run has nothing to do and reports everything."""
    assert train("--out", trained, "--resume", "--json") == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    result = json.loads(out)
    assert result["finished"] is True
    assert result["step"] == 4
    assert result["out"] == str(trained)
    assert result["losses"].keys() == result["held_out"].keys() == set(Losses._fields)
    assert result["parameters"] > result["mtp_parameters"] > 0
    assert all(line.startswith("dsv3: ") for line in err.splitlines())
    assert f"wrote {trained / 'model'}" in err


@pytest.mark.slow
def test_progress_is_a_line_a_row_where_there_is_no_terminal(files, tmp_path, capsys):
    status = train(
        *("--config", files / "config.json", "--data", files / "text", "--tokenizer", "demo"),
        *("--out", tmp_path / "run", "--steps", 4, "--log-every", 1, "--keep", 0, *SMALL),
    )
    assert status == 0
    out, err = capsys.readouterr()
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("dsv3: step ")]
    assert [line.split(",")[0] for line in lines] == [f"dsv3: step {i}/4" for i in range(5)]
    assert all("loss " in line and "MTP " in line and "load " in line for line in lines[1:])
    assert "tokens/s" in lines[2]
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_resuming_needs_no_settings_and_takes_no_others(trained, capsys):
    def resume(*arguments: object) -> str:
        assert train("--out", trained, "--resume", *arguments) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("dsv3 train: error: resume: ")
        return last

    before = (trained / "metrics.jsonl").read_bytes()
    assert "training.learning_rate differs" in resume("--learning-rate", 0.1)
    assert "training.betas differs" in resume("--betas", 0.5, 0.5)
    assert "data.batch differs" in resume("--batch", 4)
    assert "data.seed differs" in resume("--seed", 9)
    assert "data.train differs" in resume("--data", trained.parent / "text" / "[2-7].py")
    assert train("--out", trained, "--resume", "--batch", 2, "--log-every", 7) == 0
    assert (trained / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "expected --config for a new model, or --from"),
        (["--config", "CONFIG"], "expected --data"),
        (["--config", "CONFIG", "--data", "TEXT"], "expected --steps"),
        (
            ["--config", "CONFIG", "--data", "TEXT", "--steps", "9", "--length", "9"],
            "text needs a tokenizer",
        ),
        (
            ["--config", "CONFIG", "--data", "no.npz", "--steps", "9", "--length", "9"],
            "found none at",
        ),
        (["--config", "none.json", "--data", "TEXT", "--steps", "9"], "expected a config.json"),
        (["--from", "/nowhere/at all", "--data", "TEXT", "--steps", "9"], "expected 'demo'"),
        (
            ["--from", "demo", "--data", "TEXT", "--steps", "9", "--tokenizer", "/"],
            "tokenizer.json",
        ),
        (["--from", "demo", "--config", "CONFIG"], "--config"),
        (["--from", "demo", "--data", "TEXT", "--steps", "0"], "steps: expected at least 1, got 0"),
        (["--from", "demo", "--data", "TEXT", "--steps", "many"], "--steps"),
        (["--from", "demo", "--data", "TEXT", "--steps", "9", "--betas", "0.9"], "--betas"),
        (["--from", "demo", "--data", "TEXT", "--steps", "9", "--mtp-hidden", "x"], "--mtp-hidden"),
        (
            ["--from", "demo", "--data", "TEXT", "--steps", "9", "--compute-dtype", "int8"],
            "compute_dtype: expected bfloat16 or float32, got 'int8'",
        ),
        (["--from", "demo", "--data", "TEXT", "--steps", "9", "--batch", "0"], "batch: expected"),
        (
            ["--from", "demo", "--data", "TEXT", "--steps", "9", "--length", "5000"],
            "length: expected 3 to 4096 for this model, got 5000",
        ),
        (["--resume"], "found no run.json"),
        (["--resume", "--max-minutes", "0"], "found no run.json"),
        (["--frobnicate"], "--frobnicate"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments, named, files, tmp_path, capsys):
    places = {"CONFIG": files / "config.json", "TEXT": files / "text"}
    given = [places.get(argument, argument) for argument in arguments]
    assert train("--out", tmp_path / "run", *given) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *before, last = err.splitlines()
    assert last.startswith(("dsv3 train: error: ", "dsv3: error: "))
    assert named in last
    assert all(line.startswith("dsv3: ") for line in before)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_settings_and_paths_are_checked_before_anything_is_read(trained, files, tmp_path, capsys):
    """Neither the corpus, which does not exist here, nor the model is read."""
    new = ("--config", files / "config.json", "--data", tmp_path / "no.txt", "--steps", 4)
    new += ("--tokenizer", "demo", "--length", 16)
    (tmp_path / "file").write_text("precious")
    for arguments, wrong in (
        (("--out", tmp_path / "file" / "run"), "cannot write to"),
        (("--out", "/proc/run"), "cannot write to /proc"),
        (("--out", trained), "expected a new directory, or to resume"),
        (("--out", tmp_path / "a", "--length", 5000), "length: expected 3 to"),
        (("--out", tmp_path / "a", "--batch", 4, "--accumulate", 3), "multiple of accumulate=3"),
        (("--out", tmp_path / "a", "--lora-rank", 100), "lora_rank: expected at most"),
        (("--out", tmp_path / "a", "--layout", "train", "--batch", 12), "multiple of 8 devices"),
        (
            ("--out", tmp_path / "a", "--context-devices", 2),
            "--context-devices: expected --layout train with it, got no layout",
        ),
        (
            ("--out", tmp_path / "a", "--layout", "train", "--context-devices", 8, "--length", 24),
            "length: expected a multiple of 16 tokens per sequence for context_devices=8, got 24",
        ),
    ):
        assert train(*new, *arguments) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert wrong in err
        assert err.count("\n") == 1
    assert not (tmp_path / "a").exists()
    again = ("--out", trained, "--resume", "--data", tmp_path / "no.txt")
    for arguments, wrong in (
        (("--learning-rate", 0.5), "resume: training.learning_rate differs"),
        (("--batch", 3), "resume: data.batch differs"),
        (("--steps", 3), "expected at least as many"),
    ):
        assert train(*again, *arguments) == 2
        assert wrong in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_saves_and_prints_the_command_to_resume(files, tmp_path, capsys, monkeypatch):
    """The first Ctrl-C saves; a second one ends the run at once."""
    out = tmp_path / "run"
    interrupts = iter([1, 2])

    def step(self, state, tokens):
        for _ in range(next(interrupts)):
            signal.raise_signal(signal.SIGINT)
        one, none = jnp.float32(1), jnp.int32(0)
        metrics = Metrics(
            Losses(*[one] * len(Losses._fields)), one, one, one, one, none, jnp.ones((2, 8), int)
        )
        return state._replace(step=state.step + 1), metrics

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(Evaluation, "losses", lambda self, state: {"main": 1.0})
    monkeypatch.setattr(TrainingProgress, "show", lambda self, entry: None)
    start = ("--config", files / "config.json", "--data", files / "text", "--tokenizer", "demo")
    before = signal.getsignal(signal.SIGINT)
    for arguments in ((*start, "--steps", 4, *SMALL), ("--resume",)):
        assert train("--out", out, *arguments) == 130
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == (
            f"dsv3: interrupted; the checkpoint of step 1 is kept; resume with "
            f"dsv3 train --out {out} --resume"
        )
    assert signal.getsignal(signal.SIGINT) == before
    assert not (out / "model").exists()


def test_a_step_that_does_not_fit_is_one_line(files, tmp_path, capsys, monkeypatch):
    def step(self, *arguments):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 45 GiB.\n at step")

    monkeypatch.setattr(Trainer, "step", step)
    out = tmp_path / "run"
    arguments = ("--config", files / "config.json", "--data", files / "text", "--tokenizer", "demo")
    assert train(*arguments, "--out", out, "--steps", 2, "--eval-every", 0, *SMALL) == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dsv3 train: error: {out}: expected a training step that fits on the")
    assert line.endswith("got: RESOURCE_EXHAUSTED: Out of memory: 45 GiB.")


@pytest.mark.slow
def test_other_commands_do_not_wait_for_grain_and_orbax():
    others = ("convert", "doctor", "export", "generate", "plan", "verify")
    code = "import sys\n" + "".join(f"import dsv3_jax.cli.{other}\n" for other in others)
    code += "import dsv3_jax.cli.train\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "jax" in loaded
    assert not {"grain", "orbax", "matplotlib"} & loaded


@pytest.mark.slow
def test_files_that_a_run_has_copied_may_be_deleted(trained, files, tmp_path, capsys):
    """A resumed run keeps the tokenizer; settings of another version are named."""
    out = tmp_path / "run"
    shutil.copytree(trained, out)
    (out / "expert_load.npy").unlink()
    record = json.loads((out / "run.json").read_text())
    record["plan"]["tokenizer"] = str(tmp_path / "gone")
    (out / "run.json").write_text(json.dumps(record))
    assert train("--out", out, "--resume") == 0
    for part, kind in (("training", "TrainingConfig"), ("plan", "RunSettings")):
        changed = json.loads(json.dumps(record))
        values = changed["plan"]["settings"] if part == "plan" else changed[part]
        values["dropout"] = 0.1
        (out / "run.json").write_text(json.dumps(changed))
        capsys.readouterr()
        assert train("--out", out, "--resume") == 2
        wrong = f"error: run.json: dropout: expected a setting of this version ({kind})"
        assert wrong in capsys.readouterr().err


def test_an_input_of_another_version_is_refused(files, tmp_path, capsys):
    plan = {"config": str(files / "config.json"), "data": ["text"], "curriculum": 1}
    (tmp_path / "run.json").write_text(json.dumps({"plan": plan, "training": {"steps": 3}}))
    assert train("--out", tmp_path, "--resume") == 2
    wrong = "error: run.json: plan.curriculum: expected an input of this version; resume with the"
    assert wrong in capsys.readouterr().err


# ---- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "descriptions"),
    [(RunSettings, RUN_HELP), (TrainingConfig, TRAINING_HELP)],
)
def test_every_setting_has_a_flag(settings, descriptions):
    """Each flag takes a value other than its default and returns it in its field's type."""
    names = [field.name for field in dataclasses.fields(settings)]
    assert list(descriptions) == names
    hints = typing.get_type_hints(settings)
    samples = {int: ["3"], float: ["0.25"], bool: [], str: ["float32"]}
    arguments, want = ["train", "--out", "x"], {}
    for name in names:
        hint = hints[name]
        if hint == float | None:
            hint = float
        if hint == RematChoice | bool:
            hint = RematChoice
        if hint == tuple[float, float]:
            words, value = ["0.5", "0.75"], (0.5, 0.75)
        elif typing.get_origin(hint) is typing.Literal:
            words = [typing.get_args(hint)[-1]]
            value = words[0]
        else:
            words = samples[hint]
            value = hint(words[0]) if words else True
        arguments += ["--" + name.replace("_", "-"), *words]
        want[name] = value
    values = flags.given_values(parser().parse_args(arguments), settings)
    assert values == want
    assert {name: type(value) for name, value in values.items()} == {
        name: type(value) for name, value in want.items()
    }


def test_flags_that_are_not_given_have_no_value():
    parsed = parser().parse_args(["train", "--out", "x"])
    assert (
        flags.given_values(parsed, TrainingConfig) == flags.given_values(parsed, RunSettings) == {}
    )


@pytest.mark.parametrize(
    ("words", "value"),
    [("--remat", True), ("--no-remat", False), ("--remat attention+norms", "attention+norms")],
)
def test_remat_is_a_switch_or_a_policy(words, value):
    parsed = parser().parse_args(["train", *words.split(), "--out", "x"])
    assert flags.given_values(parsed, TrainingConfig) == {"remat": value}


def test_a_switch_that_is_off_takes_no_policy(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["train", "--no-remat", "norms", "--out", "x"])
    assert "--no-remat: expected no value, got norms" in capsys.readouterr().err


def test_a_field_that_no_flag_can_read_is_noticed():
    @dataclasses.dataclass
    class Odd:
        mapping: dict[str, int]

    with pytest.raises(TypeError, match=r"dict\[str, int\]"):
        flags.add_fields(argparse.ArgumentParser(), "odd", Odd, {"mapping": "odd"}, {})


@pytest.mark.slow
def test_a_model_without_bos_trains(files, tmp_path):
    """Neither config.json nor the tokenizer names BOS. EOS is the tokenizer's."""
    (tmp_path / "tokenizer").mkdir()
    shutil.copy(DEMO / "tokenizer.json", tmp_path / "tokenizer")
    names = json.loads((DEMO / "tokenizer_config.json").read_text("utf-8"))
    names |= {"bos_token": None, "add_bos_token": False}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    config = json.loads((files / "config.json").read_text())
    config = {key: value for key, value in config.items() if not key.endswith("os_token_id")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    status = train(
        *("--config", tmp_path / "config.json", "--data", files / "text"),
        *("--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "run", "--steps", 2, *SMALL),
    )
    assert status == 0
    model, tokenizer = dsv3_jax.load(tmp_path / "run" / "model")
    assert tokenizer is not None
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, (1,))
    assert tokenizer.bos_token_id is None
    losses = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["losses"]
    assert np.isfinite(losses["main"])


# ---- export --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_float32_export_is_the_trained_model(trained, tmp_path, capsys):
    """The run's own bfloat16 directory has the rounded weights."""
    assert run("export", trained, tmp_path / "hf", "--to", "float32", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result == {"step": 4, "model": str(tmp_path / "hf"), "to": "float32"}
    exact, rounded = CheckpointReader(tmp_path / "hf"), CheckpointReader(trained / "model")
    assert set(exact) == set(rounded)
    for name in exact:
        assert exact[name].dtype == np.float32
        np.testing.assert_array_equal(
            exact[name][...].astype(rounded[name].dtype), rounded[name], err_msg=name
        )
        assert (rounded[name].dtype == np.float32) == name.endswith(BIAS)
    loaded, tokenizer = dsv3_jax.load(tmp_path / "hf", dtype=jnp.float32)
    assert tokenizer is not None
    for name, value in published_tensors(loaded).items():
        np.testing.assert_array_equal(value, exact[name])


@pytest.mark.slow
def test_export_checks_the_disk_first(trained, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    monkeypatch.setattr(export, "restore_model", None)  # takes long for a large model
    assert run("export", trained, tmp_path / "hf") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"dsv3 export: error: {tmp_path}/hf: expected [\d,]+ bytes of free disk, got 1,000", line
    )


@pytest.mark.slow
def test_export_of_an_earlier_step_in_float8(trained, tmp_path):
    assert run("export", trained, tmp_path / "two", "--step", 2, "--to", "fp8") == 0
    quantized, _ = dsv3_jax.load(tmp_path / "two", quantization="fp8")
    assert quantized.config.quantization is not None
    early = published_tensors(dsv3_jax.load(tmp_path / "two", dtype=jnp.float32)[0])
    late = published_tensors(dsv3_jax.load(trained / "model", dtype=jnp.float32)[0])
    assert any((early[name] != late[name]).any() for name in late if name.endswith(BIAS))


@pytest.mark.slow
def test_export_refuses(trained, tmp_path, capsys):
    def refused(*arguments: object) -> str:
        assert run("export", *arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "found no run.json" in refused(tmp_path, tmp_path / "new")
    assert "expected one of 2, 4, got 3" in refused(trained, tmp_path / "new", "--step", 3)
    assert "does not exist yet" in refused(trained, tmp_path)
    assert "--to" in refused(trained, tmp_path / "new", "--to", "int4")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "run.json").write_text("{}")
    assert "expected a training run with a checkpoint" in refused(
        tmp_path / "bare", tmp_path / "new"
    )
    assert not (tmp_path / "new").exists()
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["run.json"]


def test_low_rank_updates_of_a_run_in_python_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"expected a run of dsv3 train, .* got one started in Python"
    ):
        export._load_frozen(tmp_path, {}, dsv3_jax.ModelConfig.from_hf(CONFIG))


@pytest.mark.slow
def test_training_of_drafts_keeps_the_model(trained, files, tmp_path, capsys):
    """It reports the loss of drafts, and changes only the MTP layer."""
    out = tmp_path / "drafts"
    status = train(
        *("--from", trained / "model", "--data", files / "text", "--out", out, "--steps", 2),
        *("--draft-depth", 3, "--learning-rate", 0.01, *SMALL),
    )
    assert status == 0
    held_out = [e["held_out"] for e in read_metrics(out / "metrics.jsonl") if "held_out" in e]
    assert held_out[0]["drafts"] != held_out[-1]["drafts"]
    assert held_out[0]["main"] == held_out[-1]["main"]
    assert f"held out {held_out[-1]['drafts']:.4f}" in capsys.readouterr().err
    before, after = CheckpointReader(trained / "model"), CheckpointReader(out / "model")
    assert set(before) == set(after)
    config = json.loads((out / "model" / "config.json").read_text())
    drafter = f"model.layers.{config['num_hidden_layers']}."
    changed = {n for n in before if before[n][...].tobytes() != after[n][...].tobytes()}
    assert changed
    assert all(name.startswith(drafter) for name in changed)
    # An export and a resumed run find the frozen weights where the run found them.
    assert run("export", out, tmp_path / "again") == 0
    exported = CheckpointReader(tmp_path / "again")
    assert all(exported[n][...].tobytes() == after[n][...].tobytes() for n in after)
    assert train("--out", out, "--resume", "--steps", 3) == 0


@pytest.mark.slow
def test_fine_tuning_low_rank_updates_keeps_the_directory(trained, files, tmp_path, capsys):
    """From the weights that the first run wrote to files with some other values."""
    source, out = trained / "model", tmp_path / "run"
    status = train(
        *("--from", source, "--data", files / "text", "--out", out, "--steps", 3),
        *("--lora-rank", 2, "--learning-rate", 0.01, *SMALL),
    )
    assert status == 0
    tuned = out / "model"
    assert {path.name for path in tuned.iterdir()} == {path.name for path in source.iterdir()}
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tuned / name).read_bytes() == (source / name).read_bytes()
    before, after = CheckpointReader(source), CheckpointReader(tuned)
    changed = {n for n in before if before[n][...].tobytes() != after[n][...].tobytes()}
    assert "model.layers.0.self_attn.o_proj.weight" in changed
    assert all("self_attn" in name or "shared_experts" in name for name in changed)
    # An export finds the frozen weights where the run found them.
    assert run("export", out, tmp_path / "again") == 0
    exported = CheckpointReader(tmp_path / "again")
    assert set(exported) == set(after)
    for name in after:
        assert exported[name][...].tobytes() == after[name][...].tobytes()
    # Neither an export nor a resumed run accepts other weights.
    other = tmp_path / "other"
    shutil.copytree(source, other)
    (shard,) = other.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    assert train("--out", out, "--resume", "--from", other) == 2
    assert "error: weights.fingerprint differs: expected the weights" in capsys.readouterr().err
    assert train("--out", out, "--resume", "--from", source, "--steps", 4) == 0
    assert "extends the run from 3 to 4 steps" in capsys.readouterr().err
    record = json.loads((out / "run.json").read_text())
    record["plan"]["source"] = str(other)
    (out / "run.json").write_text(json.dumps(record))
    assert run("export", out, tmp_path / "wrong") == 2
    assert "error: weights.fingerprint differs" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["fp8", "int8"])
def test_fine_tuning_a_quantized_checkpoint(trained, files, tmp_path, form):
    """The frozen weights stay as stored. The result is their exact values, and for the updated
    ones the sum, in bfloat16."""
    source, out = tmp_path / "source", tmp_path / "run"
    convert(trained / "model", source, form)
    status = train(
        *("--from", source, "--data", files / "text", "--out", out, "--steps", 2),
        *("--lora-rank", 2, "--learning-rate", 0.01, *SMALL),
    )
    assert status == 0
    plan = json.loads((out / "run.json").read_text())["plan"]
    assert (plan["dtype"], plan["quantization"]) == ("bfloat16", form)
    before = published_tensors(dsv3_jax.load(source, dtype=jnp.bfloat16)[0])
    after = CheckpointReader(out / "model")
    changed = {n for n in after if before[n].tobytes() != after[n][...].tobytes()}
    assert "model.layers.0.self_attn.o_proj.weight" in changed
    assert all("self_attn" in name or "shared_experts" in name for name in changed)
    assert run("export", out, tmp_path / "again") == 0
    exported = CheckpointReader(tmp_path / "again")
    assert all(exported[n][...].tobytes() == after[n][...].tobytes() for n in after)
    assert train("--out", out, "--resume", "--steps", 3) == 0


@pytest.mark.slow
def test_low_rank_updates_of_an_earlier_version(trained, files, tmp_path, monkeypatch):
    """Earlier versions froze float32 weights, did not record this, and had their fingerprint."""
    out, float32 = tmp_path / "run", {"dtype": "float32", "quantization": None}
    monkeypatch.setattr("dsv3_jax.cli.train._base", lambda *arguments: float32)
    status = train(
        *("--from", trained / "model", "--data", files / "text", "--out", out, "--steps", 2),
        *("--lora-rank", 2, *SMALL),
    )
    assert status == 0
    monkeypatch.undo()
    recorded = json.loads((out / "run.json").read_text())
    for name in float32:
        del recorded["plan"][name]
    (out / "run.json").write_text(json.dumps(recorded))
    assert train("--out", out, "--resume", "--steps", 3) == 0
    assert run("export", out, tmp_path / "again") == 0


@pytest.mark.parametrize(
    ("changes", "to", "layout", "want"),
    [
        ({}, "bf16", None, ("bfloat16", "fp8")),
        ({"quantization": INT8, "dtype": "float32"}, "bf16", None, ("float32", "int8")),
        ({"quantization": None}, "fp8", None, ("bfloat16", None)),
        ({}, "float32", None, ("float32", "fp8")),
        ({}, "bf16", "train", ("bfloat16", None)),  # FSDP cannot shard blocks
        ({}, "bf16", "tensor_parallel", ("bfloat16", "fp8")),
        (
            {"quantization": BlockQuantization(modules_to_not_convert=("layers.0",))},
            "bf16",
            None,
            ("bfloat16", None),
        ),
    ],
)
def test_form_of_frozen_weights(changes, to, layout, want):
    config = dataclasses.replace(presets.DEEPSEEK_V3, **changes)
    form = _base(config, to, layout and abstract_layout(layout, 8))
    assert form == dict(zip(("dtype", "quantization"), want, strict=True))


@pytest.mark.slow
def test_a_store_to_begin_with(trained, files, tmp_path):
    """It also has the config, the tokenizer and exactly the same weights."""
    convert(trained / "model", tmp_path / "store", "bf16")
    for name, source in (("one", trained / "model"), ("other", tmp_path / "store")):
        arguments = ("--from", source, "--data", files / "text", "--out", tmp_path / name)
        assert train(*arguments, "--steps", 1, *SMALL) == 0
    one, other = (CheckpointReader(tmp_path / name / "model") for name in ("one", "other"))
    assert {n: t[...].tobytes() for n, t in one.items()} == {
        n: t[...].tobytes() for n, t in other.items()
    }
    assert (tmp_path / "other" / "model" / "tokenizer.json").is_file()


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_computes_the_same_logits(trained, tmp_path):
    """transformers leaves out the MTP layer and loads the rest without warnings."""
    import torch
    from transformers import DeepseekV3ForCausalLM

    assert run("export", trained, tmp_path / "hf", "--to", "float32") == 0
    theirs, info = DeepseekV3ForCausalLM.from_pretrained(
        tmp_path / "hf",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    tokens = np.random.default_rng(3).integers(0, 2048, (2, 44))
    ours, _ = forward(dsv3_jax.load(tmp_path / "hf", dtype=jnp.float32)[0], tokens)
    with torch.no_grad():
        logits = theirs.eval()(torch.from_numpy(tokens), use_cache=False).logits.numpy()
    assert relative_error(ours, logits) < 1e-5


# ---- progress ------------------------------------------------------------------------------------


def test_the_line_of_progress():
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=False)
    progress = TrainingProgress(100, console=console)
    losses = {"main": 2.0, "mtp": 3.0, "mtp_agreement": 0.25}
    timing = {"tokens_per_second": 59500.0, "mfu": 0.392, "seconds_left": 5400.0}
    with progress:
        progress.show({"step": 10, "losses": losses, **timing, "peak_memory_bytes": 83_100_000_000})
        progress.show({"step": 20, "losses": losses})  # an entry of an earlier version
    assert output.getvalue().splitlines() == [
        "dsv3: step 10/100, loss 2.0000, MTP 3.0000 (25% agree), 59,500 tokens/s, MFU 39.2%,"
        " 83.1 GB, 1 h 30 min to go",
        "dsv3: step 20/100, loss 2.0000, MTP 3.0000 (25% agree)",
    ]

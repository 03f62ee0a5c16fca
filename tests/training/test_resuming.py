"""Tests of a run's directory: initial weights, length, killed starts, divergence and memory.

Only the test of an extended run computes training steps.
"""

import contextlib
import dataclasses
import errno
import gc
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from dsv3_jax import tokenizer_files
from dsv3_jax.initialization import random_model
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.training import record
from dsv3_jax.training.checkpoints import recorded_steps
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.evaluation import Evaluation
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.metrics_log import Entry, MetricsLog, read_metrics
from dsv3_jax.training.run import check, train
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.state import TrainingState
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trainer import Trainer
from tests.training.tiny import RUN

ROOT = Path(__file__).parents[2]
SETTINGS = RunSettings(batch=2, length=12, log_every=10, eval_batches=1)
_NOISE = np.random.default_rng(2).integers(1, 32, 700).astype(np.uint16)
CORPUS = Corpus(_NOISE[:600], _NOISE[600:])
LORA = dataclasses.replace(RUN, lora_rank=2)


@pytest.fixture
def no_evaluation(monkeypatch):
    monkeypatch.setattr(Evaluation, "losses", lambda self, state: {"main": 1.0})


class StopError(Exception):
    pass


def stop_at_once(entry: Entry) -> None:
    raise StopError


def refused(*arguments, **settings) -> str:
    with pytest.raises(ValueError, match=r"expected|differs|cannot|kept") as error:
        train(*arguments, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def other(model) -> DeepSeekV3:
    """The model with a different value in one of its frozen weights."""
    changed = nnx.clone(model)
    weight = changed.lm_head.weight
    weight.set_value(weight.get_value().at[5, 7].multiply(1.001))
    return changed


# ---- the weights that a run began with -----------------------------------------------------------


@pytest.mark.parametrize("config", [LORA, RUN], ids=["low-rank updates", "all weights"])
@pytest.mark.usefixtures("no_evaluation")
def test_a_run_resumes_only_with_its_initial_weights(config, model, other, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(StopError):
        train(model, CORPUS, out, config, SETTINGS, report=stop_at_once)
    before = (out / "run.json").read_bytes()
    line = refused(other, CORPUS, out, config, SETTINGS, resume=True)
    assert line.startswith("weights.fingerprint differs: expected the weights that the run in ")
    assert (out / "run.json").read_bytes() == before
    with pytest.raises(StopError):
        train(nnx.clone(model), CORPUS, out, config, SETTINGS, resume=True, report=stop_at_once)


@pytest.mark.usefixtures("no_evaluation")
def test_a_run_without_a_fingerprint_is_refused(model, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(StopError):
        train(model, CORPUS, out, LORA, SETTINGS, report=stop_at_once)
    content = json.loads((out / "run.json").read_text())
    assert len(content.pop("weights")["fingerprint"]) == 32
    (out / "run.json").write_text(json.dumps(content))
    line = refused(model, CORPUS, out, LORA, SETTINGS, resume=True)
    assert "run.json has no fingerprint of the weights that the run began with" in line


# ---- other versions ------------------------------------------------------------------------------

OLD_RECORD = Path(__file__).parent / "run_of_2026_11_24.json"
"""Record of a run with LORA, SETTINGS and CORPUS. Its version had fewer settings."""


@pytest.fixture
def old_run(tmp_path) -> Path:
    shutil.copyfile(OLD_RECORD, tmp_path / "run.json")
    return tmp_path


@pytest.mark.parametrize(("recorded", "value"), [(False, "none"), (True, "full")])
def test_recomputation_was_recorded_as_a_boolean(recorded, value, old_run):
    content = json.loads(OLD_RECORD.read_text())
    content["training"]["remat"] = recorded
    (old_run / "run.json").write_text(json.dumps(content))
    config = dataclasses.replace(LORA, remat=recorded)
    assert config.remat == value
    defaults = {"training": dataclasses.asdict(LORA)}
    record.compare(old_run, {"training": dataclasses.asdict(config)}, defaults)
    other = dataclasses.replace(LORA, remat="norms")
    with pytest.raises(ValueError, match=f"remat differs: .* began with '{value}', got 'norms'"):
        record.compare(old_run, {"training": dataclasses.asdict(other)}, defaults)


def test_a_chosen_policy_is_recorded_and_resumed(model, tmp_path, monkeypatch):
    """Although the resumed run would choose another."""
    out = tmp_path / "run"

    def choose(policy):
        def fitting(make_trainer, config, settings):
            return dataclasses.replace(config, remat=policy) if config.remat == "auto" else config

        monkeypatch.setattr("dsv3_jax.training.run.fitting", fitting)

    assert LORA.remat == "auto"
    choose("norms")
    with pytest.raises(StopError):
        train(model, CORPUS, out, LORA, SETTINGS, report=stop_at_once)
    assert json.loads((out / "run.json").read_text())["training"]["remat"] == "norms"
    choose("full")
    assert check(model, out, LORA, SETTINGS, resume=True).config.remat == "norms"
    line = refused(
        model, CORPUS, out, dataclasses.replace(LORA, remat="full"), SETTINGS, resume=True
    )
    assert "remat differs" in line


@pytest.mark.usefixtures("no_evaluation")
def test_a_run_of_an_earlier_version_resumes(model, old_run):
    """Settings that it did not have are the defaults, and are recorded then."""
    before = json.loads(OLD_RECORD.read_text())
    new = {field.name for field in dataclasses.fields(LORA)} - before["training"].keys()
    assert new >= {"indexer_stage", "draft_depth"}
    line = refused(
        model, CORPUS, old_run, dataclasses.replace(LORA, lora_rank=0, draft_depth=1), SETTINGS,
        resume=True,
    )  # fmt: skip
    assert "resume: training.draft_depth differs" in line
    assert "began with 0, got 1" in line
    with pytest.raises(StopError):
        train(model, CORPUS, old_run, LORA, SETTINGS, resume=True, report=stop_at_once)
    after = json.loads((old_run / "run.json").read_text())
    current = dataclasses.replace(LORA, remat="none")  # the only policy of that version
    assert after["training"] == json.loads(json.dumps(dataclasses.asdict(current)))
    assert {**after, "training": before["training"]} == before


def test_a_setting_of_another_version_is_refused(model, old_run):
    content = json.loads(OLD_RECORD.read_text())
    content["training"]["dropout"] = 0.5
    (old_run / "run.json").write_text(json.dumps(content))
    line = refused(model, CORPUS, old_run, LORA, SETTINGS, resume=True)
    assert line.startswith("resume: training.dropout: expected a setting of this version, got one")
    content["training"] = [1]
    (old_run / "run.json").write_text(json.dumps(content))
    line = refused(model, CORPUS, old_run, LORA, SETTINGS, resume=True)
    assert line.endswith("run.json: training: expected a JSON object, got list")


def test_a_model_recorded_without_a_newer_key_is_the_same(model, old_run):
    """An optional key that this version writes has its default in the record."""
    content = json.loads(OLD_RECORD.read_text())
    del content["model"]["rope_interleave"]
    (old_run / "run.json").write_text(json.dumps(content))
    record.compare(old_run, {"model": model.config.to_hf()})
    content["model"]["kv_lora_rank"] = None
    (old_run / "run.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"run\.json: model: .*kv_lora_rank"):
        record.compare(old_run, {"model": model.config.to_hf()})


# ---- the start -----------------------------------------------------------------------------------


class KilledError(BaseException):
    pass


@pytest.fixture
def tokenizer(tmp_path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_text("{}")
    return source


IDENTITY = {"training": {"steps": 3}, "weights": {"fingerprint": "f"}}


def killed(*args, **kwargs):
    raise KilledError


@pytest.mark.parametrize("operation", ["copy", "publish"])
def test_a_start_killed_after_its_record_can_be_resumed(
    operation, tokenizer, tmp_path, monkeypatch
):
    """It is killed while it copies the tokenizer's files, and before it renames the copy."""
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        if operation == "copy":
            patch.setattr(tokenizer_files.shutil, "copyfile", killed)
        else:
            patch.setattr(record, "publish_directory", killed)
        with pytest.raises(KilledError):
            record.begin(out, IDENTITY, {}, tokenizer)
    with pytest.raises(ValueError, match="or to resume the run in it"):
        record.begin(out, IDENTITY, {}, tokenizer)
    record.compare(out, IDENTITY)
    record.resume(out, IDENTITY, "f", tokenizer)
    assert {path.name for path in out.iterdir()} == {"run.json", "tokenizer"}
    copied = {path.name for path in (out / "tokenizer").iterdir()}
    assert copied == {"tokenizer.json", "tokenizer_config.json"}


def test_a_start_killed_before_its_record_can_be_repeated(tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", killed)
        patch.setattr(Path, "unlink", killed)  # a killed process does not clean up
        with pytest.raises(KilledError):
            record.begin(out, IDENTITY, {}, tokenizer)
    (leftover,) = out.iterdir()
    assert leftover.suffix == ".partial"
    record.begin(out, IDENTITY, {}, tokenizer)
    assert {path.name for path in out.iterdir()} == {"run.json", "tokenizer"}


def test_a_damaged_record_is_refused(tmp_path):
    for content, message in (("{", "expected JSON"), ("[1]", "expected a JSON object, got list")):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            record.read(tmp_path)


def test_a_directory_that_cannot_be_written_is_refused_first(model, tmp_path):
    (tmp_path / "file").write_text("precious")
    for out in (tmp_path / "file" / "run", Path("/proc/run")):
        line = refused(model, CORPUS, out, RUN, SETTINGS)
        assert line.startswith(f"{out}: cannot write to ")


def test_a_disk_without_space_for_the_checkpoints_is_refused_first(model, tmp_path, monkeypatch):
    """While the last of five is saved, the three before it are still there."""
    leaves = jax.tree.leaves(Trainer(model, RUN).abstract_state)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    usage = shutil.disk_usage(tmp_path)
    settings = dataclasses.replace(SETTINGS, save_every=5, keep=3)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4 * size - 1))
    line = refused(model, CORPUS, tmp_path / "run", RUN, settings)
    assert line.startswith(f"{tmp_path / 'run'}: expected {4 * size:,} bytes of free disk for ")
    assert f"4 checkpoints of {size:,} bytes" in line
    assert list(tmp_path.iterdir()) == []
    for fewer in ({"keep": 2}, {"save_every": 8}, {"save_every": 0}, {"keep": 0}):
        check(model, tmp_path / "run", RUN, dataclasses.replace(settings, **fewer))
    with pytest.raises(ValueError, match=f"and {2 * size:,} bytes of other files"):
        check(
            model, tmp_path, RUN, dataclasses.replace(settings, save_every=8), more_bytes=size * 2
        )


# ---- length --------------------------------------------------------------------------------------

CONSTANT = dataclasses.replace(
    RUN,
    steps=6,
    final_learning_rate=RUN.learning_rate,
    final_mtp_weight=RUN.mtp_weight,
    bias_update_end=1.0,
)


@pytest.mark.slow
@pytest.mark.usefixtures("no_evaluation")
def test_a_finished_run_can_be_extended(model, tmp_path):
    """With constant schedules it equals a run that had the final length from the start."""
    dense = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}  # compiles sooner
    model = random_model(dataclasses.replace(model.config, **dense), 0)
    want = train(model, CORPUS, tmp_path / "straight", CONSTANT, SETTINGS)
    out, short = tmp_path / "extended", dataclasses.replace(CONSTANT, steps=3)
    assert train(model, CORPUS, out, short, SETTINGS).step == 3
    got = train(model, CORPUS, out, CONSTANT, SETTINGS, resume=True)
    assert (got.step, got.finished) == (6, True)
    assert [entry["step"] for entry in got.metrics] == [0, 1, 3, 4, 6]
    assert got.metrics[-1]["losses"] == want.metrics[-1]["losses"]
    pairs = zip(*(jax.tree.leaves(nnx.state(run.model)) for run in (got, want)), strict=True)
    for one, other in pairs:
        np.testing.assert_array_equal(one, other)
    recorded = json.loads((out / "run.json").read_text())
    assert (recorded["training"]["steps"], recorded["extended"]) == (6, [3])
    line = refused(model, CORPUS, out, short, SETTINGS, resume=True)
    assert line.endswith("began with 6, got 3; expected at least as many")


# ---- the end -------------------------------------------------------------------------------------


def fake_step(nan_step: int | None = None):
    """Returns a replacement of `Trainer.step` that computes nothing. The norm of its gradient is
    NaN in step ``nan_step``."""

    def step(self: Trainer, state: TrainingState, tokens) -> tuple[TrainingState, Metrics]:
        number = int(state.step) + 1
        one, none = jnp.float32(1), jnp.int32(0)
        norm = jnp.float32(np.nan if number == nan_step else 1)
        metrics = Metrics(
            Losses(*[one] * len(Losses._fields)), norm, one, one, one, none, jnp.ones((2, 8), int)
        )
        return state._replace(step=jnp.int32(number)), metrics

    return step


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("log_every", [0, 1, 10])
def test_divergence_names_its_first_step_and_overwrites_nothing(
    log_every, model, tmp_path, monkeypatch
):
    """This does not depend on the logging interval, and the entries before that step are
    complete."""
    monkeypatch.setattr(Trainer, "step", fake_step(nan_step=5))
    settings = dataclasses.replace(SETTINGS, log_every=log_every, save_every=4)
    line = refused(model, CORPUS, tmp_path, RUN, settings)
    assert line == (
        "step 5: gradient_norm is nan; expected a finite number: the run has diverged; "
        "the checkpoint of step 4 is kept"
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4"]
    assert read_metrics(tmp_path / "metrics.jsonl")[-1]["step"] == 4


@contextlib.contextmanager
def full_disk(size: int):
    """Lets no file grow beyond ``size`` bytes. Unlike a disk without space, it needs no mount."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


FULL = {
    "by the system": OSError(errno.ENOSPC, "No space left on device"),
    "by tensorstore": ValueError(
        'RESOURCE_EXHAUSTED: Error writing "1.0.mu.norm.weight.value/0" in OCDBT database: Failed'
        f" to write 842 bytes to file 29: No space left on device [os_error_code='{errno.ENOSPC}']"
    ),
}


@pytest.mark.usefixtures("no_evaluation")
@pytest.mark.parametrize("reported", FULL)
def test_a_disk_that_fills_up_keeps_the_checkpoint_before(reported, model, tmp_path, monkeypatch):
    """The command prints one line, and the run can be resumed."""
    monkeypatch.setattr(Trainer, "step", fake_step())
    settings = dataclasses.replace(SETTINGS, save_every=4)
    folder, save = tmp_path / "checkpoints", ocp.CheckpointManager.save

    def save_to_full_disk(manager, step, **kwargs):
        if step != 8:
            return save(manager, step, **kwargs)
        (folder / "8.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
        raise FULL[reported]

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", save_to_full_disk)
        line = refused(model, CORPUS, tmp_path, RUN, settings)
    assert line == f"{folder / '8'}: No space left on device; the checkpoint of step 4 is kept"
    assert [path.name for path in folder.iterdir()] == ["4"]
    (folder / "12.orbax-checkpoint-tmp").mkdir()  # as a killed process leaves it
    assert train(model, CORPUS, tmp_path, RUN, settings, resume=True).finished
    assert sorted(path.name for path in folder.iterdir()) == ["20", "24"]


@pytest.mark.usefixtures("no_evaluation")
def test_other_errors_of_a_save_are_not_hidden(model, tmp_path, monkeypatch):
    def fail(manager, step, **kwargs):
        raise TypeError("expected an array")

    monkeypatch.setattr(Trainer, "step", fake_step())
    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(TypeError, match="expected an array"):
        train(model, CORPUS, tmp_path, RUN, dataclasses.replace(SETTINGS, save_every=4))


FULL_DISK = """
import sys
from pathlib import Path

from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import random_model
from dsv3_jax.training.checkpoints import CheckpointStore
from tests.training.test_resuming import *
from tests.training.tiny import CONFIG

Trainer.step, Evaluation.losses = fake_step(), lambda self, state: {"main": 1.0}
save = CheckpointStore.save


def save_to_full_disk(store, state, batches):
    with full_disk(4096 if int(state.step) == 8 else 2**30):
        save(store, state, batches)


CheckpointStore.save = save_to_full_disk
model = random_model(ModelConfig.from_hf(CONFIG), 0)
try:
    train(model, CORPUS, sys.argv[1], RUN, dataclasses.replace(SETTINGS, save_every=4))
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_orbax_on_a_disk_that_fills_up(tmp_path):
    """In a process of its own, because orbax leaves event loops and futures behind."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tmp_path / "run"],
        capture_output=True,
        text=True,
        env=environment,
        check=True,
    )
    folder = tmp_path / "run" / "checkpoints"
    assert done.stdout == f"{folder / '8'}: File too large; the checkpoint of step 4 is kept\n"
    assert recorded_steps(folder) == [4]


@pytest.mark.usefixtures("no_evaluation")
def test_metrics_that_cannot_be_written_end_the_run(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", fake_step())
    append, path = MetricsLog.append, tmp_path / "metrics.jsonl"

    def append_to_full_disk(log: MetricsLog, entry: Entry) -> None:
        with full_disk(path.stat().st_size + 9 if entry["step"] == 5 else 2**30):
            append(log, entry)

    monkeypatch.setattr(MetricsLog, "append", append_to_full_disk)
    settings = dataclasses.replace(SETTINGS, save_every=4, log_every=1)
    line = refused(model, CORPUS, tmp_path, RUN, settings)
    assert line == f"{path}: File too large; the checkpoint of step 4 is kept"
    assert [entry["step"] for entry in read_metrics(path)][:5] == [0, 1, 2, 3, 4]


@pytest.mark.usefixtures("no_evaluation")
def test_divergence_is_noticed_between_log_entries(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", fake_step(nan_step=5))
    settings = dataclasses.replace(SETTINGS, log_every=0)
    config = dataclasses.replace(RUN, steps=1000)
    steps = []
    monkeypatch.setattr(Trainer, "shard_batch", lambda self, tokens: steps.append(1))
    assert "step 5: " in refused(model, CORPUS, tmp_path, config, settings)
    assert len(steps) < 110


@pytest.mark.usefixtures("no_evaluation")
def test_a_request_to_stop_saves_the_step(model, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", fake_step())
    answers = iter([False, False, True])
    stopped = train(model, CORPUS, tmp_path, RUN, SETTINGS, should_stop=lambda: next(answers))
    assert (stopped.step, stopped.finished) == (3, False)
    assert "held_out" not in stopped.metrics[-1], "expected no evaluation after a request to stop"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    resumed = train(model, CORPUS, tmp_path, RUN, SETTINGS, resume=True)
    assert (resumed.step, resumed.finished) == (RUN.steps, True)


# ---- memory --------------------------------------------------------------------------------------


def live_bytes(excluded: set[int]) -> int:
    """Returns the size of all live arrays except those with these ids."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays() if id(array) not in excluded)


@pytest.mark.slow
@pytest.mark.usefixtures("no_evaluation")
def test_three_times_the_weights_are_in_memory(model, tmp_path):
    """They are the weights and two moments. The initial weights are released, in a resumed run
    too."""
    graph, state = nnx.split(model)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))

    def make() -> DeepSeekV3:
        return nnx.merge(graph, jax.tree.map(jnp.copy, state))

    gc.collect()
    earlier = jax.live_arrays()  # kept alive, so that no new array has the id of one of them
    earlier_ids = set(map(id, earlier))
    ratios = []

    def measure(entry: Entry) -> None:
        ratios.append(live_bytes(earlier_ids) / size)
        raise StopError

    out = tmp_path / "run"
    for resume in (False, True):
        with pytest.raises(StopError):
            train(make, CORPUS, out, RUN, SETTINGS, report=measure, resume=resume)
    assert ratios == pytest.approx([3, 3], abs=0.05)


@pytest.mark.slow
def test_init_can_be_repeated_while_the_model_exists(model):
    model = nnx.clone(model)
    trainer = Trainer(model, RUN)
    jax.eval_shape(trainer.init)
    states = (jax.tree.leaves(trainer.init()) for _ in range(2))
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)
    del model
    gc.collect()
    with pytest.raises(ValueError, match=r"^init: expected the model that"):
        trainer.init()
    assert int(trainer.abstract_state.step.size) == 1

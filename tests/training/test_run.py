"""Tests of whole runs of a tiny model: their files, resuming, and refused settings."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dsv3_jax.training.batches import TrainingBatches
from dsv3_jax.training.corpus import Corpus
from dsv3_jax.training.evaluation import evaluate
from dsv3_jax.training.losses import Losses
from dsv3_jax.training.metrics_log import Entry, MetricsLog, read_metrics
from dsv3_jax.training.run import train
from dsv3_jax.training.session import TrainingResult
from dsv3_jax.training.settings import RunSettings
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trainer import Trainer
from dsv3_jax.viz.training import draw_run
from tests.training.tiny import RUN

CONFIG = dataclasses.replace(RUN, steps=8)
SETTINGS = RunSettings(
    batch=2, length=12, seed=5, log_every=2, eval_every=4, eval_batches=2, save_every=3, keep=2
)
_NOISE = np.random.default_rng(2).integers(1, 32, 700).astype(np.uint16)
_NOISE[::9] = 0
CORPUS = Corpus(_NOISE[:600], _NOISE[600:])
CLOCK = ("seconds", "tokens_per_second", "mfu", "seconds_left", "peak_memory_bytes")


def timeless(entries: list[Entry]) -> list[Entry]:
    """Returns the entries without their times."""
    return [{name: e[name] for name in e if name not in CLOCK} for e in entries]


def weights(trained: TrainingResult) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(trained.model))]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory) -> tuple[Path, TrainingResult]:
    out = tmp_path_factory.mktemp("runs") / "whole"
    return out, train(model, CORPUS, out, CONFIG, SETTINGS)


class StopError(Exception):
    pass


def stop_after(step: int):
    """Returns a report callback that ends the run as abruptly as a crash, at an entry."""

    def report(entry: Entry) -> None:
        if entry["step"] >= step:
            raise StopError

    return report


# ---- what a run writes ---------------------------------------------------------------------------


@pytest.mark.slow
def test_entries_are_written_when_they_are_due(whole):
    """Step 0 has an evaluation, step 1 is the first after compilation, steps 3 and 6 are saved, and
    step 8 is the last."""
    out, trained = whole
    entries = read_metrics(out / "metrics.jsonl")
    assert entries == trained.metrics
    assert [entry["step"] for entry in entries] == [0, 1, 2, 3, 4, 6, 8]
    assert [entry["step"] for entry in entries if "held_out" in entry] == [0, 4, 8]
    assert trained.finished
    assert trained.step == 8


@pytest.mark.slow
def test_every_entry_is_complete(whole):
    first, *entries = whole[1].metrics
    names = {*Metrics._fields, *CLOCK, "step"}
    assert first.keys() == {"step", "seconds", "held_out"}
    for entry in entries:
        assert entry.keys() - {"held_out"} == names
        assert entry["losses"].keys() == set(Losses._fields)
        assert len(entry["expert_load"]) == 2  # the MoE layer and the MTP layer
        assert all(1 <= load <= 8 for load in entry["expert_load"])
        assert entry["mfu"] is None  # unknown for a CPU
    assert entries[0]["tokens_per_second"] is None
    assert all(entry["tokens_per_second"] > 0 for entry in entries[1:])
    held_out = [entry["held_out"] for entry in (first, *entries) if "held_out" in entry]
    assert all(losses.keys() == set(Losses._fields) for losses in held_out)
    seconds = [entry["seconds"] for entry in (first, *entries)]
    assert seconds == sorted(seconds)


@pytest.mark.slow
def test_numbers_are_the_trainers(model, whole):
    """Repeats the steps with a Trainer. JSON preserves each float exactly."""
    trainer = Trainer(model, CONFIG)
    batches = TrainingBatches(CORPUS.train, 2, 12, seed=5)
    state = trainer.init()
    entries = {entry["step"]: entry for entry in read_metrics(whole[0] / "metrics.jsonl")}
    for step in (1, 2):
        state, metrics = trainer.step(state, jnp.asarray(next(batches)))
        entry = entries[step]
        for name, loss in metrics.losses._asdict().items():
            assert np.float32(entry["losses"][name]) == loss
        assert np.float32(entry["gradient_norm"]) == metrics.gradient_norm
        assert np.float32(entry["learning_rate"]) == metrics.learning_rate
        load = np.asarray(metrics.expert_load)
        np.testing.assert_allclose(entry["expert_load"], load.max(1) / load.mean(1))


@pytest.mark.slow
def test_held_out_losses_are_the_models(model, whole):
    _, trained = whole
    for one, entry in ((model, trained.metrics[0]), (trained.model, trained.metrics[-1])):
        assert evaluate(one, CORPUS, CONFIG, SETTINGS) == entry["held_out"]
    assert trained.metrics[0]["held_out"] != trained.metrics[-1]["held_out"]


@pytest.mark.slow
def test_the_last_checkpoints_are_kept(whole):
    assert sorted(path.name for path in (whole[0] / "checkpoints").iterdir()) == ["6", "8"]


@pytest.mark.slow
def test_record(whole):
    record = json.loads((whole[0] / "run.json").read_text())
    assert record["training"]["learning_rate"] == 0.02
    assert record["data"]["batch"] == 2
    assert record["data"]["train"].startswith("600 tokens")
    assert record["model"]["hidden_size"] == 16


@pytest.mark.slow
def test_pictures(whole, tmp_path):
    out = tmp_path / "copy"
    out.mkdir()
    with pytest.raises(ValueError, match="expected the directory of a run"):
        draw_run(out)
    for name in ("run.json", "metrics.jsonl", "expert_load.npy"):
        shutil.copy(whole[0] / name, out)
    for path in draw_run(out):
        content = path.read_bytes()
        assert content[:8] == b"\x89PNG\r\n\x1a\n"
        assert content[-8:-4] == b"IEND"
        width, height = (int.from_bytes(content[i : i + 4]) for i in (16, 20))
        assert width > 500 < height + 100
    assert np.load(out / "expert_load.npy").shape == (2, 8)


# ---- resuming ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_resumed_run_is_the_same_run(stopped_at, model, whole, tmp_path):
    """It was stopped before its first checkpoint, or between two checkpoints."""
    out = tmp_path / "run"
    with pytest.raises(StopError):
        train(model, CORPUS, out, CONFIG, SETTINGS, report=stop_after(stopped_at))
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "los')  # as after a crash in the middle of a line
    resumed = train(model, CORPUS, out, CONFIG, SETTINGS, resume=True)
    got = {entry["step"]: entry for entry in timeless(resumed.metrics)}
    assert read_metrics(out / "metrics.jsonl") == resumed.metrics
    assert [entry["step"] for entry in resumed.metrics] == sorted(got), "expected no step twice"
    want = {entry["step"]: entry for entry in timeless(whole[1].metrics)}
    for step, entry in want.items():
        assert got[step] == entry
    # A session also logs its first step.
    assert got.keys() - want.keys() <= {4}
    for one, other in zip(weights(resumed), weights(whole[1]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_a_run_that_ends_at_its_time_limit_can_be_resumed(model, whole, tmp_path):
    out = tmp_path / "run"
    brief = dataclasses.replace(SETTINGS, max_minutes=1e-9)
    stopped = train(model, CORPUS, out, CONFIG, brief)
    assert not stopped.finished
    assert stopped.step == 1
    assert "held_out" in stopped.metrics[-1]
    resumed = train(model, CORPUS, out, CONFIG, SETTINGS, resume=True)
    assert resumed.finished
    last, want = timeless(resumed.metrics)[-1], timeless(whole[1].metrics)[-1]
    assert last == want


@pytest.mark.slow
def test_resuming_a_finished_run_returns_its_result(model, whole):
    out, trained = whole
    again = train(model, CORPUS, out, CONFIG, SETTINGS, resume=True)
    assert again.metrics == trained.metrics
    for one, other in zip(weights(again), weights(trained), strict=True):
        np.testing.assert_array_equal(one, other)


def refused(model, out: Path, corpus=CORPUS, config=CONFIG, settings=SETTINGS, **kwargs) -> str:
    with pytest.raises(ValueError, match=r"expected|lacks|not|no text|differs|has") as error:
        train(model, corpus, out, config, settings, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.slow
def test_another_run_is_not_resumed(model, whole):
    out = whole[0]

    def refused_change(**changed) -> str:
        return refused(model, out, resume=True, **changed)

    hotter = dataclasses.replace(CONFIG, learning_rate=0.05)
    assert "training.learning_rate differs: " in refused_change(config=hotter)
    assert "began with 0.02, got 0.05" in refused_change(config=hotter)
    for name, value in {"batch": 4, "length": 10, "seed": 6}.items():
        settings = dataclasses.replace(SETTINGS, **{name: value})
        assert f"data.{name} differs" in refused_change(settings=settings)
    other = Corpus(CORPUS.train[::-1], CORPUS.held_out)
    assert "data.train differs: " in refused_change(corpus=other)
    assert "600 tokens, CRC-32" in refused_change(corpus=other)
    model = nnx.clone(model)
    model.config = dataclasses.replace(model.config, routed_scaling_factor=1.5)
    assert "model.routed_scaling_factor differs" in refused(model, out, resume=True)


def test_nothing_to_resume(model, tmp_path):
    assert "found no run.json" in refused(model, tmp_path / "new", resume=True)
    keepless = dataclasses.replace(SETTINGS, keep=0)
    assert "keeps checkpoints" in refused(model, tmp_path / "new", settings=keepless, resume=True)


# ---- what is refused -----------------------------------------------------------------------------


def test_bad_runs_leave_no_directory(model, tmp_path):
    def with_settings(**changed) -> str:
        return refused(model, tmp_path / "run", settings=dataclasses.replace(SETTINGS, **changed))

    assert "expected at least one sequence of 100 tokens, got 60" in refused(
        model,
        tmp_path / "run",
        corpus=Corpus(CORPUS.train[:60], CORPUS.held_out),
        settings=dataclasses.replace(SETTINGS, length=100),
    )
    assert "length: expected 3 to 128 for this model, got 129" in with_settings(length=129)
    assert "length: expected 3 to 128 for this model, got 2" in with_settings(length=2)
    thirds = dataclasses.replace(CONFIG, accumulate=3)
    assert "multiple of accumulate=3, got 2" in refused(model, tmp_path / "run", config=thirds)
    ranked = dataclasses.replace(CONFIG, lora_rank=100)
    assert "lora_rank: expected at most" in refused(model, tmp_path / "run", config=ranked)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_directory_in_use_is_left_alone(model, whole, tmp_path):
    assert "expected a new directory, or to resume" in refused(model, whole[0])
    (tmp_path / "file").write_text("precious")
    assert "expected a new directory" in refused(model, tmp_path)
    assert "expected a new directory" in refused(model, tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "value"),
    [("batch", 0), ("length", 1), ("log_every", -1), ("keep", -1), ("max_minutes", 0.0)],
)
def test_bad_settings(name, value):
    with pytest.raises(ValueError, match=f"{name}: expected .*, got {value}"):
        RunSettings(**{name: value})


def test_divergence_is_refused(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"step": 1, "losses": {"main": 2.0}, "gradient_norm": 1.0})
    for diverged in (
        {"losses": {"main": float("nan")}, "gradient_norm": 1.0},
        {"losses": {"main": 2.0}, "gradient_norm": float("inf")},
        {"held_out": {"main": float("nan")}},
    ):
        with pytest.raises(ValueError, match=r"step 2: .*the run has diverged"):
            log.append({"step": 2, **diverged})
    log.close()
    assert [entry["step"] for entry in read_metrics(tmp_path / "metrics.jsonl")] == [1]


def test_the_message_about_a_damaged_line_has_its_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for damaged in ("\0\0\0", "[1]", '{"losses": 1}'):
        path.write_text('{"step": 1}\n' + damaged + '\n{"step": 3}\n')
        with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: expected a JSON object"):
            read_metrics(path)

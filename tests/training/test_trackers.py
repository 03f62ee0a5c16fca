"""Trackers: the libraries' own, where they are installed, and fakes with the same functions."""

import logging
import sys
import types

import pytest

from dsv3_jax.training import trackers
from dsv3_jax.training.trackers import GuardedTracker, make_tracker, parse, scalars

ENTRY = {
    "step": 3,
    "losses": {"main": 2.5, "mtp": 3.0},
    "expert_load": [1.5, 2.0],
    "mfu": None,
    "tokens_per_second": 100.0,
}
SCALARS = {"losses/main": 2.5, "losses/mtp": 3.0, "expert_load/max": 2.0, "tokens_per_second": 100}


def test_numbers_of_an_entry():
    assert scalars(ENTRY) == SCALARS
    assert scalars({"step": 1, "expert_load": []}) == {}


def test_names(monkeypatch):
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    assert parse("wandb") == ("wandb", None)
    assert parse("tensorboard:/a:b") == ("tensorboard", "/a:b")
    with pytest.raises(ValueError, match=r"expected wandb\[:PROJECT\] or tensorboard\[:DIR\], got"):
        parse("mlflow")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"expected wandb to be installed; pip install '.\[wandb\]"
    ):
        parse("wandb")


@pytest.fixture
def modules(monkeypatch):
    """Replaces both libraries by fakes and returns the list of their calls."""
    calls = []

    class Run:
        def log(self, metrics, step):
            calls.append((step, metrics))

        def finish(self):
            calls.append("finish")

    class Writer:
        def __init__(self, directory):
            calls.append(directory)

        def add_scalar(self, name, value, step):
            calls.append((step, name, value))

        def flush(self):
            pass

        def close(self):
            calls.append("close")

    def init(**settings):
        calls.append(settings)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", types.SimpleNamespace(Writer=Writer))
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: object())
    return calls


def test_wandb_gets_every_entry_and_resumes_the_same_run(modules, tmp_path):
    for _ in range(2):
        tracker = make_tracker("wandb:mine", tmp_path / "run", {"steps": 4})
        tracker.log(3, SCALARS)
        tracker.close()
    first, logged, ended, again, *_ = modules
    assert (first["project"], first["name"], first["config"]) == ("mine", "run", {"steps": 4})
    assert (first["id"], first["resume"]) == (again["id"], "allow")
    assert (logged, ended) == ((3, SCALARS), "finish")


def test_tensorboard_writes_into_the_run_by_default(modules, tmp_path):
    tracker = make_tracker("tensorboard", tmp_path / "run", {})
    assert not modules  # nothing is made before the first entry
    tracker.log(3, {"mfu": 0.5})
    tracker.close()
    assert modules == [str(tmp_path / "run" / "tensorboard"), (3, "mfu", 0.5), "close"]


def test_a_failure_warns_once(caplog):
    class Failing:
        def log(self, step, metrics):
            raise OSError("no network\nat line 1")

        def close(self):
            raise AssertionError("closed after its failure")

    tracker = GuardedTracker(Failing)
    with caplog.at_level(logging.WARNING, logger="dsv3_jax"):
        for step in range(3):
            tracker.log(step, {})
        tracker.close()
    (record,) = caplog.records
    assert record.getMessage().endswith("no further metrics: OSError: no network")


@pytest.mark.slow
def test_the_real_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra clients")
    tracker = make_tracker("tensorboard", tmp_path, {})
    tracker.log(3, SCALARS)
    tracker.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"losses/main" in events.read_bytes()


@pytest.mark.slow
def test_the_real_wandb(tmp_path, monkeypatch, caplog):
    pytest.importorskip("wandb", reason="needs the extra clients")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = make_tracker("wandb", tmp_path / "run", {"steps": 4})
    tracker.log(3, SCALARS)
    tracker.close()
    assert not caplog.records
    assert list(tmp_path.rglob("*.wandb"))

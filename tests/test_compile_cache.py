"""Python programs keep what they compile, as commands do, and report slow compilations."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dsv3_jax
from dsv3_jax import compile_cache
from dsv3_jax.compile_cache import CompileProgress
from dsv3_jax.training.config import TrainingConfig
from dsv3_jax.training.step import Metrics
from dsv3_jax.training.trainer import Trainer

ROOT = Path(__file__).parents[1]
TRAINING = TrainingConfig(steps=1, learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=0)
SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(scope="module")
def demo():
    return dsv3_jax.load("demo")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home for a user who has configured nothing."""
    before = {name: jax.config.values[name] for name in SETTINGS}
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    compile_cache._usable.cache_clear()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    compile_cache._usable.cache_clear()


def used() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


@pytest.mark.parametrize(
    "use",
    [
        lambda model, tokenizer: dsv3_jax.load("demo"),
        lambda model, tokenizer: dsv3_jax.Generator(model, tokenizer, 64),
        lambda model, tokenizer: Trainer(model, TRAINING),
        lambda model, tokenizer: dsv3_jax.Engine(
            model, tokenizer, 64, max_running=1, background=False
        ),
    ],
    ids=["load", "Generator", "Trainer", "Engine"],
)
def test_every_use_of_a_model_enables_it(use, demo, home):
    use(*demo)
    assert used() == str(home / ".cache" / "dsv3_jax" / "xla")


def test_programs_are_kept_although_some_were_compiled_before(home):
    """Also those that compile fast: a start has many of them."""
    jax.block_until_ready(jax.jit(lambda x: x + 1)(np.float32(1)))
    directory = compile_cache.enable()
    assert directory == home / ".cache" / "dsv3_jax" / "xla"
    assert not list(directory.iterdir())
    jax.block_until_ready(jax.jit(lambda x: x * 3 + 2)(np.float32(1)))
    assert list(directory.iterdir())


def test_what_the_user_has_configured_stays(home, tmp_path):
    own = tmp_path / "own"
    jax.config.update("jax_compilation_cache_dir", str(own))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    assert compile_cache.enable() == own
    assert used() == str(own)
    assert jax.config.values["jax_persistent_cache_min_compile_time_secs"] == 7.0
    assert not (home / ".cache").exists()


def test_it_can_be_turned_off(home):
    jax.config.update("jax_enable_compilation_cache", False)
    assert compile_cache.enable() is None
    assert used() is None
    assert not (home / ".cache").exists()


def test_a_home_that_cannot_be_written_gives_one_warning(demo, home, caplog):
    (home / ".cache").touch()
    dsv3_jax.load("demo")
    dsv3_jax.Generator(*demo, 64)
    (line,) = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"compiled programs are not kept: {home}/.cache/dsv3_jax/xla cannot be")
    assert used() is None


def test_a_user_without_a_home(home, monkeypatch, caplog):
    """An arbitrary user id, as some clusters give to containers."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    assert compile_cache.enable() is None
    assert "the user has no home directory" in caplog.text


def test_disabled_gives_a_program_of_the_compiler(home):
    compile_cache.enable()
    with compile_cache.disabled():
        jax.block_until_ready(jax.jit(lambda x: x * 5 + 2)(np.float32(1)))
        assert compile_cache.current() is None
    directory = compile_cache.current()
    assert directory is not None
    assert not list(directory.iterdir())
    jax.block_until_ready(jax.jit(lambda x: x * 7 + 2)(np.float32(1)))
    assert list(directory.iterdir())


def test_a_slow_compilation_is_reported(home, monkeypatch, caplog):
    """As a warning, which Python shows without any configuration, and then as information."""
    monkeypatch.setattr(compile_cache, "_SLOW_SECONDS", 0.001)
    monkeypatch.setattr(compile_cache, "_REPORT_SECONDS", 0.001)
    compile_cache.enable()
    caplog.set_level(logging.INFO, "dsv3_jax")
    with CompileProgress(3) as progress:
        progress.advance()
        wait_for(lambda: "compiled 1 of 3 programs in" in caplog.text)
    first, second, *_ = caplog.records
    assert (first.levelname, second.levelname) == ("WARNING", "INFO")
    assert first.getMessage() == (
        f"compiling 3 programs: later starts load what is kept in {home}/.cache/dsv3_jax/xla"
    )


def test_a_fast_compilation_is_not_reported(caplog):
    caplog.set_level(logging.INFO, "dsv3_jax")
    with CompileProgress(3) as progress:
        progress.advance()
    assert not caplog.records
    assert not progress._thread.is_alive()


def test_programs_report_their_compilation(demo, monkeypatch, caplog):
    """A Generator has the same programs. A Trainer reports its step."""
    monkeypatch.setattr(compile_cache, "_SLOW_SECONDS", 0.0)
    trainer = Trainer(demo[0], TRAINING)

    state = trainer.init()
    metrics = Metrics(*(jnp.zeros(()) for _ in Metrics._fields))

    def slow(*_):
        wait_for(lambda: "compiling a program" in caplog.text)
        return state, metrics

    trainer.programs = trainer.programs._replace(step=slow)
    tokens = jnp.ones((1, 64), jnp.int32)
    for _ in range(2):
        trainer.step(state, tokens)
    assert caplog.text.count("compiling a program") == 1
    caplog.clear()
    engine = dsv3_jax.Engine(*demo, 64, max_running=1, background=False)
    programs = engine._programs
    monkeypatch.setattr(programs, "_lower", lambda state, shape: None)
    monkeypatch.setattr(
        programs, "compile", lambda lowered, shape: wait_for(lambda: "compiling" in caplog.text)
    )
    engine.warm_up()
    assert caplog.text.count("compiling") == 1


def wait_for(condition):
    """Waits for a thread of this process, at most a minute."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


PROGRAM = """
import dsv3_jax, sys
assert "jax" not in sys.modules, "import dsv3_jax imports JAX"
model, tokenizer = dsv3_jax.load("demo")
generator = dsv3_jax.Generator(model, tokenizer, max_len=128)
print(generator.generate("def f(", max_new_tokens=4)[0].tokens)
"""


@pytest.mark.slow
def test_a_later_program_loads_what_earlier_ones_kept(tmp_path):
    """Two processes that compile at the same time do not disturb each other."""
    environment = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    results = [each.communicate(timeout=300) for each in [start(), start()]]
    directory = tmp_path / ".cache" / "dsv3_jax" / "xla"
    names = {path.name for path in directory.iterdir()}
    assert any("step_" in name for name in names)
    results.append(start().communicate(timeout=300))
    assert {path.name for path in directory.iterdir()} == names
    assert len({out for out, _ in results}) == 1
    assert results[0][0].startswith("[")

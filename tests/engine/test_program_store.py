"""Stored programs give the results of compiled ones, and no change or damage goes unnoticed."""

from __future__ import annotations

import dataclasses
import logging

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import dsv3_jax.engine.engine
from dsv3_jax.engine import Engine
from dsv3_jax.engine.device import program_store
from dsv3_jax.engine.device.programs import Programs, _name
from dsv3_jax.engine.device.step_input import empty_input
from dsv3_jax.generation.drafters import DraftPlan, MTPDrafter
from tests.engine.conftest import BUCKETS, MAX_LEN

PAGES, SLOTS = 8, 4


def make(model, *, buckets=BUCKETS, slots=SLOTS, drafter=None) -> Programs:
    return Programs(
        model,
        buckets,
        DraftPlan() if drafter is None else DraftPlan(drafter, (1,)),
        num_slots=slots,
        max_len=MAX_LEN,
        page_size=64,
        vocab_size=model.config.vocab_size,
    )


def warm(model, directory, *, compiled=None, **settings) -> tuple[Programs, int]:
    """Warms up one program. Returns the programs, and how many of them were compiled.

    Args:
      compiled: takes the place of a program that must be compiled, to save time.
    """
    programs, compilations = make(model, **settings), []
    compile_ = programs.compile

    def count(lowered, shape):
        compilations.append(shape)
        return compile_(lowered, shape) if compiled is None else compiled

    programs.compile = count
    if compiled is not None:
        programs._lower = lambda state, shape: None
    programs.warm_up(programs.empty_state(PAGES), [programs.shape(1, 0)], directory=directory)
    return programs, len(compilations)


@pytest.fixture(scope="module", autouse=True)
def no_compilation_cache():
    """Nothing is stored on CPUs while JAX's compilation cache is in use. A program that another
    test has taken from that cache cannot be stored either."""
    name = "jax_enable_compilation_cache"
    before = jax.config.values[name]
    jax.config.update(name, False)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dsv3_jax.engine.engine, "Programs", Programs)  # not those that tests share
        yield
    jax.config.update(name, before)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def stored(tiny_mtp, tmp_path_factory):
    """A directory with a program, and the program."""
    directory = tmp_path_factory.mktemp("programs") / "new"
    programs, compilations = warm(tiny_mtp, directory)
    assert compilations == 1
    return directory, *programs._compiled.values()


@pytest.fixture
def copy(stored, tmp_path):
    """A copy of the program, which a test may change."""
    (file,) = stored[0].glob("*.program")
    target = tmp_path / file.name
    target.write_bytes(file.read_bytes())
    return target


def test_a_stored_program_computes_the_same_and_donates_its_state(tiny_mtp, stored, caplog):
    loaded, compilations = warm(tiny_mtp, stored[0])
    assert compilations == 0
    assert not caplog.records
    outputs = []
    for programs in (make(tiny_mtp), loaded):
        state, shape = programs.empty_state(PAGES), programs.shape(1, 0)
        buffer, _ = empty_input(shape, SLOTS)
        new, output = programs(state, buffer, shape)
        assert all(array.is_deleted() for array in jax.tree.leaves(state.pool))
        assert jax.tree.structure(new) == jax.tree.structure(state)
        outputs.append((jax.tree.leaves(new), output))
    first, second = outputs
    assert jax.tree.structure(first) == jax.tree.structure(second)
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_every_shape_has_its_own_file(tiny_mtp):
    shapes = make(tiny_mtp).shapes
    assert len({_name(shape) for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("damage", ["cut", "flipped bit", "other file", "empty", "no header"])
def test_damage(tiny_mtp, stored, copy, damage, caplog):
    content = copy.read_bytes()
    if damage == "cut":
        content = content[:-100]
    elif damage == "flipped bit":
        content = content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]
    elif damage == "other file":
        content = b"PK\x03\x04"
    elif damage == "no header":
        content = program_store._MAGIC + b"[]\n"
    else:
        content = b""
    copy.write_bytes(content)
    assert warm(tiny_mtp, copy.parent, compiled=stored[1])[1] == 1
    assert "it is compiled again" in caplog.text
    assert warm(tiny_mtp, copy.parent)[1] == 0  # it was replaced


def test_a_payload_that_cannot_be_loaded(tiny_mtp, stored, copy, caplog, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("another machine")

    monkeypatch.setattr(program_store.serialize_executable, "deserialize_and_load", fail)
    assert warm(tiny_mtp, copy.parent, compiled=stored[1])[1] == 1
    assert "cannot be loaded: RuntimeError: another machine" in caplog.text


@pytest.mark.parametrize(
    ("settings", "differs"),
    [
        ({"slots": 5}, "arguments, sizes"),
        ({"buckets": dataclasses.replace(BUCKETS, chunks=(2,))}, "buckets"),
        ({"drafter": MTPDrafter()}, "arguments, drafter"),
    ],
)
def test_another_engine(tiny_mtp, stored, copy, settings, differs, caplog):
    assert warm(tiny_mtp, copy.parent, compiled=stored[1], **settings)[1] == 1
    assert f"is of another state: {differs}" in caplog.text


def test_another_dtype(bfloat16_mtp, stored, copy, caplog):
    assert warm(bfloat16_mtp, copy.parent, compiled=stored[1])[1] == 1
    assert "is of another state: arguments" in caplog.text


@pytest.mark.parametrize("name", ["source files", "versions", "driver", "devices"])
def test_another_environment(tiny_mtp, stored, copy, name, caplog, monkeypatch):
    def changed(devices):
        return {**program_store.environment(devices), name: "another"}

    monkeypatch.setattr("dsv3_jax.engine.device.programs.environment", changed)
    assert warm(tiny_mtp, copy.parent, compiled=stored[1])[1] == 1
    assert f"is of another state: {name}" in caplog.text


def test_another_setting_of_jax(tiny_mtp, stored, copy, caplog):
    with jax.default_matmul_precision("highest"):
        assert warm(tiny_mtp, copy.parent, compiled=stored[1])[1] == 1
    assert "is of another state: settings of JAX" in caplog.text


def test_a_file_that_cannot_be_written(tiny_mtp, stored, tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(program_store, "atomic_write", full)
    assert warm(tiny_mtp, tmp_path, compiled=stored[1])[1] == 1
    assert "was not stored: No space left on device" in caplog.text


@pytest.mark.slow
def test_an_engine_with_stored_programs(tiny_mtp, tmp_path, caplog):
    caplog.set_level(logging.INFO, "dsv3_jax.engine.device.programs")
    tokens = []
    for _ in range(2):
        with Engine(
            tiny_mtp, None, MAX_LEN, max_running=SLOTS, buckets=BUCKETS, background=False
        ) as engine:
            engine.warm_up(tmp_path)
            request = engine.submit([5, 6, 7], max_new_tokens=9)
            while engine.step():
                pass
            tokens.append(request.result().tokens)
            assert engine.stats().compiled_after_warm_up == 0
    assert tokens[0] == tokens[1]
    total = len(list(tmp_path.glob("*.program")))
    assert f"loaded 0 of {total} programs" in caplog.text
    assert f"loaded {total} of {total} programs" in caplog.text


def test_nothing_is_stored_while_a_compilation_cache_is_used(tiny_mtp, stored, tmp_path, caplog):
    settings = {"jax_enable_compilation_cache": True, "jax_compilation_cache_dir": "somewhere"}
    before = {name: jax.config.values[name] for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        store = program_store.ProgramStore(tmp_path, {}, jax.devices("cpu"))
        store.save("step", "", stored[1])
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
    assert "was not stored: it may be from a cache" in caplog.text
    assert not list(tmp_path.iterdir())


def test_programs_are_stored_although_a_compilation_cache_is_used(tiny_mtp, tmp_path, caplog):
    """As it is by default. An engine compiles without it for the store."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
    }
    before = {name: jax.config.values[name] for name in settings}
    directory = tmp_path / "store"
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        for _ in range(2):
            programs = make(tiny_mtp)
            programs.warm_up(
                programs.empty_state(PAGES), [programs.shape(1, 0)], directory=directory
            )
            assert jax.config.values["jax_enable_compilation_cache"]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert "was not stored" not in caplog.text
    assert len(list(directory.glob("*.program"))) == 1

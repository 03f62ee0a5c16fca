"""A small checkpoint, undisturbed conversions of it, and interrupted ones."""

import errno
import functools
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint.interrupted.conversions import (
    TARGETS,
    fp8_checkpoint,
    journal_lines,
    refusal,
)
from tests.checkpoint.values import small_config
from tests.support.children import FailingReads


@pytest.fixture(scope="session")
def sound(tmp_path_factory) -> Path:
    return fp8_checkpoint(tmp_path_factory.mktemp("sound") / "source", small_config())


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory, sound) -> dict[str, tuple[Path, int]]:
    """Returns undisturbed stores and the number of reads of their conversions, by target."""
    folder = tmp_path_factory.mktemp("wholes")
    made = {}
    for target in TARGETS:
        with pytest.MonkeyPatch.context() as patch:
            counting = FailingReads(after=sys.maxsize)
            patch.setattr(os, "preadv", counting)
            convert(sound, folder / target, target, workers=1)
        made[target] = folder / target, counting.calls
    return made


@pytest.fixture(scope="session")
def wholes(undisturbed) -> dict[str, Path]:
    return {target: store for target, (store, _) in undisturbed.items()}


@pytest.fixture(scope="session")
def reads(undisturbed) -> dict[str, int]:
    return {target: count for target, (_, count) in undisturbed.items()}


@pytest.fixture
def source(tmp_path, sound) -> Path:
    """Returns a copy of the source that a test may change."""
    return shutil.copytree(sound, tmp_path / "source")


@pytest.fixture
def store(tmp_path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="session")
def halves(tmp_path_factory, sound, reads) -> Callable[[str, float], Path]:
    """Returns stores whose conversion ended by a disk error after a share of the reads."""

    @functools.cache
    def convert_in_part(target: str, share: float) -> Path:
        store = tmp_path_factory.mktemp("halves") / "store"
        with pytest.MonkeyPatch.context() as patch:
            after = int((reads[target] - 1) * share)
            patch.setattr(os, "preadv", FailingReads(after))
            message = refusal(sound, store, target, workers=1)
        assert os.strerror(errno.EIO) in message
        assert journal_lines(store)
        return store

    return convert_in_part


@pytest.fixture
def interrupted(store, halves) -> Callable[..., Path]:
    """Returns a copy of such a store. By default the error was at the last read."""

    def interrupt(target: str = "fp8", *, share: float = 1.0) -> Path:
        return shutil.copytree(halves(target, share), store)

    return interrupt


@pytest.fixture
def complete(wholes, store) -> Callable[[str], Path]:
    """Returns copies of undisturbed stores, by target."""
    return lambda target: shutil.copytree(wholes[target], store)

"""Fixtures of the checkpoint tests: an offline Hub, unsynced writes, and a small checkpoint."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from dsv3_jax.checkpoint.convert import convert
from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch) -> Path:
    """Returns the Hub's local cache, which is empty. The network is disabled."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """Replaces fsync, which takes long for many small files. No test cuts the power."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def checkpoint(tmp_path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Writes a checkpoint of random weights. Returns its directory and the exact values."""

    def write(config: Mapping[str, Any] | None = None, **options: Any):
        config = dict(config or small_config())
        directory = tmp_path / "checkpoint"
        return directory, write_checkpoint(directory, config, random_tensors(config), **options)

    return write


@pytest.fixture(scope="session")
def converted(tmp_path_factory) -> Callable[..., Path]:
    """Writes a checkpoint once for each set of options, and its store. Returns the directory of
    both, ``checkpoint`` and ``store``, for tests that do not change it or copy it."""

    @functools.cache
    def make(to: str, **options: Any) -> Path:
        home = tmp_path_factory.mktemp("converted")
        config = small_config()
        write_checkpoint(home / "checkpoint", config, random_tensors(config), **options)
        convert(home / "checkpoint", home / "store", to)
        return home

    return make

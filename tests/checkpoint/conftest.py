"""What the tests of checkpoints share: a Hub that is never reached, and a place to write to."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest

from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch) -> Path:
    """The Hub's local cache, empty; and no network."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.fixture(autouse=True)
def no_waiting_for_disks(monkeypatch):
    """Nobody pulls the plug here, and syncing many small files takes long."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def checkpoint(tmp_path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """Writes a checkpoint of random weights; gives its directory and the values it stands for."""

    def write(config: Mapping[str, Any] | None = None, **options: Any):
        config = dict(config or small_config())
        directory = tmp_path / "checkpoint"
        return directory, write_checkpoint(directory, config, random_tensors(config), **options)

    return write

"""Directories of checkpoints, from a path, a demo's name or a Hub name. Imports no JAX."""

from __future__ import annotations

import contextlib
import difflib
import glob
import itertools
import os
import re
from pathlib import Path

from dsv3_jax.checkpoint import manifest
from dsv3_jax.checkpoint.kinds import describe, is_checkpoint, is_store
from dsv3_jax.checkpoint.reader import INDEX, SINGLE, weight_map
from dsv3_jax.config import ModelConfig
from dsv3_jax.presets import HUB_NAMES

DEMO = Path(__file__).parents[1] / "demo"

DEMOS = {"demo": DEMO, "demo-sparse": DEMO.with_name("demo_sparse")}
"""The checkpoints in this package: a miniature DeepSeek-V3, and a V3.2 trained from it."""

_HUB_FILES = ["*.json", "*.jinja"]  # config, index and tokenizer, without weights

# Names to suggest for a misspelt one. The last differs from its preset.
_PUBLISHED = (*itertools.chain(*HUB_NAMES.values()), "moonshotai/Kimi-K2-Instruct-0905")


def find(path_or_name: str | os.PathLike[str]) -> Path:
    """Returns the local directory of a checkpoint: a directory, a name in :data:`DEMOS`, or a Hub
    name, which is downloaded if necessary. Raises ValueError if there is none, the directory is of
    another kind, such as a training run, or the download failed."""
    return _local(path_or_name) or _downloaded(os.fspath(path_or_name), weights=True)


def find_config_directory(path_or_name: str | os.PathLike[str]) -> Path:
    """Returns the directory with a checkpoint's config.json and tokenizer: in a store, the
    subdirectory with the source's small files. For a Hub name, no weights are downloaded."""
    directory = _local(path_or_name) or _downloaded(os.fspath(path_or_name), weights=False)
    if not is_store(directory):
        return directory
    manifest.read(directory)  # refuses an incomplete store
    return directory / manifest.FOLDER


def _local(path_or_name: str | os.PathLike[str]) -> Path | None:
    """Returns the local directory of that name, or None if it may be a Hub name."""
    if isinstance(path_or_name, str) and path_or_name in DEMOS:
        return DEMOS[path_or_name]
    expected = "model: expected 'demo', a directory, or a Hub name"
    if not isinstance(path_or_name, (str, os.PathLike)):
        raise ValueError(f"{expected}; got {path_or_name!r}")
    name = os.fspath(path_or_name)
    if name and os.path.isdir(name):
        if not is_checkpoint(Path(name)):
            raise ValueError(f"{name}: expected a checkpoint, got {describe(Path(name))}")
        return Path(name)
    if os.path.exists(name):
        raise ValueError(f"{expected}; got the file {name!r}")
    if name.startswith(".") or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ValueError(f"{expected}; got {name!r}{_suggestion(name)}")
    return None


def _downloaded(name: str, *, weights: bool) -> Path:
    directory = _download(name, _HUB_FILES)
    # Refuses an unsupported model before gigabytes are downloaded.
    ModelConfig.from_hf(directory)
    return _download(name, [*_HUB_FILES, *_weight_patterns(directory)]) if weights else directory


def _suggestion(name: str) -> str:
    """Returns ``"; did you mean X?"`` with the most similar model or directory, or ``""``."""
    if name in _PUBLISHED:
        return ""
    folder, last = os.path.split(name)
    names = {} if folder else {name: name for name in DEMOS}
    names |= {each.lower(): each for each in _PUBLISHED}
    names |= {each.rpartition("/")[2].lower(): each for each in _PUBLISHED}
    if os.path.isdir(folder or "."):
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            siblings = [entry.name for entry in entries if entry.is_dir()]
            close = difflib.get_close_matches(last, siblings, n=1, cutoff=0.7)
            if close:
                return f"; did you mean {os.path.join(folder, close[0])}?"
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _download(name: str, patterns: list[str]) -> Path:
    import huggingface_hub  # takes half a second, which local directories do not need

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library's errors have no common base class
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r}: no such directory, and not available from the Hub: {reason}"
            f"{_suggestion(name)}"
        ) from None


def _weight_patterns(directory: Path) -> list[str]:
    """Returns patterns of the files in the index, or of the single file without an index."""
    if not (index := directory / INDEX).is_file():
        return [SINGLE]
    return sorted({glob.escape(file) for file in weight_map(index).values()})

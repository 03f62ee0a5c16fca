"""From a name to a directory: a path, ``"demo"``, or a Hub name. Imports no JAX."""

from __future__ import annotations

import contextlib
import difflib
import glob
import os
import re
from pathlib import Path

from dsv3_jax.checkpoint import manifest
from dsv3_jax.checkpoint.kinds import describe, is_checkpoint, is_store
from dsv3_jax.checkpoint.reader import INDEX, SINGLE, weight_map
from dsv3_jax.checkpoint.sidecar import FOLDER
from dsv3_jax.config import ModelConfig

DEMO = Path(__file__).parents[1] / "demo"

_HUB_FILES = ["*.json", "*.jinja"]  # small ones: what the checkpoint is, and its tokenizer

# Names that a misspelt one may have meant.
_PUBLISHED = (
    *("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base", "deepseek-ai/DeepSeek-V3-0324"),
    *("deepseek-ai/DeepSeek-V3.1", "deepseek-ai/DeepSeek-V3.1-Base", "deepseek-ai/DeepSeek-V2"),
    *("deepseek-ai/DeepSeek-V3.1-Terminus", "deepseek-ai/DeepSeek-V2-Chat"),
    *("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-Zero", "deepseek-ai/DeepSeek-R1-0528"),
    *("deepseek-ai/DeepSeek-V2-Lite", "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    *("moonshotai/Kimi-K2-Instruct", "moonshotai/Kimi-K2-Instruct-0905", "moonshotai/Kimi-K2-Base"),
    *("moonshotai/Moonlight-16B-A3B", "moonshotai/Moonlight-16B-A3B-Instruct"),
)


def find(path_or_name: str | os.PathLike[str]) -> Path:
    """The local directory behind a path, ``"demo"`` or a Hub name; downloads if need be.

    Raises:
      ValueError: no such directory or name, or a directory of another kind, such as a training
        run's; a download that failed.
    """
    return _local(path_or_name) or _published(os.fspath(path_or_name), weights=True)


def find_config_directory(path_or_name: str | os.PathLike[str]) -> Path:
    """The directory with a checkpoint's config.json and tokenizer: of a store, what it keeps.
    Under a Hub name no weights are downloaded."""
    directory = _local(path_or_name) or _published(os.fspath(path_or_name), weights=False)
    if not is_store(directory):
        return directory
    manifest.read(directory)  # refuses a store that is not whole
    return directory / FOLDER


def _local(path_or_name: str | os.PathLike[str]) -> Path | None:
    """The directory of that name; None where it may be a Hub name."""
    if path_or_name == "demo":
        return DEMO
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
    if not _may_be_published(name):
        raise ValueError(f"{expected}; got {name!r}{_nearest(name)}")
    return None


def _may_be_published(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def _published(name: str, *, weights: bool) -> Path:
    directory = _download(name, _HUB_FILES)
    # Before gigabytes come: a model of another kind is refused here.
    ModelConfig.from_hf(directory)
    return _download(name, [*_HUB_FILES, *_shards(directory)]) if weights else directory


def _nearest(name: str) -> str:
    """``"; did you mean X?"`` with the most similar model or directory; empty if none is."""
    if name in _PUBLISHED:
        return ""
    folder, last = os.path.split(name)
    names = {"demo": "demo"} if not folder else {}
    names |= {each.lower(): each for each in _PUBLISHED}
    names |= {each.rpartition("/")[2].lower(): each for each in _PUBLISHED}
    if os.path.isdir(folder or "."):
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            beside = [entry.name for entry in entries if entry.is_dir()]
            close = difflib.get_close_matches(last, beside, n=1, cutoff=0.7)
            if close:
                return f"; did you mean {os.path.join(folder, close[0])}?"
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)
    return f"; did you mean {names[close[0]]}?" if close else ""


def _download(name: str, patterns: list[str]) -> Path:
    import huggingface_hub  # half a second that a local directory need not wait for

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # the library's errors have no base of their own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"model {name!r}: no such directory, and not to be had from the Hub: {reason}"
            f"{_nearest(name)}"
        ) from None


def _shards(directory: Path) -> list[str]:
    """Patterns of the files that the index names, or of the one without an index.

    Raises:
      ValueError: the index is damaged, or names something else than a file beside it.
    """
    if not (index := directory / INDEX).is_file():
        return [SINGLE]
    return sorted({glob.escape(file) for file in weight_map(index).values()})

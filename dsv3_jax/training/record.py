"""The directory of a run, and its run.json: what the run was started with.

A resumed run must be started with the same things, so run.json records the model's configuration, a
fingerprint of the initial weights, and the settings of training and data.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dsv3_jax import tokenizer_files
from dsv3_jax.config import ModelConfig
from dsv3_jax.files import atomic_write, publish_directory
from dsv3_jax.training.config import current_settings
from sharding.distributed import barrier

RECORD = "run.json"
TOKENIZER = "tokenizer"
METRICS = "metrics.jsonl"
EXPERT_LOAD = "expert_load.npy"
CHECKPOINTS = "checkpoints"
_SECTIONS = "model", "weights", "training", "data", "plan"

Identity = Mapping[str, Mapping[str, Any]]
"""The content of run.json that must not change: settings by section (model, weights, training,
data) and name."""


def check_new(out: Path) -> None:
    """Checks that a run can begin in ``out``. It creates nothing.

    Raises:
      ValueError: ``out`` exists and is not an empty directory, or it cannot be created or written.
    """
    existing = [out] if out.exists() and not out.is_dir() else []
    existing += [path for path in out.iterdir() if not _is_leftover(path)] if out.is_dir() else []
    if existing:
        raise ValueError(f"{out} exists; expected a new directory, or to resume the run in it")
    check_writable(out)


def check_writable(out: Path) -> None:
    """Checks that files can be created in ``out``, or in its nearest existing parent.

    It creates a file and deletes it, because permissions alone are not enough, for example on a
    read-only file system.

    Raises:
      ValueError: the directory cannot be written.
    """
    directory = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ValueError(f"{out}: cannot write to {directory}: {error.strerror}") from None


def begin(
    out: Path, identity: Identity, metadata: Mapping[str, Any], tokenizer: Path | None = None
) -> None:
    """Creates the directory of a new run, with run.json and a copy of the tokenizer's files.

    The first of several processes does this, after all of them have checked the directory. If the
    process is killed in between, then either a run can begin in the directory, or the run in it can
    be resumed.

    Args:
      metadata: further content of run.json, which may change when the run is resumed.

    Raises:
      ValueError: as :func:`check_new`.
    """
    check_new(out)
    barrier("directory checked")
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        for path in out.iterdir():
            path.unlink()
        # run.json comes first. Once it exists, resuming the run copies the tokenizer if necessary.
        _write(out, {**identity, **metadata})
        _copy_tokenizer(tokenizer, out)
    barrier("run.json written")


def compare(out: Path, identity: Identity, defaults: Identity | None = None) -> None:
    """Checks that the run in ``out`` was started with the same settings.

    Sections and names that ``identity`` lacks are not compared. ``training.steps`` may have
    increased.

    Args:
      defaults: values of settings that the record may lack, because an earlier version wrote it.
        In these sections, a recorded setting that ``identity`` lacks is refused.

    Raises:
      ValueError: there is no run, or a setting differs. The message names the first one.
    """
    recorded, defaults = read(out), defaults or {}
    # Tuples become lists, as in run.json.
    current, filled = (json.loads(json.dumps(each)) for each in (identity, defaults))
    for section, values in current.items():
        began = filled.get(section, {}) | recorded.get(section, {})
        if section == "model":
            began = _in_this_version(out, began)
        if section == "training":
            began = current_settings(began)
        for name in began if section in filled else ():
            if name not in values:
                raise ValueError(
                    f"resume: {section}.{name}: expected a setting of this version, got one that"
                    f" another version recorded in {out}; resume with the version that wrote it"
                )
        for name, value in values.items():
            before = began.get(name)
            if before == value or _extends(section, name, before, value):
                continue
            is_steps = (section, name) == ("training", "steps")
            more = "; expected at least as many" if is_steps else ""
            raise ValueError(
                f"resume: {section}.{name} differs: the run in {out} began with {before!r}, "
                f"got {value!r}{more}"
            )


def resume(
    out: Path, identity: Identity, fingerprint: str | None = None, tokenizer: Path | None = None
) -> None:
    """Prepares a run for being resumed, after :func:`compare`.

    run.json gets the settings that it lacks. If ``training.steps`` has increased, it also gets the
    new number, and the previous one is appended to its list ``extended``. The tokenizer's files are
    copied if the run was killed before that.

    Args:
      fingerprint: fingerprint of the initial weights, or None if the run no longer needs them.

    Raises:
      ValueError: as :func:`check_weights`, or ``out`` cannot be written.
    """
    if fingerprint is not None:
        check_weights(out, fingerprint)
    check_writable(out)
    recorded = read(out)
    barrier("run.json compared")
    if jax.process_index() == 0:
        before, settings = recorded["training"], json.loads(json.dumps(identity["training"]))
        if settings["steps"] != before["steps"]:
            recorded["extended"] = [*recorded.get("extended", []), before["steps"]]
        if settings != before:
            _write(out, recorded | {"training": settings})
        _copy_tokenizer(tokenizer, out)
    barrier("resumption recorded")


def check_weights(out: Path, fingerprint: str) -> None:
    """Checks that the run in ``out`` began with the weights of this fingerprint.

    Args:
      fingerprint: result of :func:`dsv3_jax.training.fingerprint.fingerprint`.

    Raises:
      ValueError: the weights differ, or run.json has no fingerprint.
    """
    before = read(out).get("weights", {}).get("fingerprint")
    if before is None:
        raise ValueError(
            f"{out / RECORD} has no fingerprint of the weights that the run began with, because an "
            "earlier version wrote it; expected a run of this version"
        )
    if before != fingerprint:
        raise ValueError(
            f"weights.fingerprint differs: expected the weights that the run in {out} began with, "
            f"{before}, got other weights, {fingerprint}"
        )


def read(out: Path) -> dict[str, Any]:
    """Returns the content of run.json in ``out``.

    Raises:
      ValueError: there is no run.json, or it is not a JSON object whose sections are objects.
    """
    path = out / RECORD
    if not path.is_file():
        raise ValueError(f"{out}: expected the directory of a run, found no {RECORD} in it")
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    for section in _SECTIONS:
        if not isinstance(value := content.get(section, {}), dict):
            raise ValueError(
                f"{path}: {section}: expected a JSON object, got {type(value).__name__}"
            )
    return content


def _in_this_version(out: Path, model: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recorded model configuration as this version would record it."""
    try:
        return json.loads(json.dumps(ModelConfig.from_hf(dict(model)).to_hf()))
    except ValueError as error:
        raise ValueError(f"{out / RECORD}: model: {error}") from None


def _extends(section: str, name: str, before: Any, value: Any) -> bool:
    """Returns whether a setting differs because the run is extended by more steps."""
    return (section, name) == ("training", "steps") and before is not None and value > before


def _write(out: Path, content: Mapping[str, Any]) -> None:
    atomic_write(out / RECORD, json.dumps(content, indent=1) + "\n")


def _copy_tokenizer(source: Path | None, out: Path) -> None:
    copy, partial = out / TOKENIZER, out / f".{TOKENIZER}.partial"
    if source is None or copy.exists():
        return
    if partial.exists():
        shutil.rmtree(partial)
    tokenizer_files.copy(source, partial)
    publish_directory(partial, copy)


def _is_leftover(path: Path) -> bool:
    """Returns whether a process that was killed while writing run.json has left this file."""
    return path.is_file() and path.name.startswith(f".{RECORD}.") and path.suffix == ".partial"

"""run.json: what a run is made of, and must be made of when it is resumed."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dsv3_jax import tokenizer as tokenizers
from dsv3_jax.files import atomic_write, publish_directory
from sharding.distributed import barrier

RECORD = "run.json"
TOKENIZER = "tokenizer"

# By part (model, weights, training, data) and name.
Identity = Mapping[str, Mapping[str, Any]]


def check_new(out: Path) -> None:
    """Checks that a run can begin in ``out``, without making it.

    Raises:
      ValueError: it holds something, or it cannot be made or written to.
    """
    held = [out] if out.exists() and not out.is_dir() else []
    held += [path for path in out.iterdir() if not _is_left_over(path)] if out.is_dir() else []
    if held:
        raise ValueError(f"{out} exists; expected a new directory, or to resume the run in it")
    check_writable(out)


def check_writable(out: Path) -> None:
    """Checks that files can be made in ``out``, or in the nearest directory that exists above it.
    It makes a file and removes it: permissions alone do not tell, on a read-only file system for
    example.

    Raises:
      ValueError: they cannot.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(f"{out}: cannot write to {there}: {error.strerror}") from None


def begin(
    out: Path, identity: Identity, beside: Mapping[str, Any], tokenizer: Path | None = None
) -> None:
    """Makes the directory of a new run, with its run.json and a copy of the tokenizer's files.
    Of several processes the first does, when all have seen that there is nothing yet.

    A start that is killed leaves either a directory in which a run can begin, or one that can be
    resumed.

    Args:
      beside: also kept in run.json; may differ at a resumption.

    Raises:
      ValueError: as :func:`check_new`.
    """
    check_new(out)
    barrier("before run.json")
    if jax.process_index() == 0:
        out.mkdir(parents=True, exist_ok=True)
        for path in out.iterdir():
            path.unlink()
        # First, and whole: the run exists from here on, and resuming it supplies the rest.
        _write(out, {**identity, **beside})
        _copy_tokenizer(tokenizer, out)
    barrier("behind run.json")


def compare(out: Path, identity: Identity) -> None:
    """Compares a run that should be resumed with what it was begun with. Parts and names that
    ``identity`` lacks are not compared, ``training.steps`` may be larger than it was.

    Raises:
      ValueError: something differs, the message names the first that does; or there is no run.
    """
    found = read(out)
    wanted = json.loads(json.dumps(identity))  # tuples are lists in JSON
    for part, values in wanted.items():
        for name, value in values.items():
            before = found.get(part, {}).get(name)
            if before == value or _extends(part, name, before, value):
                continue
            more = "; expected at least as many" if (part, name) == ("training", "steps") else ""
            raise ValueError(
                f"resume: {part}.{name} differs: the run in {out} began with {before!r}, "
                f"got {value!r}{more}"
            )


def resume(
    out: Path, identity: Identity, fingerprint: str | None = None, tokenizer: Path | None = None
) -> None:
    """Prepares a run for going on, after :func:`compare`. Records more ``training.steps`` than
    before, the earlier lengths in the list ``extended``, and copies the tokenizer's files where the
    start was killed before it did.

    Args:
      fingerprint: of the initial weights, where the run still needs them.

    Raises:
      ValueError: as :func:`check_weights`, or ``out`` cannot be written to.
    """
    if fingerprint is not None:
        check_weights(out, fingerprint)
    check_writable(out)
    found = read(out)
    barrier("run.json compared")
    if jax.process_index() == 0:
        before, steps = found["training"]["steps"], identity["training"]["steps"]
        if steps != before:
            found["extended"] = [*found.get("extended", []), before]
            found["training"]["steps"] = steps
            _write(out, found)
        _copy_tokenizer(tokenizer, out)
    barrier("resumption recorded")


def check_weights(out: Path, fingerprint: str) -> None:
    """Checks that weights are those that the run in ``out`` began with.

    Args:
      fingerprint: of the model at hand; see :func:`~dsv3_jax.training.fingerprint.fingerprint`.

    Raises:
      ValueError: they are not, or run.json has no fingerprint.
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
            f"{before}, got a model with others, {fingerprint}"
        )


def read(out: Path) -> dict[str, Any]:
    """Returns what run.json says about the run in ``out``.

    Raises:
      ValueError: there is none, or it is not a JSON object.
    """
    path = out / RECORD
    if not path.is_file():
        raise ValueError(f"{out}: expected the directory of a run, found no {RECORD} in it")
    try:
        found = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _extends(part: str, name: str, before: Any, value: Any) -> bool:
    return (part, name) == ("training", "steps") and before is not None and value > before


def _write(out: Path, content: Mapping[str, Any]) -> None:
    atomic_write(out / RECORD, json.dumps(content, indent=1) + "\n")


def _copy_tokenizer(source: Path | None, out: Path) -> None:
    copy, partial = out / TOKENIZER, out / f".{TOKENIZER}.partial"
    if source is None or copy.exists():
        return
    if partial.exists():
        shutil.rmtree(partial)
    tokenizers.copy(source, partial)
    publish_directory(partial, copy)


def _is_left_over(path: Path) -> bool:
    """Whether a start that was killed while it wrote run.json left this file."""
    return path.is_file() and path.name.startswith(f".{RECORD}.") and path.suffix == ".partial"

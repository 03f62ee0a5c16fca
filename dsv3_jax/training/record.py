"""run.json: what a run is made of, and must be made of when it is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dsv3_jax import tokenizer as tokenizers
from sharding.distributed import wait_for_all

RECORD = "run.json"
TOKENIZER = "tokenizer"

# By part (model, training, data) and name.
Identity = Mapping[str, Mapping[str, Any]]


def begin(
    out: Path, identity: Identity, beside: Mapping[str, Any], tokenizer: Path | None = None
) -> None:
    """Makes the directory of a new run, with its run.json and a copy of the tokenizer's files.
    Of several processes the first does, when all have seen that there is nothing yet.

    Args:
      beside: also kept in run.json; may differ at a resumption.

    Raises:
      ValueError: the directory holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists; expected a new directory, or to resume the run in it")
    wait_for_all("before run.json")
    if jax.process_index() == 0:
        _write(out, identity, beside, tokenizer)
    wait_for_all("behind run.json")


def _write(
    out: Path, identity: Identity, beside: Mapping[str, Any], tokenizer: Path | None
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    if tokenizer is not None:
        tokenizers.copy(tokenizer, out / TOKENIZER)
    # Last, and in one piece: a directory with this file is the directory of a run.
    partial = out / (RECORD + ".partial")
    partial.write_text(json.dumps({**identity, **beside}, indent=1) + "\n", encoding="utf-8")
    partial.replace(out / RECORD)


def check(out: Path, identity: Identity) -> None:
    """Holds a run that should be resumed against what it was begun with.

    Raises:
      ValueError: something differs; the message names the first that does.
    """
    found = read(out)
    wanted = json.loads(json.dumps(identity))  # tuples are lists in JSON
    for part, values in wanted.items():
        for name, value in values.items():
            if (before := found[part].get(name)) != value:
                raise ValueError(
                    f"resume: {part}.{name} differs: the run in {out} began with {before!r}, "
                    f"got {value!r}"
                )


def read(out: Path) -> dict[str, Any]:
    """What run.json says about the run in ``out``.

    Raises:
      ValueError: there is none.
    """
    path = out / RECORD
    if not path.is_file():
        raise ValueError(f"{out}: expected the directory of a run, found no {RECORD} in it")
    return json.loads(path.read_text("utf-8"))

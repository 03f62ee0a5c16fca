"""python -m tests.breaks.run [REPOSITORY] [--only TEXT] [--new] [--out RESULTS.json] [--whole]

Applies each deliberate defect to a copy of the repository, one at a time, and reports which test
notices it first. The exit status is 1 if a defect goes unnoticed.

The quick tests of the defect's test files run first, then their slow tests. With ``--whole``, the
whole quick suite and the whole slow suite follow if none of these fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.breaks.breaks import BREAKS, Break

# A test that failed, or whose fixture failed. A test file that cannot be imported does not match.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", re.MULTILINE)
_NO_TESTS_RAN = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[2])
    parser.add_argument("repository", nargs="?", type=Path, default=Path.cwd())
    parser.add_argument("--only", default="", help="defects whose name contains this text")
    parser.add_argument("--out", type=Path, help="JSON file to add the results to")
    parser.add_argument("--new", action="store_true", help="defects that --out does not have")
    parser.add_argument("--whole", action="store_true", help="also run both whole suites")
    arguments = parser.parse_args()
    known = json.loads(arguments.out.read_text()) if _exists(arguments.out) else {}
    results: dict[str, dict[str, str | None]] = {}
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy_tracked_files(arguments.repository, Path(folder) / "repository")
        for name, defect in BREAKS.items():
            if arguments.only not in name or (arguments.new and name in known):
                continue
            results[name] = noticed(copy, defect, whole=arguments.whole)
            print(f"{name}: {json.dumps(results[name])}", flush=True)
            if arguments.out:
                known[name] = results[name]
                arguments.out.write_text(json.dumps(known, indent=1) + "\n")
    return int(any(result["suite"] is None for result in results.values()))


def noticed(repository: Path, defect: Break, *, whole: bool) -> dict[str, str | None]:
    """Returns the suite and the test that fails first for a defect, or None for both.

    Raises:
      ValueError: the text to replace does not occur exactly once.
    """
    path = repository / defect.path
    source = path.read_text("utf-8")
    if (count := source.count(defect.before)) != 1:
        raise ValueError(f"{defect.path}: expected {defect.before!r} once, got it {count} times")
    path.write_text(source.replace(defect.before, defect.after), "utf-8")
    try:
        for suite, marker, files in _runs(defect.tests, whole):
            test = _first_failure(repository, marker, files)
            if test is not None:
                return {"suite": suite, "test": test}
    finally:
        path.write_text(source, "utf-8")
    return {"suite": None, "test": None}


def _runs(files: Sequence[str], whole: bool) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yields the suite, marker expression and files of each run of pytest."""
    for paths in (files, ("tests",)) if whole else (files,):
        yield "quick", "not slow", paths
        yield "slow", "slow", paths


def _first_failure(repository: Path, marker: str, files: Sequence[str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", marker, *files]
    paths = [str(repository), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        command,
        cwd=repository,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},  # before an installed copy
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode in (0, _NO_TESTS_RAN):
        return None
    failed = _FAILED.search(run.stdout)
    if failed is None:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {run.stdout[-2000:]}")
    return failed.group(1)


def _copy_tracked_files(repository: Path, folder: Path) -> Path:
    """Copies the tracked files of the working tree and returns the folder."""
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True, check=True
    )
    for name in filter(None, files.stdout.split("\0")):
        if (repository / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((repository / name).read_bytes())
    return folder


def _exists(path: Path | None) -> bool:
    return path is not None and path.is_file()


if __name__ == "__main__":
    sys.exit(main())

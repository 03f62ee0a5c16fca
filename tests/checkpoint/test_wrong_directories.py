"""The commands convert, verify and export with a directory of another kind, or interrupted.

One line describes the directory and names the command that continues.
"""

import os
import re
import signal
from pathlib import Path

import pytest

from dsv3_jax.checkpoint import convert as converting
from dsv3_jax.checkpoint import export as exporting
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.export import export
from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.command import run
from tests.support.trees import contents, snapshot


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, Path]:
    """Returns a directory of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    config = small_config()
    write_checkpoint(folder / "hf", config, random_tensors(config), dtype="fp8", shards=3)
    convert(folder / "hf", folder / "store")
    for name, file in (
        ("begun", "journal.jsonl"),
        ("hf.partial", ".unfinished.json"),
        ("run", "run.json"),
        ("other", "notes.txt"),
    ):
        (folder / name).mkdir()
        (folder / name / file).write_text("{}\n")
    (folder / "empty").mkdir()
    (folder / "file").touch()
    return {path.name: path for path in folder.iterdir()} | {"missing": folder / "missing"}


STORE = r"a store \(dsv3 export writes it as a Hugging Face directory\)"
BEGUN = r"an unfinished conversion \(dsv3 convert --resume continues it\)"
PARTIAL = r"an unfinished export \(the same dsv3 export command continues it\)"
RUN = r"a training run \(dsv3 export writes its model as a Hugging Face directory\)"
HF = r"a Hugging Face directory \(dsv3 convert makes a store of it\)"


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        ("convert", "store", f"expected a Hugging Face directory, got {STORE}"),
        ("convert", "begun", f"expected a Hugging Face directory, got {BEGUN}"),
        ("convert", "hf.partial", f"expected a checkpoint, got {PARTIAL}"),
        ("convert", "run", f"expected a checkpoint, got {RUN}"),
        ("convert", "empty", "expected a config.json, found none"),
        ("verify", "begun", "an unfinished conversion; continue it with dsv3 convert --resume"),
        ("verify", "hf.partial", f"expected a checkpoint, got {PARTIAL}"),
        ("verify", "run", f"expected a checkpoint, got {RUN}"),
        ("verify", "other", "expected a config.json, found none"),
        ("verify", "file", "expected 'demo', a directory, or a Hub name; got the file"),
        ("export", "hf", f"expected a store or a training run, found no run.json: {HF}"),
        ("export", "hf.partial", f"found no run.json: {PARTIAL}"),
        ("export", "begun", "an unfinished conversion; continue it with dsv3 convert --resume"),
        ("export", "empty", "found no run.json: an empty directory"),
        ("export", "other", "run.json: a directory without manifest.json and config.json"),
        ("export", "file", "found no run.json: a file"),
        ("export", "missing", "found no run.json: no such directory"),
        ("export", "demo", rf"error: STORE\|RUN_DIR: demo: .*found no run.json: {HF}"),
    ],
)
def test_a_directory_of_another_kind(kinds, tmp_path, capsys, command, kind, message):
    source = kinds.get(kind, kind)
    destination = [] if command == "verify" else [tmp_path / "new"]
    assert run(command, source, *destination) == 2
    out, err = capsys.readouterr()
    assert out == ""
    line = err.splitlines()[-1]
    assert re.match(rf"dsv3 {command}: error: ", line)
    assert re.search(message, line), line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["hf", "run", "other", "empty", "missing"])
def test_other_directories_are_not_called_unfinished(kinds, tmp_path, kind):
    with pytest.raises(ValueError, match=rf"{kind}: expected a store, got (a|an|no) ") as caught:
        export(kinds[kind], tmp_path / "new")
    assert "--resume" not in str(caught.value)


def test_an_export_into_its_store(kinds):
    before = snapshot(kinds["store"])
    with pytest.raises(ValueError, match=r"hf: expected a directory outside of the store .*store$"):
        export(kinds["store"], kinds["store"] / "hf")
    assert snapshot(kinds["store"]) == before


def ctrl_c() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("stop", "status"), [(ctrl_c, 130), (kill, 143)])
def test_an_interrupted_convert_names_resume(kinds, tmp_path, capsys, monkeypatch, stop, status):
    source, store, plain, units = kinds["hf"], tmp_path / "store", converting.convert_unit, []

    def interrupted(*arguments):
        units.append(arguments)
        if len(units) == 3:
            stop()
        return plain(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(converting, "convert_unit", interrupted)
        assert run("convert", source, store, "--workers", 1) == status
    line = capsys.readouterr().err.splitlines()[-1]
    message = "finished units are kept; the same command with --resume continues with them"
    assert line == f"dsv3 convert: interrupted: {store}: {message}"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert run("convert", source, store, "--resume") == 0
    assert contents(store) == contents(kinds["store"])


def test_an_interrupted_export_lists_its_finished_shards(kinds, tmp_path, capsys, monkeypatch):
    plain, shards = exporting._write, []

    def interrupted(directory, shard, progress):
        shards.append(shard)
        if len(shards) == 2:
            raise KeyboardInterrupt
        plain(directory, shard, progress)

    with monkeypatch.context() as patch:
        patch.setattr(exporting, "_write", interrupted)
        assert run("export", kinds["store"], tmp_path / "hf", "--workers", 1) == 130
    line = capsys.readouterr().err.splitlines()[-1]
    message = f"finished shards are kept in {tmp_path / 'hf.partial'}"
    assert line == f"dsv3 export: interrupted: {message}; the same command continues with them"
    assert sorted(os.listdir(tmp_path)) == ["hf.partial"]
    assert run("export", kinds["store"], tmp_path / "hf") == 0
    assert contents(tmp_path / "hf") == contents(kinds["hf"])

"""Untrusted stores and directories cannot refer to files outside themselves or outside an export.

Everything else that is wrong with them is refused in one line.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash

from dsv3_jax.checkpoint import find
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.export import export
from dsv3_jax.checkpoint.open_checkpoint import open_checkpoint
from dsv3_jax.checkpoint.store import ArrayFiles
from dsv3_jax.checkpoint.verify import verify
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX, SINGLE
from tests.checkpoint.values import small_config
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.trees import contents

MANIFEST = "manifest.json"
SHARD = "model-00001-of-00002.safetensors"
EVIL = ["../../evil", "/{root}/evil", "..", "sub/evil", "a\\..\\evil", "evil\n", "evil\0", ""]


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    config = small_config()
    options = {"dtype": "fp8", "shards": 2}
    write_checkpoint(folder / "source", config, random_tensors(config), **options)
    (folder / "source" / "tokenizer_config.json").write_text("{}\n")
    convert(folder / "source", folder / "store")
    return folder


@pytest.fixture
def root(tmp_path) -> Path:
    """Returns a directory with files that a malicious name could reach from store or export."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def store(root, sound) -> Path:
    return shutil.copytree(sound / "store", root / "a" / "b" / "store")


def change(store: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    files.edit_json(store / MANIFEST, edit)


def renamed(table: dict[str, Any], old: str, new: str) -> None:
    """Renames a key of a table in place."""
    entries = [(new if key == old else key, value) for key, value in table.items()]
    table.clear()
    table.update(entries)


def assert_refused(store: Path, root: Path, pattern: str, to: Any = None) -> None:
    before = contents(root)
    with pytest.raises(ValueError, match=pattern) as caught:
        export(store, root / "a" / "b" / "hf", to)
    assert re.fullmatch(r".{10,600}", str(caught.value)), str(caught.value)
    after = contents(root)
    assert [name for name in after if "hf" not in name] == list(before)
    assert not (root / "a" / "b" / "hf").exists()
    assert "evil" not in "".join(after)


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [None, "bf16"])
@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_a_shard_in_the_manifest(root, store, name, to):
    """A header exists at the path that the name leads to, as an attacker would arrange it."""
    name = name.format(root=root) + ".safetensors" * (name not in ("", ".."))
    header = (store / "source" / "headers" / SHARD).read_bytes()

    def rename(manifest):
        renamed(manifest["files"], SHARD, name)
        renamed(manifest["kept"], f"headers/{SHARD}", f"headers/{name}")
        for tensor in manifest["source"].values():
            tensor[3] = name if tensor[3] == SHARD else tensor[3]

    change(store, rename)
    if "\0" not in name:
        target = Path(os.path.normpath(store / "source" / "headers" / name))
        if target.parent.is_dir() and not target.is_dir() and "/" in name:
            target.write_bytes(header)
    shutil.rmtree(root / "a" / "evil", ignore_errors=True)
    with pytest.raises(ValueError, match=rf"{MANIFEST}: files: expected a plain file name ending"):
        export(store, root / "a" / "b" / "hf", to)
    assert sorted(os.listdir(root / "a" / "b")) == ["store"]


@pytest.mark.parametrize("name", [*EVIL, "headers/../../evil", "headers/", "other/evil"], ids=ascii)
def test_a_kept_file_in_the_manifest(root, store, name):
    name = name.format(root=root)
    change(store, lambda manifest: renamed(manifest["kept"], "tokenizer_config.json", name))
    assert_refused(store, root, rf"{MANIFEST}: kept: expected a plain file name, got ")


def test_a_hidden_kept_file(root, store):
    """Such a file could be mistaken for the marker of an unfinished export."""
    mark = ".unfinished.json"
    (store / "source" / mark).write_text("{}")
    hash = xxhash.xxh3_128_hexdigest(b"{}")
    change(store, lambda manifest: manifest["kept"].update({mark: hash}))
    assert_refused(store, root, rf"{MANIFEST}: kept: expected no hidden file, got '{mark}'")


def test_a_kept_file_with_the_name_of_a_shard(root, store):
    (store / "source" / SHARD).write_text("{}")
    hash = xxhash.xxh3_128_hexdigest(b"{}")
    change(store, lambda manifest: manifest["kept"].update({SHARD: hash}))
    assert_refused(store, root, f"{SHARD} is both a kept file and a shard")


@pytest.mark.parametrize("name", EVIL, ids=ascii)
def test_a_tensor_in_the_manifest(root, store, name):
    name = name.format(root=root)
    change(store, lambda manifest: renamed(manifest["tensors"], "model.norm.weight", name))
    for to in (None, "bf16"):
        assert_refused(store, root, rf"{MANIFEST}: tensors: expected a plain file name, got ", to)


@pytest.mark.parametrize(
    "name", ["model.layers.x.weight", "layers", "layers.1.mlp.experts", "layers.1.experts.x.up"]
)
def test_a_tensor_that_no_model_has(root, store, name):
    change(store, lambda manifest: renamed(manifest["tensors"], "model.norm.weight", name))
    assert_refused(store, root, rf"{MANIFEST}: expected the name of a tensor, got '{name}'")


def test_an_array_outside_of_its_directory(tmp_path):
    with pytest.raises(ValueError, match=r"weights: expected a plain file name, got '\.\./a'"):
        ArrayFiles(tmp_path / "weights")["../a"]


@pytest.mark.parametrize("name", ["../evil.safetensors", "/evil.safetensors", "*.safetensors/x"])
def test_the_hub_is_not_asked_for_them(root, sound, monkeypatch, name):
    directory = shutil.copytree(sound / "source", root / "source")
    (directory / SHARD).unlink()
    files.edit_json(
        directory / INDEX,
        lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], name)),
    )
    asked = []

    def download(repository, allow_patterns):
        asked.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ValueError, match=f"^{INDEX}: .*: expected a plain file name ending in"):
        find.find("org/name")
    assert len(asked) == 1


# ---- links ---------------------------------------------------------------------------------------


def test_a_kept_file_that_is_a_link(root, store):
    """A link could refer to any file of the user who exports the store."""
    tokenizer_file = store / "source" / "tokenizer_config.json"
    tokenizer_file.rename(root / "private")
    tokenizer_file.symlink_to(root / "private")
    assert_refused(store, root, r"tokenizer_config\.json: missing, unknown or damaged$")
    findings = verify(open_checkpoint(store)).findings
    assert len(findings) == 1
    assert re.fullmatch(
        r"source/tokenizer_config\.json: expected hash \w+, got no such file", findings[0]
    )


@pytest.mark.parametrize("inside", ["source", "weights/norm.weight", "source/config.json"])
def test_a_resumed_conversion_does_not_write_through_links(root, store, sound, inside):
    (store / MANIFEST).unlink()
    (store / "journal.jsonl").touch()
    (store / inside).rename(root / "elsewhere")
    (store / inside).symlink_to(root / "elsewhere")
    before = contents(root / "a"), os.stat(root / "elsewhere").st_mtime_ns
    with pytest.raises(ValueError, match=rf"{inside}: a symbolic link; expected a store"):
        convert(sound / "source", store, resume=True)
    assert (contents(root / "a"), os.stat(root / "elsewhere").st_mtime_ns) == before


@pytest.mark.parametrize("there", [True, False])
def test_a_destination_that_is_a_link(root, store, sound, there):
    """The link is refused before any work, and the message mentions no files to resume."""
    link = root / "link"
    link.symlink_to(root / ("a" if there else "nothing"))
    with pytest.raises(ValueError, match=r"does not exist yet, got the symbolic link .*link$"):
        export(store, link)
    expected = (
        "got one with other files" if there else "expected a directory, got a symbolic link to noth"
    )
    with pytest.raises(ValueError, match=expected) as caught:
        convert(sound / "source", link)
    assert "--resume" not in str(caught.value)
    assert sorted(os.listdir(root)) == ["a", "link"]


# ---- other damage --------------------------------------------------------------------------------


def spoil_header(store: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Writes another header, with its correct hash in the manifest."""
    path = store / "source" / "headers" / SHARD
    header = json.loads(path.read_bytes())
    edit(header)
    path.write_bytes(json.dumps(header).encode())
    hash = xxhash.xxh3_128_hexdigest(path.read_bytes())
    change(store, lambda manifest: manifest["kept"].update({f"headers/{SHARD}": hash}))


def first_tensor(header: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in header.items() if name != "__metadata__")


def drop_last(header: dict[str, Any]) -> None:
    names = [name for name in header if name != "__metadata__"]
    header.pop(max(names, key=lambda name: header[name]["data_offsets"]))


@pytest.mark.parametrize(
    ("edit", "pattern"),
    [
        (lambda header: first_tensor(header).update(shape=[5]), "do not hold"),
        (lambda header: first_tensor(header).update(dtype="F99"), "expected a dtype among"),
        (lambda header: header.update(x=3), "expected dtype, shape and two data_offsets"),
        (lambda header: first_tensor(header)["shape"].append(1), "not the tensor that the man"),
        (lambda header: renamed(header, next(iter(header)), "other"), "not the tensor that the"),
        (drop_last, "bytes in all, as the manifest has, got"),
    ],
)
def test_a_header_that_does_not_fit(root, store, edit, pattern):
    def without_metadata(header):
        header.pop("__metadata__", None)
        edit(header)

    spoil_header(store, without_metadata)
    assert_refused(store, root, rf"{re.escape(SHARD)}: .*{pattern}")


def test_a_store_that_lacks_a_tensor(root, store):
    change(store, lambda manifest: manifest["tensors"].pop("model.norm.weight"))
    assert_refused(store, root, "missing tensor model.norm.weight", "bf16")


def test_an_array_that_is_smaller_than_the_manifest_says(root, store):
    name = "model.norm.weight"

    def widen(manifest):
        for table in ("tensors", "source"):
            manifest[table][name][1] = [999]

    change(store, widen)
    shape = re.escape("expected tensors of bfloat16 (999,), got bfloat16 (64,)")
    with pytest.raises(OSError, match=shape):
        open_checkpoint(store).arrays[name][...]


ODD = [None, 3, -1, 0.5, "x", "", [], ["x"], {}, {"x": 1}, True, [[[]]]]


def leaves(value: Any, path: tuple = ()) -> list[tuple]:
    """Returns paths to every value in JSON. Long tables are represented by their first entry."""
    out = [path]
    if isinstance(value, dict):
        for key in list(value)[: None if not path else 1]:
            out += leaves(value[key], (*path, key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            out += leaves(item, (*path, i))
    return out


def refusal(store: Path) -> str | None:
    """Returns the message with which a store is refused, or None if it opens."""
    try:
        open_checkpoint(store)
    except ValueError as error:
        return str(error)
    return None


def test_whatever_a_manifest_holds_is_read_or_refused_in_one_line(store):
    content = json.loads((store / MANIFEST).read_text())
    (store / "source" / "unused.safetensors").unlink(missing_ok=True)
    tried = 0
    for path in leaves(content)[1:]:
        if path[0] == "config":
            continue  # test_config.py has these
        for odd in ODD:
            changed = json.loads(json.dumps(content))
            node = changed
            for key in path[:-1]:
                node = node[key]
            node[path[-1]] = odd
            (store / MANIFEST).write_text(json.dumps(changed))
            tried += 1
            if (line := refusal(store)) is not None:
                assert re.fullmatch(r".{10,600}", line), (path, odd, line)
    assert tried > 200
    for text in ("[" * 100_000, '{"format": ' + "9" * 5000 + "}", "[]", "3", "{}", "\xff"):
        (store / MANIFEST).write_text(text, "latin-1")
        with pytest.raises(ValueError, match=rf"\A.*{MANIFEST}: .*expected.*\Z"):
            open_checkpoint(store)


def test_a_source_with_a_file_that_the_store_has_other_uses_for(root, sound):
    directory = shutil.copytree(sound / "source", root / "source")
    (directory / "export.json").write_text("{}")
    convert(directory, root / "store")
    export(root / "store", root / "hf")
    assert contents(root / "hf") == contents(directory)
    (directory / "headers").write_text("")
    with pytest.raises(ValueError, match="headers: a store cannot keep a file of this name"):
        convert(directory, root / "other")
    assert CONFIG in contents(directory)
    assert SINGLE not in contents(directory)

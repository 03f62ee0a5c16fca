"""Names are resolved to directories: paths, the Hub's local cache, and names that are neither."""

import os
import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

import dsv3_jax
from dsv3_jax.checkpoint.find import find_config_directory
from tests.checkpoint.files import CONFIG, INDEX, SINGLE, edit_json
from tests.checkpoint.values import assert_holds, loaded

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cached(checkpoint, hub_cache):
    """Puts a checkpoint into the Hub's cache as links to hashed blobs, as the Hub's client does."""

    def put(name, **options):
        source, expected = checkpoint(**options)
        home = hub_cache / ("models--" + name.replace("/", "--"))
        snapshot = home / "snapshots" / REVISION
        for folder in (snapshot, home / "refs", home / "blobs"):
            folder.mkdir(parents=True)
        (home / "refs" / "main").write_text(REVISION)
        for number, file in enumerate(sorted(source.iterdir())):
            blob = home / "blobs" / f"{number:064x}"
            file.rename(blob)
            (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
        return snapshot, expected

    return put


def refusal(name, **options):
    """Returns the one-line message with which `name` is refused."""
    with pytest.raises(ValueError, match=r"\A[^\n]+\Z") as caught:
        dsv3_jax.load(name, **options)
    return str(caught.value)


# ---- the Hub -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["org/name", "deepseek-ai/DeepSeek-V3.1_x"])
def test_a_cached_name(cached, name, shards):
    _, expected = cached(name, dtype="bfloat16", shards=shards)
    assert_holds(loaded(name), expected)


def test_a_directory_goes_before_the_hub(cached, tmp_path, monkeypatch):
    snapshot, expected = cached("org/name")
    (tmp_path / "elsewhere" / "org").mkdir(parents=True)
    (tmp_path / "elsewhere" / "org" / "name").symlink_to(snapshot)
    (snapshot.parents[1] / "refs" / "main").unlink()
    assert "not available from the Hub" in refusal("org/name")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert_holds(loaded("org/name"), expected)


def test_a_name_that_is_not_cached(cached):
    cached("org/name")
    message = refusal("org/another")
    assert message.startswith("model 'org/another': no such directory, and not available from the")


def test_a_snapshot_that_lacks_a_shard(cached):
    """An interrupted download leaves such a snapshot, which needs the network to complete."""
    snapshot, _ = cached("org/name", shards=3)
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    assert refusal("org/name").endswith("missing: model-00002-of-00003.safetensors")


def test_a_snapshot_whose_blob_is_gone(cached):
    snapshot, _ = cached("org/name", shards=3)
    (snapshot / "model-00003-of-00003.safetensors").resolve().unlink()
    assert refusal("org/name").endswith("missing: model-00003-of-00003.safetensors")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(), "OSError"),
        (RuntimeError("first line\nsecond line"), "first line"),
        (ConnectionError(" \n"), "ConnectionError"),
    ],
)
def test_any_error_of_the_client_becomes_one_line(monkeypatch, error, reason):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    assert refusal("org/name").endswith(f"from the Hub: {reason}")


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch):
    """Returns a fake Hub that serves a checkpoint's files by pattern, and records their names."""

    def serve(**options):
        source, _ = checkpoint(**options)
        (source / "model-00009-of-00009.safetensors").write_bytes(b"of an earlier upload")
        (source / "pytorch_model.bin").write_bytes(b"the same weights once more")
        local, given = tmp_path / "local", []

        def download(name, *, allow_patterns):
            assert name == "org/name"
            local.mkdir(exist_ok=True)
            names = sorted(path.name for path in source.iterdir())
            for file in filter_repo_objects(names, allow_patterns=allow_patterns):
                if file not in given:
                    shutil.copyfile(source / file, local / file)
                    given.append(file)
            return str(local)

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        return source, given

    return serve


def test_a_download_has_the_files_of_the_index(hub):
    _, given = hub(shards=3)
    loaded("org/name")
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert given == [CONFIG, INDEX, *shards]


def test_a_download_without_an_index(hub):
    _, given = hub()
    loaded("org/name")
    assert given == [CONFIG, SINGLE]


def test_the_config_is_looked_at_before_gigabytes_come(hub):
    source, given = hub(shards=3)
    edit_json(source / CONFIG, lambda config: config.update(model_type="llama"))
    assert refusal("org/name").startswith("model_type: expected one of deepseek_v2, ")
    assert given == [CONFIG, INDEX]


@pytest.mark.parametrize("content", ["", "[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_downloads_nothing(hub, content):
    source, given = hub(shards=3)
    (source / INDEX).write_text(content)
    assert refusal("org/name").startswith(f"{INDEX}: ")
    assert given == [CONFIG, INDEX]


@pytest.mark.parametrize("shard", ["*.safetensors", "../x.safetensors", "[a-z]*", "model-*"])
def test_an_index_names_files_and_not_patterns(hub, shard):
    source, given = hub(shards=3)
    edit_json(source / INDEX, lambda index: index.update(weight_map={"lm_head.weight": shard}))
    refusal("org/name")
    assert given == [CONFIG, INDEX]


# ---- paths ---------------------------------------------------------------------------------------


def test_a_path_in_every_spelling(checkpoint, monkeypatch):
    directory, expected = checkpoint()
    monkeypatch.chdir(directory.parent)
    for path in (directory, f"{directory}/", "checkpoint"):
        assert_holds(loaded(path), expected)
    monkeypatch.chdir(directory)
    for path in (Path(), "../checkpoint"):
        assert_holds(loaded(path), expected)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a",
        "a/b/c",
        "/nowhere/x",
        "/x",
        "./missing",
        "../missing",
        "~/model",
        "org/",
        "/org/name",
        "org/name\n",
        "org/na me",
        "https://huggingface.co/org/name",
        "org\\name",
        "a\0b",
        "\ud800/x",
        "x" * 5000,
        None,
        3,
        b"org/name",
        ["org/name"],
    ],
)
def test_no_name_at_all(checkpoint, monkeypatch, name):
    """An empty string is not the current directory, even inside a checkpoint."""
    directory, _ = checkpoint()
    monkeypatch.chdir(directory)
    message = refusal(name)
    assert message.startswith("model: expected 'demo', a directory, or a Hub name; got ")
    assert message.endswith(repr(name))


@pytest.mark.parametrize("name", ["org/..", "org/.", "org/a--b", "org/-name", "a" * 100 + "/x"])
def test_names_that_the_hub_does_not_allow(name):
    assert refusal(name).startswith(f"model {name!r}: no such directory, and not available from")


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_is_not_its_directory(checkpoint, monkeypatch, file):
    directory, _ = checkpoint()
    monkeypatch.chdir(directory.parent)
    # The second of them looks like a Hub name.
    for path in (directory / file, f"checkpoint/{file}"):
        assert refusal(path).endswith(f"got the file {str(path)!r}")


def test_a_description_needs_no_weights(hub):
    """Only small files are downloaded for a Hub name, so that prompts can be checked first."""
    _, given = hub()
    assert (find_config_directory("org/name") / CONFIG).is_file()
    assert given
    assert not [name for name in given if name.endswith((".safetensors", ".bin"))]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("demmo", "demo"),
        ("deepseek-v3", "deepseek-ai/DeepSeek-V3"),
        ("deepsek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1"),
        ("here/mdoel", os.path.join("here", "model")),
    ],
)
def test_a_misspelt_name(tmp_path, monkeypatch, name, meant):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert refusal(name).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize("name", ["deepseek-ai/DeepSeek-V3", "org/name", "???", ""])
def test_a_name_like_no_other(name):
    assert "did you mean" not in refusal(name)

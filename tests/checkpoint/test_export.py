"""Stores are exported as Hugging Face directories: with the original bytes, or in another form."""

import itertools
import json
import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tokenizers

import dsv3_jax
from dsv3_jax.checkpoint import export as exporting
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.export import export
from dsv3_jax.checkpoint.tensor_table import UNUSED_SUFFIXES
from dsv3_jax.tokenizer import Tokenizer
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, INDEX, SINGLE, Stored
from tests.checkpoint.test_conversion import rounded_once
from tests.checkpoint.test_loaded_values import CONFIGS, STORAGE
from tests.checkpoint.values import loaded, same_bytes, small_config
from tests.support.checkpoints import BIAS, is_fp8
from tests.support.command import run
from tests.support.covering import slow_except
from tests.support.tables import small_v3_2, write_table
from tests.support.tokenizer_files import SHAPES, write_shape
from tests.support.trees import contents, snapshot

FP8 = [name for name in STORAGE if name.startswith("fp8")]


def converted(directory: Path, to: str = "fp8") -> Path:
    store = directory.with_name(f"store-{to}")
    convert(directory, store, to)
    return store


# ---- the source again ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "storage"), slow_except([*itertools.product(CONFIGS, FP8)], quick=range(0, 99, 4))
)
def test_float8_comes_back_byte_for_byte(checkpoint, tmp_path, config, storage):
    directory, _ = checkpoint(CONFIGS[config], **STORAGE[storage])
    (directory / "tokenizer_config.json").write_text('{"model_max_length": 3}')
    (directory / "modeling.py").write_text("pass\n")
    planned = export(converted(directory), tmp_path / "again")
    assert planned.verbatim
    assert contents(tmp_path / "again") == contents(directory)


def test_bfloat16_comes_back_too(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="bfloat16", shards=3)
    assert export(converted(directory, "bf16"), tmp_path / "again").verbatim
    assert contents(tmp_path / "again") == contents(directory)


def test_v3_2_comes_back(tmp_path):
    write_table(tmp_path / "source", small_v3_2())
    export(converted(tmp_path / "source"), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "source")


def test_unused_tensors_and_odd_headers_come_back(checkpoint, tmp_path):
    """Covers rope buffers, metadata, padding, and headers in another order than the bytes."""
    directory, _ = checkpoint(dtype="fp8")
    buffers = {
        f"model.layers.{layer}.self_attn{UNUSED_SUFFIXES[0]}": Stored.of(
            np.full(3, np.nan, np.float32)
        )
        for layer in range(2)
    }
    files.edit(directory / SINGLE, lambda tensors: tensors.update(buffers))
    header, data = files.split(directory / SINGLE)
    shuffled = {"__metadata__": {"by": "hand"}} | dict(sorted(header.items(), reverse=True))
    files.join(directory / SINGLE, json.dumps(shuffled, indent=3).encode() + b"   ", data)
    assert export(converted(directory), tmp_path / "again").verbatim
    assert contents(tmp_path / "again") == contents(directory)


def test_copies_that_the_source_lacks_stay_away(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="fp8")
    lacking = "model.layers.2.embed_tokens.weight"
    files.edit(directory / SINGLE, lambda tensors: tensors.pop(lacking))
    store = converted(directory)
    export(store, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(directory)
    export(store, tmp_path / "wide", "bf16")
    names = files.read_directory(tmp_path / "wide")
    assert lacking not in names
    assert "model.layers.2.shared_head.head.weight" in names


def test_the_demo_comes_back(tmp_path):
    demo = Path(dsv3_jax.__file__).parent / "demo"
    convert("demo", tmp_path / "store")
    export(tmp_path / "store", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(demo)


# ---- another form --------------------------------------------------------------------------------


@pytest.mark.parametrize("by_way_of", ["fp8", "bf16"])
@pytest.mark.parametrize("storage", FP8)
def test_bfloat16_is_rounded_once(checkpoint, tmp_path, storage, by_way_of):
    directory, exact = checkpoint(CONFIGS["wide"], **STORAGE[storage])
    export(converted(directory, by_way_of), tmp_path / "bf16", "bf16")
    got = files.read_directory(tmp_path / "bf16")
    assert set(got) == set(exact)
    for name, value in exact.items():
        expected = value.astype(np.float32) if name.endswith(BIAS) else rounded_once(value)
        assert got[name].dtype == ("F32" if name.endswith(BIAS) else "BF16")
        np.testing.assert_array_equal(got[name].array, expected, err_msg=name)
    config = json.loads((tmp_path / "bf16" / CONFIG).read_text())
    was = json.loads((directory / CONFIG).read_text())
    was.pop("quantization_config")
    assert config == was | {"torch_dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["int8", "int4"])
def test_integer_weights_become_their_values(checkpoint, tmp_path, to):
    directory, _ = checkpoint(CONFIGS["wide"], dtype="fp8")
    store = converted(directory, to)
    assert not export(store, tmp_path / "hf").verbatim
    stands_for = loaded(store, dtype="bfloat16")
    assert same_bytes(loaded(tmp_path / "hf", dtype="bfloat16"), stands_for)


@pytest.mark.slow
def test_float8_that_the_store_made(checkpoint, tmp_path):
    """Values and scales are written unchanged instead of being quantized again."""
    directory, _ = checkpoint(CONFIGS["wide"], dtype="bfloat16")
    store = converted(directory, "fp8")
    export(store, tmp_path / "hf")
    settings = {"quantization": "fp8"}
    assert same_bytes(loaded(tmp_path / "hf", **settings), loaded(store, **settings))
    convert(tmp_path / "hf", tmp_path / "again")
    assert export(tmp_path / "again", tmp_path / "twice").verbatim


@pytest.mark.slow
@pytest.mark.parametrize("to", ["bf16", "int8"])
def test_float8_of_another_form(checkpoint, tmp_path, to):
    directory, _ = checkpoint(CONFIGS["wide"], dtype="fp8", scale_fmt="ue8m0")
    store = converted(directory, to)
    export(store, tmp_path / "hf", "fp8")
    dense = loaded(store)
    for name, value in loaded(tmp_path / "hf").items():
        assert (np.abs(value - dense[name]) <= np.abs(dense[name]) / 16 + 4e-3).all()
    for name, tensor in files.read_directory(tmp_path / "hf").items():
        if name.endswith("_scale_inv"):
            assert (np.frexp(tensor.array)[0] == 0.5).all()
        assert (tensor.dtype == "F8_E4M3") == is_fp8(name)


def test_shards_are_filled_and_scales_stay_with_their_weights(checkpoint, tmp_path, monkeypatch):
    directory, _ = checkpoint(CONFIGS["wide"], dtype="bfloat16")
    store = converted(directory, "int8")
    whole = export(store, tmp_path / "one", "fp8")
    monkeypatch.setattr(exporting, "_SHARD_BYTES", 200_000)
    parts = export(store, tmp_path / "many", "fp8", workers=3)
    assert len(whole.shards) == 1
    assert len(parts.shards) > 3
    assert max(shard.bytes for shard in parts.shards) <= 200_000 + 1000
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    for name, file in index["weight_map"].items():
        assert index["weight_map"].get(f"{name}_scale_inv", file) == file
    assert index["metadata"]["total_size"] == whole.bytes
    one, many = (files.read_directory(tmp_path / name) for name in ("one", "many"))
    assert one == many


@pytest.mark.parity
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # it warns that it dequantizes without a GPU
def test_transformers_loads_float8(checkpoint, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    # 128 columns and more: transformers counts blocks of its own without partial ones.
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 256}
    directory, expected = checkpoint(small_config(**sizes), dtype="bfloat16")
    export(converted(directory, "fp8"), tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ours = loaded(tmp_path / "hf")
    for name in ("model.layers.0.mlp.gate_proj.weight", "model.layers.1.self_attn.o_proj.weight"):
        value = theirs.state_dict()[name].float().numpy()
        np.testing.assert_allclose(value, ours[name], rtol=1e-6)
        assert not np.array_equal(value, expected[name])


@pytest.mark.slow
@pytest.mark.parity
def test_transformers_loads_it(checkpoint, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    directory, expected = checkpoint(dtype="fp8", shards=3)
    export(converted(directory), tmp_path / "hf", "bf16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    parameters = theirs.state_dict()
    name = "model.layers.0.mlp.gate_proj.weight"
    value = parameters[name].view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(value, rounded_once(expected[name]))


@pytest.mark.parametrize("to", [None, "bf16"])
def test_its_tokenizer_adds_bos(checkpoint, tmp_path, to):
    """transformers does not read ``add_bos_token``. The source's own files stay as they are."""
    directory, _ = checkpoint(small_config(vocab_size=270), dtype="fp8")
    write_shape(directory, SHAPES["flag"])
    export(converted(directory), tmp_path / "hf", to)
    _, tokenizer = dsv3_jax.load(tmp_path / "hf")
    assert tokenizer is not None
    assert tokenizer.encode("ab") == Tokenizer(directory).encode("ab")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    assert (library.encode("ab").ids == tokenizer.encode("ab")) == (to is not None)


# ---- what goes wrong -----------------------------------------------------------------------------


def test_an_existing_directory(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="fp8")
    store = converted(directory)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="expected a directory that does not exist yet"):
        export(store, tmp_path / "there")


@pytest.mark.parametrize("to", [None, "bf16"])
def test_the_disk_is_checked_first(checkpoint, tmp_path, monkeypatch, capsys, to):
    """The needed space is that of all files, less what an interrupted export has left."""
    store, out = converted(checkpoint(dtype="fp8", shards=3)[0]), tmp_path / "there"
    export(store, tmp_path / "other", to)
    size = sum(path.stat().st_size for path in (tmp_path / "other").iterdir())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size - 1))
    flags = ["--to", to] if to else []
    assert run("export", store, out, *flags) == 2
    line = capsys.readouterr().err
    message = f"{out}: expected {size:,} bytes of free disk, got {size - 1:,}"
    assert line == f"dsv3 export: error: {message}\n"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        export(store, out, to)
    assert not out.exists()
    partial = out.with_name("there.partial")
    assert not partial.exists()
    partial.mkdir()
    (partial / "shard").write_bytes(b"0")
    export(store, out, to)
    assert contents(out) == contents(tmp_path / "other")


@pytest.mark.parametrize("to", [None, "bf16"])
def test_a_store_that_is_damaged(checkpoint, tmp_path, to):
    directory, _ = checkpoint(dtype="fp8")
    store = converted(directory)
    name = "layers.0.self_attn.o_proj.weight"
    (chunk,) = (p for p in (store / "weights" / name).rglob("c/**/*") if p.is_file())
    content = bytearray(chunk.read_bytes())
    content[100] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(ValueError, match=rf"^model\.{name}: the store is damaged; .*$"):
        export(store, tmp_path / "hf", to)
    assert not (tmp_path / "hf").exists()
    chunk.unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: .* missing; .*$"):
        export(store, tmp_path / "hf", to)


@pytest.mark.parametrize("name", [CONFIG, f"headers/{SINGLE}"])
def test_a_kept_file_that_is_damaged(checkpoint, tmp_path, name):
    directory, _ = checkpoint(dtype="fp8")
    store = converted(directory)
    with (store / "source" / name).open("ab") as file:
        file.write(b" ")
    with pytest.raises(ValueError, match=rf"{name}: missing, unknown or damaged$"):
        export(store, tmp_path / "hf")


def test_an_interrupted_export_keeps_its_shards(checkpoint, tmp_path, monkeypatch):
    directory, _ = checkpoint(dtype="fp8", shards=3, scales_in_other_shard=True)
    store = converted(directory)
    plain, written = exporting.as_bytes, []

    def failing(array):
        written.append(array.nbytes)
        if len(written) == 60:
            raise OSError(28, "No space left on device")
        return plain(array)

    monkeypatch.setattr(exporting, "as_bytes", failing)
    message = r"finished shards are kept in .*hf\.partial; the same command continues with them$"
    with pytest.raises(ValueError, match=f"No space left on device; {message}"):
        export(store, tmp_path / "hf", workers=1)
    assert not (tmp_path / "hf").exists()
    finished = list((tmp_path / "hf.partial").glob("*.safetensors"))
    assert len(finished) == 1
    before = finished[0].stat()
    written[:] = [0] * 100  # no further failure
    export(store, tmp_path / "hf", workers=1)
    assert (tmp_path / "hf" / finished[0].name).stat().st_mtime_ns == before.st_mtime_ns
    assert contents(tmp_path / "hf") == contents(directory)
    assert not (tmp_path / "hf.partial").exists()


@pytest.mark.parametrize("second", [None, "bf16"])
def test_two_exports_to_one_destination_do_not_mix(checkpoint, tmp_path, monkeypatch, second):
    """A second export is refused while the first one runs, and after it has ended."""
    directory, _ = checkpoint(dtype="fp8", shards=3)
    store = converted(directory)
    plain, refused = exporting.as_bytes, []

    def meanwhile(array):
        if not refused:
            refused.append(None)
            with pytest.raises(ValueError, match=r"hf: another process is writing it$") as caught:
                export(store, tmp_path / "hf", second, workers=1)
            refused.append(str(caught.value))
        return plain(array)

    monkeypatch.setattr(exporting, "as_bytes", meanwhile)
    export(store, tmp_path / "hf", workers=1)
    assert len(refused) == 2
    assert contents(tmp_path / "hf") == contents(directory)
    with pytest.raises(ValueError, match="does not exist yet"):
        export(store, tmp_path / "hf", second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint", "hf", "store-fp8"]


def test_the_store_is_only_read(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    store = converted(directory)
    before = snapshot(store)
    for to in (None, "bf16"):
        export(store, tmp_path / f"hf-{to}", to)
    assert snapshot(store) == before


def test_an_interrupted_export_of_another_kind_is_not_gone_on_with(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="fp8")
    store = converted(directory)
    export(store, tmp_path / "bf16", "bf16")
    shutil.copytree(tmp_path / "bf16", tmp_path / "hf.partial")
    export(store, tmp_path / "hf")
    assert contents(tmp_path / "hf") == contents(directory)


def test_the_command(checkpoint, tmp_path, capsys):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    store = converted(directory)
    assert run("export", store, tmp_path / "hf", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["verbatim"], result["shards"]) == (True, 3)
    assert contents(tmp_path / "hf") == contents(directory)
    for wrong in (["--step", 3], ["--to", "float32"]):
        assert run("export", store, tmp_path / "other", *wrong) == 2
        assert wrong[0] in capsys.readouterr().err
    (store / "manifest.json").rename(store / "journal.jsonl")
    assert run("export", store, tmp_path / "other") == 2
    assert "unfinished conversion" in capsys.readouterr().err

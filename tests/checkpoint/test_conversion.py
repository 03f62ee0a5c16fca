"""Stores have the values of their sources, for every target and source format."""

import dataclasses
import itertools
import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

import dsv3_jax
from dsv3_jax.checkpoint import arrays, manifest, stored_arrays
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.reader import FileArray
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.checkpoint.tensor_table import stored_location
from sharding import make_mesh
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, SINGLE, Stored
from tests.checkpoint.test_loaded_values import CONFIGS, STORAGE
from tests.checkpoint.values import loaded, same_bytes, small_config
from tests.support.checkpoints import BIAS, is_fp8
from tests.support.command import run
from tests.support.covering import slow_except
from tests.support.tables import small_v3_2, write_table
from tests.support.trees import contents

TARGETS = ("fp8", "bf16", "int8", "int4")


def rounded_once(exact: np.ndarray) -> np.ndarray:
    """Rounds float64 to bfloat16: to the nearer neighbour, or to the even one of two."""
    down = np.abs(exact).astype(np.float32)
    down = np.where(down > np.abs(exact), np.nextafter(down, np.float32(0)), down)
    bits = down.view(np.uint32) >> 16
    low, high = ((bits + n << 16).view(np.float32).astype(np.float64) for n in (0, 1))
    below, above = np.abs(exact) - low, high - np.abs(exact)
    up = (above < below) | ((above == below) & (bits % 2 == 1))
    return np.copysign(np.where(up, high, low), exact).astype(ml_dtypes.bfloat16)


def twice_rounded(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns float8 values and scales whose product rounds differently by way of float32."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 100, 2**22).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 1, values.shape).astype(np.float32)
    exact = values.astype(np.float64) * scales.astype(np.float64)
    through = (values.astype(np.float32) * scales).astype(ml_dtypes.bfloat16)
    (differ,) = np.nonzero(through != rounded_once(exact))
    assert len(differ) >= count
    return values[differ[:count]], scales[differ[:count]]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("config", ["small", "wide"])
def test_bfloat16_is_the_float64_product_rounded_once(checkpoint, tmp_path, config, storage):
    directory, exact = checkpoint(CONFIGS[config], **STORAGE[storage])
    convert(directory, tmp_path / "store", "bf16")
    store = StoreReader(tmp_path / "store")
    for name, value in exact.items():
        if name not in store:
            assert name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
            continue
        expected = value.astype(np.float32) if name.endswith(BIAS) else rounded_once(value)
        assert store[name].dtype == expected.dtype
        np.testing.assert_array_equal(store[name][...], expected, err_msg=name)


@pytest.mark.slow
def test_values_are_rounded_once(checkpoint, tmp_path):
    """Blocks have one element, so that every value has its own scale."""
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # [40, 64]
    directory, _ = checkpoint(dtype="fp8", block=(1, 1))
    values, scales = twice_rounded(16)

    def plant(tensors):
        weight, scale = (tensors[n].array.copy() for n in (name, f"{name}_scale_inv"))
        weight[3, 5:21], scale[3, 5:21] = values, scales
        tensors[name], tensors[f"{name}_scale_inv"] = Stored.of(weight), Stored.of(scale)

    files.edit(directory / SINGLE, plant)
    convert(directory, tmp_path / "store", "bf16")
    exact = values.astype(np.float64) * scales.astype(np.float64)
    got = StoreReader(tmp_path / "store")[name][3:4, 5:21][0]
    np.testing.assert_array_equal(got, rounded_once(exact))


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "fp8-scales-elsewhere"])
@pytest.mark.parametrize(("to", "bits", "group"), [("int8", 8, None), ("int4", 4, 128)])
def test_integers(checkpoint, tmp_path, to, bits, group, storage):
    """Compares rows and groups, and the error report, with the definition."""
    directory, expected = checkpoint(CONFIGS["wide"], **STORAGE[storage])
    made = convert(directory, tmp_path / "store", to)
    store = StoreReader(tmp_path / "store")
    sums: dict[str, list[float]] = {}
    for name, value in expected.items():
        if name not in store or not is_fp8(name):
            continue
        dense = value.astype(np.float32)
        stored, scale = store[name][...], store[f"{name}_scale"][...]
        assert stored.dtype == (np.int8 if bits == 8 else np.uint8)
        if bits == 4:  # the even column is the low half
            signed = stored.astype(np.int16)
            low, high = signed & 15, signed >> 4
            nibbles = np.stack([low, high], axis=-1).reshape(len(stored), -1)
            stored = np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)
        step = group or dense.shape[1]
        assert scale.shape == (len(dense), -(-dense.shape[1] // step))
        back = np.empty(dense.shape)
        for j, first in enumerate(range(0, dense.shape[1], step)):
            part, s = dense[:, first : first + step], scale[:, j : j + 1]
            limit = part.max(axis=1) / np.float32(7), part.min(axis=1) / np.float32(-8)
            want_scale = (
                np.abs(part).max(axis=1) / np.float32(127) if bits == 8 else np.maximum(*limit)
            )
            np.testing.assert_array_equal(s[:, 0], want_scale)
            got = stored[:, first : first + step]
            np.testing.assert_array_equal(got, np.rint(part / s).clip(-8 * 16 ** (bits == 8), 127))
            back[:, first : first + step] = got * s.astype(np.float64)
        kind = ".".join(p for p in name.removeprefix("model.").split(".") if not p.isdecimal())
        row = sums.setdefault(kind, [0, 0, 0.0, 0.0])
        row[0] += np.sum((back - value) ** 2)
        row[1] += np.sum(value**2)
        row[2] = max(row[2], np.abs(back - value).max())
        row[3] += 1
    assert set(made.errors) == set(sums)
    for kind, (error, weight, largest, count) in sums.items():
        assert made.errors[kind].tensors == count
        assert made.errors[kind].relative_rms == pytest.approx(math.sqrt(error / weight), rel=1e-5)
        assert made.errors[kind].largest == pytest.approx(largest, rel=1e-4)


def test_int4_needs_an_even_number_of_columns(checkpoint, tmp_path):
    directory, _ = checkpoint(small_config(intermediate_size=27))
    with pytest.raises(
        ValueError, match=r"^down_proj\.weight: int4 packs columns in pairs: .* got 27$"
    ):
        convert(directory, tmp_path / "store", "int4")


def test_a_bfloat16_source_in_float8(checkpoint, tmp_path):
    directory, expected = checkpoint(dtype="bfloat16")
    made = convert(directory, tmp_path / "store", "fp8")
    assert made.errors
    assert max(error.relative_rms for error in made.errors.values()) < 0.04
    assert min(error.relative_rms for error in made.errors.values()) > 0.01
    for name, value in loaded(tmp_path / "store").items():
        if not is_fp8(name):
            np.testing.assert_array_equal(value, expected[name])
        else:
            close = np.abs(value - expected[name]) <= np.abs(expected[name]) / 16 + 1e-3
            assert close.all()


@pytest.mark.parametrize(
    ("config", "storage"),
    slow_except(
        [*itertools.product(CONFIGS, (name for name in STORAGE if name.startswith("fp8")))],
        quick=range(0, 99, 4),
    ),
)
def test_float8_keeps_every_byte(checkpoint, tmp_path, config, storage):
    directory, _ = checkpoint(CONFIGS[config], **STORAGE[storage])
    convert(directory, tmp_path / "store")
    source = files.read_directory(directory)
    store = StoreReader(tmp_path / "store")
    repeated = {
        n for n in source if n.endswith(("shared_head.head.weight", ".embed_tokens.weight"))
    }
    repeated -= {"model.embed_tokens.weight"}
    assert set(store) == set(source) - repeated
    for name in store:
        assert (store[name].shape, store[name][...].tobytes()) == (
            source[name].shape,
            source[name].data,
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("storage", "quantization"),
    slow_except(
        [*itertools.product(["fp8", "fp8-ue8m0", "fp8-small-blocks"], [None, "fp8"])],
        quick=(0, 5),
    ),
)
def test_a_store_loads_as_its_source_does(checkpoint, tmp_path, storage, quantization):
    directory, _ = checkpoint(CONFIGS["wide"], **STORAGE[storage])
    convert(directory, tmp_path / "store")
    for dtype in ("float32", "bfloat16"):
        options = {"dtype": dtype, "quantization": quantization}
        assert same_bytes(loaded(tmp_path / "store", **options), loaded(directory, **options))


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
def test_a_model_with_an_indexer(tmp_path, to):
    """V3.2's norms stay float32, in the store and in a bfloat16 model."""
    source = write_table(tmp_path / "source", small_v3_2())
    convert(tmp_path / "source", tmp_path / "store", to)
    store = StoreReader(tmp_path / "store")
    indexer = [name for name in store if ".indexer." in name]
    assert len(indexer) == {"bf16": 5, "fp8": 7, "int8": 7, "int4": 7}[to] * 3
    for name, tensor in source.items():
        if "norm" in name:
            assert store[name][...].tobytes() == tensor.data
    model, _ = dsv3_jax.load(tmp_path / "store", dtype="bfloat16")
    attention = model.mtp[0].self_attn
    assert attention.kv_a_layernorm.weight.dtype == attention.indexer.k_norm.bias.dtype == "float32"
    if to in ("bf16", "fp8"):
        assert same_bytes(*(loaded(tmp_path / x, dtype="bfloat16") for x in ("store", "source")))


def test_mtp_layers_that_are_promised_and_absent(checkpoint, tmp_path):
    directory, _ = checkpoint(small_config(num_nextn_predict_layers=0), dtype="fp8")
    files.edit_json(directory / CONFIG, lambda c: c.update(num_nextn_predict_layers=1))
    assert convert(directory, tmp_path / "store").num_nextn_predict_layers == 0
    model, _ = dsv3_jax.load(tmp_path / "store")
    assert model.config.num_nextn_predict_layers == 0


# ---- the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["fp8", "int4"])
def test_orbax_opens_it(converted, to):
    made = converted(to, dtype="fp8") / "store"
    store = StoreReader(made)
    tree = ocp.StandardCheckpointer().restore(made / "weights")
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for name, tensor in store.items():
        location = stored_location(store.config, name)
        array = flat[location.array]
        restored = array if location.expert is None else array[location.expert]
        assert np.asarray(restored).tobytes() == tensor[...].tobytes()
    assert set(flat) == {stored_location(store.config, name).array for name in store}


def test_orbax_restores_it_sharded(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="bfloat16")
    convert(directory, tmp_path / "store", "bf16")
    mesh = make_mesh(expert=4, tensor=2)
    split = jax.sharding.NamedSharding(mesh, jax.P("expert", "tensor"))
    path = tmp_path / "store" / "weights"
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(path).item_metadata.tree
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        wanted = ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=split)
        arguments["layers"]["1"]["mlp"]["experts"]["up_proj"]["weight"] = wanted
        restored = checkpointer.restore(path, restore_args=arguments)
    experts = restored["layers"]["1"]["mlp"]["experts"]["up_proj"]["weight"]
    assert experts.sharding == split
    store = StoreReader(tmp_path / "store")
    for e in range(4):
        name = f"model.layers.1.mlp.experts.{e}.up_proj.weight"
        np.testing.assert_array_equal(experts[e], store[name][...])


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
def test_workers_and_piece_sizes_do_not_change_the_store(checkpoint, tmp_path, monkeypatch, to):
    """The result does not depend on them, and nothing larger than a piece is read or written."""
    directory, _ = checkpoint(CONFIGS["wide"], dtype="fp8", shards=3, scales_in_other_shard=True)
    convert(directory, tmp_path / "one", to, workers=1)
    convert(directory, tmp_path / "many", to, workers=5)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")

    limit = 128 * 304
    for module in (arrays, stored_arrays):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", limit)
    sizes = []
    plain = FileArray.__getitem__

    def measured(self, index):
        out = plain(self, index)
        sizes.append(out.size)
        return out

    monkeypatch.setattr(FileArray, "__getitem__", measured)
    convert(directory, tmp_path / "pieces", to, workers=2)
    assert max(sizes) <= limit
    assert max(map(math.prod, (t.shape for t in StoreReader(tmp_path / "one").values()))) > limit
    one, pieces = StoreReader(tmp_path / "one"), StoreReader(tmp_path / "pieces")
    assert {n: t[...].tobytes() for n, t in one.items()} == {
        n: t[...].tobytes() for n, t in pieces.items()
    }
    assert one.manifest.tensors == pieces.manifest.tensors


def test_the_manifest(checkpoint, tmp_path):
    directory, _ = checkpoint(dtype="fp8", shards=3, scales_in_other_shard=True)
    (directory / "tokenizer_config.json").write_text("{}")
    made = convert(directory, tmp_path / "store")
    assert manifest.read(tmp_path / "store") == made
    assert made.config == json.loads((directory / CONFIG).read_text())
    assert made.tool == f"dsv3_jax {dsv3_jax.__version__}"
    source = files.read_directory(directory)
    assert set(made.source) == set(source)
    for name, tensor in made.source.items():
        assert tensor.hash == arrays.digest(source[name].array)
        assert name in files.read(directory / tensor.file)
    for path in directory.glob("*.safetensors"):
        assert made.files[path.name].bytes == path.stat().st_size
    assert set(made.kept) >= {CONFIG, "tokenizer_config.json"}
    assert not (tmp_path / "store" / "journal.jsonl").exists()


def test_an_unfinished_store_is_refused(converted, tmp_path):
    shutil.copytree(converted("fp8", dtype="fp8") / "store", tmp_path / "store")
    (tmp_path / "store" / "manifest.json").rename(tmp_path / "store" / "journal.jsonl")
    with pytest.raises(ValueError, match=r"unfinished conversion; continue it with .*--resume$"):
        dsv3_jax.load(tmp_path / "store")


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b"{", "damaged"),
        (b'{"format": "dsv3_jax store 0"}', "expected the format"),
        (b'{"format": "dsv3_jax store 1"}', "damaged"),
    ],
)
def test_a_damaged_manifest(converted, tmp_path, content, pattern):
    shutil.copytree(converted("fp8", dtype="fp8") / "store", tmp_path / "store")
    (tmp_path / "store" / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=pattern):
        dsv3_jax.load(tmp_path / "store")


# ---- the command ---------------------------------------------------------------------------------


def test_the_command(checkpoint, tmp_path, capsys):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    assert run("convert", directory, tmp_path / "store", "--to", "int8", "--json") == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert result["tensors"] == len(files.read_directory(directory))
    size = sum(len(tensor.data) for tensor in files.read_directory(directory).values())
    assert result["source_bytes"] == size
    assert "layers.mlp.experts.up_proj.weight" in result["errors"]
    assert "relative rms" in output.err
    stored = sum(
        p.stat().st_size for p in (tmp_path / "store" / "weights").rglob("c/**/*") if p.is_file()
    )
    assert 0 <= stored - result["store_bytes"] < 200 * result["files"]
    assert run("convert", directory, tmp_path / "store", "--to", "int8") == 2
    assert "contains a complete store" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(checkpoint, tmp_path, capsys):
    directory, _ = checkpoint(dtype="fp8", shards=3)
    assert run("convert", directory, tmp_path / "store", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["keeps_bytes"] is True
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("workers", [0, -1])
def test_too_few_workers(checkpoint, tmp_path, workers):
    directory, _ = checkpoint(dtype="fp8")
    with pytest.raises(ValueError, match=f"^workers: expected at least 1, got {workers}$"):
        convert(directory, tmp_path / "store", workers=workers)


def test_too_little_disk(checkpoint, tmp_path, monkeypatch):
    directory, _ = checkpoint(dtype="fp8")
    usage = dataclasses.make_dataclass("Usage", ["free"])(1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(ValueError, match=r"expected [\d,]+ bytes of free disk, got 1,000$"):
        convert(directory, tmp_path / "store")
    assert not (tmp_path / "store").exists()

"""Written checkpoints are complete or absent, readable by other programs, and reproducible."""

import dataclasses
import functools
import itertools
import json
import os
import re
import shutil
import stat

import numpy as np
import pytest
import safetensors
from safetensors import SafetensorError

import dsv3_jax
from dsv3_jax.checkpoint import reader, writer
from dsv3_jax.checkpoint.convert import convert
from dsv3_jax.checkpoint.parameters import published_tensors
from dsv3_jax.checkpoint.tensor_table import tensor_table
from dsv3_jax.checkpoint.writer import write_checkpoint
from dsv3_jax.config import ModelConfig
from dsv3_jax.initialization import parameter_count
from dsv3_jax.quantization import BlockQuantization
from sharding import Placement, make_layout
from tests.checkpoint.files import CONFIG, INDEX, read, read_directory
from tests.checkpoint.values import assert_holds, loaded, same_bytes, small_config
from tests.support import checkpoints
from tests.support.checkpoints import is_fp8, quantize_blocks, tiny_config
from tests.support.filled import filled_model
from tests.support.oracle import dequantize

SCALE = "_scale_inv"
BLOCKS = BlockQuantization((24, 40))  # several blocks, with partial ones in both directions


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns a model that no test changes."""
    directory = tmp_path_factory.mktemp("model")
    config = small_config()
    checkpoints.write_checkpoint(directory, config, checkpoints.random_tensors(config))
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="module")
def wholes(model, tmp_path_factory):
    """Returns the model's files in one shard, by quantization."""

    @functools.cache
    def whole(quantization):
        directory = tmp_path_factory.mktemp("whole") / "checkpoint"
        write_checkpoint(model, directory, quantization=quantization)
        assert len(list(directory.glob("*.safetensors"))) == 1
        return read_directory(directory), loaded(directory)

    return whole


@pytest.fixture
def out(tmp_path):
    return tmp_path / "not" / "yet" / "there"


# ---- what is written -----------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, BLOCKS])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_published_tensors_and_config(checkpoint, out, layers, quantization):
    directory, _ = checkpoint(small_config(num_nextn_predict_layers=layers))
    model, _ = dsv3_jax.load(directory)
    write_checkpoint(model, out, quantization=quantization)
    config = ModelConfig.from_hf(out)
    assert config == dataclasses.replace(
        model.config, quantization=quantization, dtype="bfloat16", num_nextn_predict_layers=layers
    )
    stored = {name: (t.shape, t.dtype) for name, t in read_directory(out).items()}
    table = {name: (spec.shape, spec.dtype) for name, spec in tensor_table(config).items()}
    assert stored == table


def test_values_in_bfloat16(checkpoint, out):
    """The correction bias keeps all its bits."""
    directory, expected = checkpoint()
    model, _ = dsv3_jax.load(directory)
    write_checkpoint(model, out)
    assert_holds(loaded(out, dtype="bfloat16"), expected, "bfloat16")


def test_a_model_without_its_mtp_layer(checkpoint, out):
    directory, _ = checkpoint(dtype="bfloat16")
    model, _ = dsv3_jax.load(directory, mtp=False)
    write_checkpoint(model, out)
    assert ModelConfig.from_hf(out).num_nextn_predict_layers == 0
    assert same_bytes(loaded(out), loaded(directory, mtp=False))


@pytest.mark.slow
@pytest.mark.parametrize(("quantization", "layout"), [(None, "dp_attention_ep"), (BLOCKS, None)])
def test_placed_experts_are_written_as_logical_ones(tmp_path, quantization, layout):
    """Every file equals that of the model without replicas, byte for byte."""
    config = ModelConfig.from_hf(tiny_config(num_hidden_layers=2))
    config = dataclasses.replace(config, quantization=quantization)
    model = filled_model(config, quantization, layout and make_layout(layout))
    balanced = Placement.balanced(np.random.default_rng(1).zipf(1.5, (2, 8)), 16, 4, 2, 8)
    rotated = Placement.from_phy2log(np.tile(np.roll(np.arange(8), 1), (2, 1)), 8)
    models = {
        "logical": model,
        "balanced": model.place_experts(balanced),
        "rotated": model.place_experts(balanced).place_experts(rotated),
        "ready": model.place_experts(rotated).precompute_for_decode(),
    }
    assert len({parameter_count(each) for each in models.values()}) == 1
    written = {}
    for name, each in models.items():
        write_checkpoint(each, tmp_path / name, quantization=quantization, dtype="float32")
        written[name] = {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()}
    assert all(files == written["logical"] for files in written.values())


@pytest.mark.parametrize("scale_fmt", ["float32", "ue8m0"])
def test_values_in_float8(checkpoint, out, scale_fmt):
    directory, expected = checkpoint()
    model, _ = dsv3_jax.load(directory)
    write_checkpoint(model, out, quantization=dataclasses.replace(BLOCKS, scale_fmt=scale_fmt))
    keys = json.loads((out / CONFIG).read_text())["quantization_config"]
    assert keys["weight_block_size"] == [24, 40]
    assert keys.get("scale_fmt", "float32") == scale_fmt
    stored = read_directory(out)
    quantized = [name for name in expected if is_fp8(name)]
    assert len(quantized) > 30
    for name in quantized:
        scale = stored[name + SCALE].array
        _, best = quantize_blocks(
            expected[name], BLOCKS.weight_block_size, power_of_two=scale_fmt == "ue8m0"
        )
        np.testing.assert_allclose(scale, best, rtol=1e-6 if scale_fmt == "float32" else 0)
        got = dequantize(stored[name].array, scale, BLOCKS.weight_block_size)
        # Half a unit in the last of three bits of the mantissa, or of the smallest numbers.
        step = np.repeat(np.repeat(scale, 24, 0), 40, 1)[: got.shape[0], : got.shape[1]]
        bound = np.maximum(np.abs(expected[name]) * 2**-4, step * 2**-10)
        assert (np.abs(got - expected[name]) <= bound * 1.0001).all(), name
    others = {name: value for name, value in expected.items() if name not in quantized}
    got = loaded(out, dtype="bfloat16")
    assert_holds({name: got[name] for name in others}, others, "bfloat16")


@pytest.mark.parametrize("source", ["float32", "bfloat16", "fp8"])
def test_written_again_nothing_changes(checkpoint, out, source):
    """A float32 model that came from float8 is quantized to the same values.

    Scales may differ: if the largest value of a block was rounded down to a power of two, it is the
    largest value of half the scale.
    """
    quantization, options = None, {}
    if source == "fp8":
        options = {"scale_fmt": "ue8m0", "block": BLOCKS.weight_block_size}
        quantization = dataclasses.replace(BLOCKS, scale_fmt="ue8m0")
    directory, _ = checkpoint(dtype=source, **options)
    first, second = out / "first", out / "second"
    write_checkpoint(dsv3_jax.load(directory)[0], first, quantization=quantization)
    write_checkpoint(dsv3_jax.load(first)[0], second, quantization=quantization)
    assert read_directory(first) == read_directory(second)
    if source != "float32":
        assert same_bytes(loaded(first), loaded(directory))


@pytest.mark.parametrize(
    ("scale_fmt", "dtype"), [(None, "float32"), (None, "bfloat16"), ("ue8m0", "bfloat16")]
)
def test_float8_weights_are_written_as_they_are(checkpoint, out, scale_fmt, dtype):
    directory, _ = checkpoint(dtype="fp8", block=BLOCKS.weight_block_size, scale_fmt=scale_fmt)
    model, _ = dsv3_jax.load(directory, quantization="fp8", dtype=dtype)
    write_checkpoint(model, out, quantization=model.config.quantization)
    assert read_directory(out) == read_directory(directory)


@pytest.mark.parametrize(
    "quantization", [None, BlockQuantization(), dataclasses.replace(BLOCKS, scale_fmt="ue8m0")]
)
def test_float8_weights_are_not_quantized_otherwise(checkpoint, out, quantization):
    directory, _ = checkpoint(dtype="fp8", block=BLOCKS.weight_block_size)
    model, _ = dsv3_jax.load(directory, quantization="fp8")
    line = re.escape(
        f"the model holds float8 weights; expected quantization={BLOCKS}, got {quantization}"
    )
    with pytest.raises(ValueError, match=f"^{line}$"):
        write_checkpoint(model, out, quantization=quantization)
    assert not out.parent.exists()


# ---- shards --------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, BLOCKS])
@pytest.mark.parametrize("limit", [1, 5_000, 20_000, 60_000])
def test_shards(model, wholes, out, limit, quantization):
    write_checkpoint(model, out, quantization=quantization, shard_bytes=limit)
    index = json.loads((out / INDEX).read_text())
    shards = sorted(path.name for path in out.glob("*.safetensors"))
    assert {path.name for path in out.iterdir()} == {CONFIG, INDEX, *shards}
    count = len(shards)
    assert count > 2
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    place, sizes = {}, []
    for shard in shards:
        tensors = read(out / shard)
        assert tensors
        assert not place.keys() & tensors.keys()
        place |= dict.fromkeys(tensors, shard)
        in_order = [name for name, file in index["weight_map"].items() if file == shard]
        sizes.append([len(tensors[name].data) for name in in_order])
    assert index["weight_map"] == place
    assert set(place) == set(tensor_table(ModelConfig.from_hf(out)))
    assert index["metadata"]["total_size"] == sum(map(sum, sizes))
    for size, following in itertools.pairwise(sizes):
        assert sum(size) <= limit or len(size) == 1
        assert sum(size) + following[0] > limit  # one more would have exceeded the limit
    assert sum(sizes[-1]) <= limit or len(sizes[-1]) == 1
    tensors, weights = wholes(quantization)
    assert read_directory(out) == tensors
    assert same_bytes(loaded(out), weights)


# ---- for others ----------------------------------------------------------------------------------


@pytest.mark.parametrize("quantization", [None, BLOCKS])
def test_the_safetensors_package_reads_it(model, out, quantization):
    write_checkpoint(model, out, quantization=quantization, shard_bytes=60_000)
    ours = read_directory(out)
    theirs = {}
    for path in out.glob("*.safetensors"):
        with safetensors.safe_open(path, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            for name in file.keys():  # noqa: SIM118, the object is no mapping
                assert tuple(file.get_slice(name).get_shape()) == ours[name].shape
        for name, tensor in safetensors.deserialize(path.read_bytes()):
            theirs[name] = (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
    assert theirs == {name: (t.dtype, t.shape, t.data) for name, t in ours.items()}


def test_everybody_may_read_it(model, out):
    mask = os.umask(0o022)
    try:
        write_checkpoint(model, out, shard_bytes=60_000)
    finally:
        os.umask(mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()}
    assert len(modes) > 4
    assert set(modes.values()) == {0o644}
    assert stat.S_IMODE(out.stat().st_mode) == 0o755


# ---- whole or not at all -------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, "config.json"])
def test_an_existing_directory_is_refused(model, tmp_path, content):
    existing = tmp_path / "existing"
    existing.mkdir()
    if content:
        (existing / content).write_text("precious")
    line = re.escape(f"expected a directory that does not exist yet, got {existing}")
    with pytest.raises(ValueError, match=f"^{line}$"):
        write_checkpoint(model, existing)
    assert [path.read_text() for path in existing.iterdir()] == ["precious"] * bool(content)
    assert not existing.with_name("existing.partial").exists()


def test_an_existing_file_is_refused(model, tmp_path):
    existing = tmp_path / "existing"
    existing.write_text("precious")
    with pytest.raises(
        ValueError, match=r"^expected a directory that does not exist yet, got \S+$"
    ):
        write_checkpoint(model, existing)
    assert existing.read_text() == "precious"


class PowerCut(BaseException):
    """A BaseException, so that no handler of ordinary exceptions catches it."""


def test_integer_weights_are_refused(checkpoint, tmp_path, out):
    directory, _ = checkpoint()
    convert(directory, tmp_path / "store", "int8")
    model, _ = dsv3_jax.load(tmp_path / "store", quantization="int8")
    with pytest.raises(ValueError, match=r"^the model holds integer weights, which no published"):
        write_checkpoint(model, out)
    assert not out.exists()


@pytest.mark.slow
@pytest.mark.parametrize("last", [CONFIG, "model-00001-of-", "model-00003-of-", INDEX, "rename"])
def test_interrupted(model, out, monkeypatch, last):
    """The directory does not exist before the end, and the next run removes partial files."""
    with monkeypatch.context() as interrupted:
        for name in ("write_file", "atomic_write"):
            interrupted.setattr(writer, name, until(last, getattr(writer, name)))
        if last == "rename":
            interrupted.setattr("pathlib.Path.rename", until("there.partial", lambda *_: None))
        with pytest.raises(PowerCut):
            write_checkpoint(model, out, shard_bytes=5_000)
    assert not out.exists()
    write_checkpoint(model, out, shard_bytes=60_000)
    index = json.loads((out / INDEX).read_text())
    written = {path.name for path in out.iterdir()}
    assert written == {CONFIG, INDEX, *index["weight_map"].values()}
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert_holds(loaded(out, dtype="bfloat16"), published_tensors(model), "bfloat16")


def test_the_model_is_only_read_and_the_destination_is_locked(model, out, monkeypatch):
    before = {name: np.copy(value) for name, value in published_tensors(model).items()}
    write = writer.write_file

    def meanwhile(path, tensors):
        with pytest.raises(ValueError, match=r"there: another process is writing it$"):
            write_checkpoint(model, out)
        write(path, tensors)

    monkeypatch.setattr(writer, "write_file", meanwhile)
    write_checkpoint(model, out)
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    after = published_tensors(model)
    assert list(after) == list(before)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


def test_a_full_disk_leaves_nothing(model, out, monkeypatch):
    def full(path, tensors):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(writer, "write_file", full)
    with pytest.raises(ValueError, match=r": No space left on device; nothing was written$"):
        write_checkpoint(model, out)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("quantization", [None, BlockQuantization()])
def test_the_disk_is_checked_first(model, out, monkeypatch, quantization):
    monkeypatch.setattr(writer, "published_tensors", None)  # no weight is gathered before
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10_000))
    message = rf"^{re.escape(str(out))}: expected [\d,]+ bytes of free disk, got 10,000$"
    with pytest.raises(ValueError, match=message):
        write_checkpoint(model, out, quantization=quantization)
    assert not out.parent.exists()


@pytest.mark.parametrize("form", [{}, {"quantization": BlockQuantization()}, {"dtype": "float32"}])
def test_the_checked_size_is_enough(model, out, monkeypatch, form):
    write_checkpoint(model, out, **form)
    size = sum(path.stat().st_size for path in out.iterdir())
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size))
    with pytest.raises(ValueError, match="bytes of free disk"):
        write_checkpoint(model, out.with_name("second"), **form)
    # Names are long against the weights of such a small model.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size + 100_000))
    write_checkpoint(model, out.with_name("second"), **form)


def test_a_disk_that_fills_up_while_it_is_written(model, out, monkeypatch):
    """The package that writes the files has an error class of its own."""

    def full(*_):
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr(reader, "serialize_file", full)
    with pytest.raises(ValueError, match=r": No space left on device; nothing was written$"):
        write_checkpoint(model, out)
    assert list(out.parent.iterdir()) == []


def test_other_files_appear_with_the_weights(model, out):
    seen = []

    def add(directory):
        seen.append(out.exists())
        (directory / "tokenizer.json").write_text("{}")

    write_checkpoint(model, out, add_files=add)
    assert seen == [False]
    assert (out / "tokenizer.json").read_text() == "{}"


def until(last, write):
    """Returns a `write` that raises PowerCut after the file whose name begins with `last`."""

    def wrapped(path, *args):
        write(path, *args)
        if path.name.startswith(last):
            raise PowerCut

    return wrapped

"""`dsv3 verify` accepts complete checkpoints, reports damage, and agrees with NumPy."""

import json
import math
import shutil
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from dsv3_jax.checkpoint import arrays as arrays_module
from dsv3_jax.checkpoint import verify as verify_module
from dsv3_jax.checkpoint.compare import compare
from dsv3_jax.checkpoint.conversion_plan import plan_conversion
from dsv3_jax.checkpoint.open_checkpoint import group_by_kind, open_checkpoint
from dsv3_jax.checkpoint.verify import ValueStats, total_bytes, verify
from dsv3_jax.cli import progress as progress_lines
from dsv3_jax.cli.progress import ByteProgress
from dsv3_jax.config import ModelConfig
from tests.checkpoint import files
from tests.checkpoint.files import CONFIG, SINGLE, Stored, edit_json
from tests.checkpoint.values import small_config
from tests.support.checkpoints import BIAS, is_fp8, random_tensors, write_checkpoint
from tests.support.command import run

BLOCK = (32, 16)
NORM = "model.layers.0.input_layernorm.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # [40, 64]
GATE = "model.layers.1.mlp.gate.weight"
UP = "model.layers.1.mlp.experts.2.up_proj.weight"  # [48, 64]
COPY = "model.layers.2.embed_tokens.weight"
FP8 = {"dtype": "fp8", "block": BLOCK}


def damage(directory, change):
    files.edit(directory / SINGLE, change)


def poke(name, place, value):
    """Returns a change of one value in a stored tensor. For float8 it is given by its bits."""

    def change(tensors):
        stored = tensors[name]
        array = stored.array.copy()
        codes = array.dtype == ml_dtypes.float8_e4m3fn
        (array.view(np.uint8) if codes else array)[place] = value
        tensors[name] = Stored.of(array)

    return change


def findings(directory):
    return verify(open_checkpoint(directory)).findings


# ---- what is good --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "shards": 5},
        FP8,
        {**FP8, "shards": 4, "scales_in_other_shard": True},
        {**FP8, "scale_fmt": "ue8m0"},
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_good_directory(checkpoint, options, workers):
    directory, expected = checkpoint(**options)
    good = open_checkpoint(directory)
    read = []
    result = verify(good, workers=workers, progress=read.append)
    assert result.findings == []
    assert result.tensors == len(good.arrays)
    assert sum(read) == result.nbytes == total_bytes(good)
    assert list(result.stats) == good.readable_weights()
    assert set(result.stats) == set(expected)
    for name, figures in result.stats.items():
        exact = expected[name].astype(np.float64)
        assert figures.values == exact.size
        assert figures.largest == pytest.approx(np.abs(exact).max(), rel=1e-6)
        assert figures.rms == pytest.approx(math.sqrt(np.mean(exact**2)), rel=1e-6)
        assert (figures.scales is not None) == (options["dtype"] == "fp8" and is_fp8(name))


def test_the_range_of_scales_is_numpys(checkpoint):
    directory, _ = checkpoint(**FP8)
    opened = open_checkpoint(directory)
    result = verify(opened)
    for name, figures in result.stats.items():
        if figures.scales is not None:
            scales = opened.arrays[name + "_scale_inv"][...]
            assert figures.scales == (scales.min(), scales.max())


def test_a_scale_of_zero_over_zeros_is_good(checkpoint):
    directory, _ = checkpoint(**FP8)

    def blank(tensors):
        poke(UP, np.s_[32:, 48:], 0)(tensors)
        poke(UP, (40, 50), 0x80)(tensors)  # -0
        poke(UP + "_scale_inv", (1, 3), 0)(tensors)

    damage(directory, blank)
    assert findings(directory) == []


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.rotary_emb.inv_freq"])
def test_tensors_that_no_model_reads_are_verified(checkpoint, name):
    directory, _ = checkpoint()
    damage(directory, lambda t: t.update({name: Stored.of(np.ones(7, np.float32))}))
    opened = open_checkpoint(directory)
    read = []
    assert verify(opened, progress=read.append).findings == []
    assert sum(read) == total_bytes(opened)


def test_mtp_layers_that_were_left_out(checkpoint):
    directory, _ = checkpoint()
    damage(directory, lambda t: [t.pop(n) for n in list(t) if n.startswith("model.layers.2.")])
    assert findings(directory) == []


def test_mtp_layers_that_are_not_promised(checkpoint):
    """Like `load`, verify accepts them and leaves them out. A store could not reproduce them."""
    directory, _ = checkpoint()
    edit_json(directory / CONFIG, lambda config: config.pop("num_nextn_predict_layers"))
    assert findings(directory) == []
    message = r"^checkpoint: unknown tensor model\.layers\.2\.\S+ and 31 more: an MTP layer; expec"
    with pytest.raises(ValueError, match=message):
        plan_conversion(directory, "int8")


# ---- findings ------------------------------------------------------------------------------------

NONFINITE = "NaN or infinity"
SCALES = "expected finite scales above 0, got another"


@pytest.mark.parametrize(
    ("options", "change", "line"),
    [
        ({}, lambda t: t.pop(UP), f"{UP}: missing"),
        ({}, lambda t: t.update({"x.weight": t[UP]}), "x.weight: unknown, not a tensor of this"),
        (
            {},
            lambda t: t.update({KV_A: t[KV_A].reshaped(64, 40)}),
            f"{KV_A}: expected shape (40, 64), got (64, 40)",
        ),
        (
            {},
            lambda t: t.update({GATE: Stored.of(np.zeros((4, 64), np.int32))}),
            f"{GATE}: expected F32, got I32",
        ),
        (FP8, lambda t: t.pop(UP + "_scale_inv"), f"{UP}_scale_inv: missing"),
        ({}, poke(GATE, (2, 17), np.nan), f"{GATE}: {NONFINITE} at [2, 17]"),
        ({}, poke(NORM, 5, -np.inf), f"{NORM}: {NONFINITE} at [5]"),
        (
            {"dtype": "bfloat16"},
            poke(UP, np.s_[47, 60:], np.inf),
            f"{UP}: {NONFINITE} at [47, 60] and 3 more",
        ),
        (FP8, poke(UP, (40, 63), 0x7F), f"{UP}: {NONFINITE} at [40, 63]"),
        (FP8, poke(UP, (0, 0), 0xFF), f"{UP}: {NONFINITE} at [0, 0]"),
        (FP8, poke(UP + "_scale_inv", (1, 2), np.nan), f"{UP}_scale_inv: {SCALES} at [1, 2]"),
        (FP8, poke(UP + "_scale_inv", (0, 0), np.inf), f"{UP}_scale_inv: {SCALES} at [0, 0]"),
        (FP8, poke(UP + "_scale_inv", (1, 0), -0.5), f"{UP}_scale_inv: {SCALES} at [1, 0]"),
        (
            FP8,
            poke(UP + "_scale_inv", np.s_[1, 2:], 0),
            f"{UP}_scale_inv: a scale of 0 over weights that are not 0 at [1, 2] and 1 more",
        ),
        (FP8, poke(UP + "_scale_inv", (0, 1), 3e38), f"{UP}: {NONFINITE} at [0, "),
        ({}, poke(COPY, (3, 3), 9), f"{COPY}: differs from model.embed_tokens.weight, which"),
    ],
)
def test_a_finding(checkpoint, options, change, line):
    directory, _ = checkpoint(**options)
    damage(directory, change)
    (finding,) = [f for f in findings(directory) if f.startswith(line)]
    assert "\n" not in finding


@pytest.mark.parametrize("name", [NORM, "model.embed_tokens.weight"])
def test_a_scale_of_a_tensor_that_has_none(checkpoint, name):
    """It is unknown, and does not change the values of the tensor."""
    directory, expected = checkpoint(**FP8)
    scale = Stored.of(np.full((5, 4), 2.0, np.float32))
    damage(directory, lambda tensors: tensors.update({f"{name}_scale_inv": scale}))
    result = verify(open_checkpoint(directory))
    assert result.findings == [f"{name}_scale_inv: unknown, not a tensor of this config"]
    assert result.stats[name].largest == pytest.approx(np.abs(expected[name]).max(), rel=1e-6)
    assert result.stats[name].scales is None


def test_a_nan_is_reported_next_to_an_invalid_scale(checkpoint):
    directory, _ = checkpoint(**FP8)
    damage(directory, poke(UP, (40, 63), 0x7F))
    damage(directory, poke(UP + "_scale_inv", (1, 3), np.nan))
    values, scales = findings(directory)
    assert values.startswith(f"{UP}: ")
    assert scales.startswith(f"{UP}_scale_inv: ")


def test_statistics_ignore_values_that_are_not_finite(checkpoint):
    directory, _ = checkpoint(**FP8)
    damage(directory, poke(UP, np.s_[:], 0x7F))
    damage(directory, poke(NORM, 0, np.inf))
    figures = verify(open_checkpoint(directory)).stats
    assert figures[UP].largest == figures[UP].rms == 0
    assert 0 < figures[NORM].largest < 2


def test_several_findings_at_once(checkpoint):
    directory, _ = checkpoint(**FP8)

    def change(tensors):
        del tensors[NORM], tensors["lm_head.weight"]
        tensors["x"] = tensors["y"] = Stored.of(np.zeros(3, np.float32))
        for expert in range(4):
            poke(f"model.layers.1.mlp.experts.{expert}.up_proj.weight", (1, 1), 0x7F)(tensors)
        poke(COPY, (0, 0), 7)(tensors)

    damage(directory, change)
    lines = findings(directory)
    named = [line.split(":")[0] for line in lines]
    experts = [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4)]
    assert sorted(named) == sorted([NORM, "lm_head.weight", "x", "y", *experts, COPY])


def test_a_disk_that_fails(checkpoint):
    directory, _ = checkpoint(shards=3)
    opened = open_checkpoint(directory)
    shard = directory / "model-00003-of-00003.safetensors"
    lost = set(files.read(shard))
    shard.write_bytes(shard.read_bytes()[:2000])
    lines = verify(opened).findings
    assert {line.split(":")[0] for line in lines} == lost
    assert all("cannot be read" in line for line in lines)


# ---- memory --------------------------------------------------------------------------------------


class Watched:
    """An array that records which parts are read, and the number of times."""

    def __init__(self, array):
        self.array = array
        self.shape, self.dtype = array.shape, array.dtype
        self.largest = 0
        self.times = np.zeros(array.shape, np.int8)

    def __getitem__(self, index):
        self.times[index] += 1
        part = self.array[index]
        self.largest = max(self.largest, part.size)
        return part


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, FP8])
def test_values_are_read_once_and_in_pieces(checkpoint, monkeypatch, options):
    monkeypatch.setattr(arrays_module, "PIECE_ELEMENTS", 2**15)
    directory, _ = checkpoint(small_config(vocab_size=2000), **options)
    opened = open_checkpoint(directory)
    watched = {name: Watched(array) for name, array in opened.arrays.items()}
    observed = opened._replace(arrays=watched)
    assert verify(observed, workers=2).findings == []
    for name, array in watched.items():
        assert array.largest <= 2**15, name
        assert (array.times == 1).all(), name
    assert watched["lm_head.weight"].largest > 2**14
    assert compare(observed, open_checkpoint(directory), workers=2).findings == []
    assert all((array.times == 2).all() for array in watched.values())


def test_memory_is_a_few_pieces(checkpoint, monkeypatch):
    monkeypatch.setattr(arrays_module, "PIECE_ELEMENTS", 2**15)
    monkeypatch.setattr(verify_module, "_PART_ELEMENTS", 2**15)
    directory, _ = checkpoint(small_config(vocab_size=40_000), dtype="bfloat16")
    opened = open_checkpoint(directory)  # embedding, head and copies of 5 MB each
    verify(opened)  # imports and caches are not measured
    tracemalloc.start()
    assert verify(opened).findings == []
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**15 * 32


# ---- comparisons ---------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path):
    """Writes a model twice, optionally changed. Returns both and their exact values."""

    def write(first, second, change=lambda tensors: None):
        config = small_config()
        tensors = random_tensors(config)
        one, other = tmp_path / "one", tmp_path / "other"
        of_one = write_checkpoint(one, config, tensors, **first)
        change(tensors)
        of_other = write_checkpoint(other, config, tensors, **second)
        return one, other, of_one, of_other

    return write


def opened(*directories):
    return [open_checkpoint(directory) for directory in directories]


FORMS = {
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16", "shards": 3},
    "fp8": FP8,
    "other blocks": {"dtype": "fp8", "block": (24, 128)},
}


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_differences_are_numpys(two, first, second):
    one, other, of_one, of_other = two(FORMS[first], FORMS[second])
    a, b = opened(one, other)
    result = compare(a, b, workers=2)
    assert result.findings == []
    assert set(result.differences) == set(of_one)
    for name, difference in result.differences.items():
        exact_a, exact_b = (of[name].astype(np.float32).astype(float) for of in (of_one, of_other))
        apart = exact_a - exact_b
        relative = math.sqrt((apart**2).sum() / (exact_a**2).sum())
        assert difference.largest == pytest.approx(np.abs(apart).max(), rel=1e-6)
        assert difference.relative_rms == pytest.approx(relative, rel=1e-6)
        stored = [side.arrays[name] for side in (a, b)]
        same = first == second or (not is_fp8(name) and stored[0].dtype == stored[1].dtype)
        assert difference.equal_bytes == same
    assert (result.first_difference is None) == (first == second)


def test_the_first_difference_has_a_name(two):
    def change(tensors):
        tensors[UP][3, 4] += 0.5
        tensors[GATE][0, 0] += 0.25

    *sides, _, _ = two(FORMS["float32"], FORMS["float32"], change)
    result = compare(*opened(*sides))
    assert result.findings == []
    assert result.first_difference == f"{GATE}: differs by up to 0.25"
    different = [name for name, d in result.differences.items() if not d.equal_bytes]
    assert different == [GATE, UP]


def test_other_bytes_of_the_same_values(two):
    one, other, *_ = two(FP8, FP8)

    def change(tensors):
        poke(UP, (0, 0), 0)(tensors)
        poke(UP + "_scale_inv", (0, 0), 0.25)(tensors)
        poke(UP, np.s_[:32, :16], 0)(tensors)

    damage(one, change)
    damage(other, change)
    damage(other, poke(UP, (0, 0), 0x80))  # -0
    assert (
        compare(*opened(one, other)).first_difference
        == f"{UP}: other bytes, though of the same values"
    )


def test_configs_that_differ(two):
    one, other, *_ = two(FP8, FP8)
    files.edit_json(other / "config.json", lambda config: config.update(rope_theta=50000))
    result = compare(*opened(one, other))
    assert result.findings == []
    assert result.first_difference == "config: rope_theta: expected 10000.0, got 50000.0"


def test_names_and_shapes_that_differ(tmp_path):
    for name, overrides in {"a": {}, "b": {"n_routed_experts": 6, "vocab_size": 200}}.items():
        config = small_config(**overrides)
        write_checkpoint(tmp_path / name, config, random_tensors(config), dtype="bfloat16")
    result = compare(*opened(tmp_path / "a", tmp_path / "b"))
    head = "lm_head.weight: expected shape (160, 64), got (200, 64)"
    assert head in result.findings
    extra = "model.layers.1.mlp.experts.5.up_proj.weight: in "
    assert [line for line in result.findings if line.startswith(extra)]
    assert UP in result.differences
    swapped = compare(*opened(tmp_path / "b", tmp_path / "a")).findings
    assert any(line.startswith(extra.replace(": in", ": expected as in")) for line in swapped)


def test_damage_is_reported_on_either_side(two):
    one, other, *_ = two(FP8, FORMS["bf16"])
    damage(one, poke(UP + "_scale_inv", (0, 0), -1))
    expected = compare(*opened(one, other)).findings
    assert expected == [f"{UP}_scale_inv: {SCALES} at [0, 0] (in {one})"]
    assert compare(*opened(other, one)).findings == expected


# ---- stores --------------------------------------------------------------------------------------


@pytest.fixture
def store(converted, tmp_path):
    """Returns a directory and its store, which a test may change."""

    def make(to, **options):
        shutil.copytree(converted(to, **(options or FP8)), tmp_path, dirs_exist_ok=True)
        return tmp_path / "checkpoint", tmp_path / "store"

    return make


@pytest.mark.parametrize("to", ["fp8", "bf16", "int8", "int4"])
def test_a_store(store, to):
    directory, made = store(to)
    result = verify(open_checkpoint(made), workers=2)
    assert result.findings == []
    compared = compare(*opened(directory, made))
    assert compared.findings == []
    assert compared.source_hashes == len(open_checkpoint(directory).arrays)
    assert compare(*opened(made, directory)).source_hashes is None
    errors = {name: d.relative_rms for name, d in compared.differences.items()}
    bounds = {"fp8": (0, 0), "bf16": (1e-4, 2.0**-8), "int8": (1e-4, 0.02), "int4": (0.02, 0.2)}
    low, high = bounds[to]
    assert all(low <= errors[name] <= high for name in errors if is_fp8(name))
    assert all(errors[name] == 0 for name in errors if not is_fp8(name))
    if to == "fp8":
        assert compared.first_difference is None


def test_a_changed_bit_of_a_store_is_reported(store):
    """Flips a bit so that the values remain finite."""
    directory, made = store("fp8")
    opened_store = open_checkpoint(made)
    name, array = UP, open_checkpoint(made).arrays[UP]
    values = array[...].copy()
    values.view(np.uint8)[3, 5] ^= 1
    changed = opened_store._replace(arrays={**opened_store.arrays, name: values})
    (line,) = verify(changed).findings
    expected = opened_store.manifest.tensors[name].hash
    assert line.startswith(f"{name}: expected hash {expected}, got ")
    (line,) = compare(open_checkpoint(directory), changed).findings
    assert line.startswith(f"{name}: expected hash {expected}, got ")


def test_a_file_beside_the_weights(store):
    _, made = store("bf16")
    path = made / "source" / "config.json"
    path.write_text(path.read_text() + " ")
    (made / "source" / "added").write_text("")
    added, config = sorted(verify(open_checkpoint(made)).findings)
    assert added.startswith("source/added: expected hash no such file, got ")
    assert config.startswith("source/config.json: expected hash ")


def test_a_source_that_has_changed(store):
    directory, made = store("int8", dtype="bfloat16")
    damage(directory, poke(UP, (0, 0), 0.125))
    result = compare(*opened(directory, made))
    assert result.findings == [f"{UP}: no longer has the bytes that {made} was made from"]
    assert result.source_hashes == len(open_checkpoint(directory).arrays) - 1


def test_a_lost_chunk(store):
    _, made = store("bf16")
    chunk = next(p for p in (made / "weights" / "lm_head.weight" / "c").rglob("*") if p.is_file())
    chunk.unlink()
    lines = findings(made)
    assert lines
    assert all(line.startswith("lm_head.weight: cannot be read: ") for line in lines)


# ---- kinds ---------------------------------------------------------------------------------------


def test_kinds_have_no_numbers():
    config = ModelConfig.from_hf(small_config())
    table = {name: name for name in random_tensors(small_config())}
    kinds = group_by_kind(config, table)
    assert kinds["layers.mlp.experts.up_proj"] == {
        1: [f"model.layers.1.mlp.experts.{e}.up_proj.weight" for e in range(4)]
    }
    assert set(kinds["layers.self_attn.q_a_proj"]) == {0, 1}
    assert set(kinds["mtp.self_attn.q_a_proj"]) == {2}
    assert kinds["lm_head"] == {-1: ["lm_head.weight"]}
    assert f"layers.mlp.gate.{BIAS}" in kinds
    assert not any(part.isdigit() for kind in kinds for part in kind.split("."))


def test_figures_add_up():
    total = ValueStats(1, 4, 2.0, 8.0, (0.1, 0.2)) + ValueStats(2, 12, 3.0, 8.0) + ValueStats()
    assert total == ValueStats(3, 16, 3.0, 16.0, (0.1, 0.2))
    assert total.rms == 1
    assert (total + ValueStats(scales=(0.05, 0.15))).scales == (0.05, 0.2)


# ---- the command ---------------------------------------------------------------------------------


def test_the_demo_is_good(capsys):
    assert run("verify", "demo") == 0
    out, err = capsys.readouterr()
    assert out.startswith("demo: 619 tensors, 15,177,616 bytes, all good\n")
    assert "\nmtp.mlp.experts.down_proj " in out
    assert "dsv3: verify 15.2 MB in " in err


def test_json_is_one_object(capsys):
    assert run("verify", "demo", "--json", "--workers", 2) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    result = json.loads(out)
    assert (result["a"], result["b"], result["plot"]) == ("demo", None, None)
    assert result["findings"] == []
    assert result["findings_total"] == 0
    assert result["bytes"] == 15_177_616
    row = result["kinds"]["layers.mlp.experts.gate_proj"]
    assert row["tensors"] == 64
    assert row["values"] == 64 * 128 * 256
    assert 0 < row["rms"] < row["largest"] < 1
    low, high = row["scales"]
    assert 0 < low < high
    assert result["kinds"]["lm_head"]["scales"] is None
    assert sum(row["tensors"] for row in result["kinds"].values()) == 331


def test_findings_are_status_2_and_listed(checkpoint, capsys):
    directory, _ = checkpoint()
    for name in (GATE, UP, NORM):
        damage(directory, poke(name, 0, np.nan))
    assert run("verify", directory) == 2
    out, err = capsys.readouterr()
    assert out == ""
    *listed, last = [line for line in err.splitlines() if NONFINITE in line]
    assert {line.split(":")[1].strip() for line in listed} == {NORM, GATE, UP}
    assert last.startswith(f"dsv3 verify: error: {NORM}: {NONFINITE} at [0] and ")
    assert last == err.splitlines()[-1]
    assert last.endswith(" and 2 more")
    assert run("verify", directory, "--json") == 2
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["findings_total"] == len(result["findings"]) == 3
    assert sum(NONFINITE in line for line in err.splitlines()) == 1


def test_of_many_findings_a_hundred_are_listed(checkpoint, capsys):
    directory, _ = checkpoint()
    extra = {f"extra.{i}": Stored.of(np.zeros(1, np.float32)) for i in range(150)}
    damage(directory, lambda tensors: tensors.update(extra))
    assert run("verify", directory, "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["findings_total"] == 150
    assert len(json.loads(out)["findings"]) == 100
    assert err.splitlines()[-1].endswith(
        "extra.0: unknown, not a tensor of this config and 149 more"
    )


def test_two_in_different_forms_are_no_error(two, capsys):
    one, other, *_ = two(FP8, FORMS["bf16"])
    assert run("verify", one, other) == 0
    out, _ = capsys.readouterr()
    assert "\nall " in out
    assert "\nfirst difference: model.layers.0.self_attn.q_a_proj.weight: differs by " in out
    assert run("verify", one, other, "--json", "--equal") == 2
    out, err = capsys.readouterr()
    result = json.loads(out)
    first = result["first_difference"]
    assert result["equal"] is False
    assert result["findings"] == [first]
    assert err.endswith(f"dsv3 verify: error: {first}\n")
    assert result["total"]["tensors"] == result["tensors"]
    row = result["kinds"]["layers.self_attn.q_a_proj"]
    assert set(row) == {"tensors", "equal_bytes", "largest", "relative_rms"}


def test_a_checkpoint_equals_itself(capsys):
    assert run("verify", "demo", "demo", "--equal", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] is True
    assert result["first_difference"] is None
    assert result["total"] == {
        "tensors": 331,
        "equal_bytes": 331,
        "largest": 0.0,
        "relative_rms": 0.0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("others", [[], ["demo"]])
def test_a_picture(tmp_path, capsys, others):
    path = tmp_path / "figures.png"
    assert run("verify", "demo", *others, "--plot", path, "--json") == 0
    assert json.loads(capsys.readouterr().out)["plot"] == str(path)
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_picture_without_scales_and_of_zeros(checkpoint, tmp_path):
    directory, _ = checkpoint(small_config(num_nextn_predict_layers=0), dtype="bfloat16")
    blank = f"model.layers.1.mlp.gate.{BIAS}"
    damage(directory, poke(blank, np.s_[:], 0))
    assert run("verify", directory, "--plot", tmp_path / "figures.png") == 0
    assert (tmp_path / "figures.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--workers", "0"], "--workers: expected at least 1, got 0"),
        (["demo", "--equal"], "--equal: expected two checkpoints, got one"),
        (["demo", "--plot", "x.jpg"], "--plot: expected a file name that ends with .png, .svg"),
        (["demo", "--plot", "/nowhere/x.png"], "--plot: expected a file in a directory that"),
        (["/nowhere/at all"], "expected 'demo', a directory"),
        ([], "A"),
    ],
)
def test_bad_usage(arguments, message, capsys):
    assert run("verify", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]


def test_a_picture_without_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run("verify", "demo", "--plot", "x.png") == 2
    assert "--plot: expected matplotlib to be installed; pip install" in capsys.readouterr().err


# ---- progress ------------------------------------------------------------------------------------


def test_progress_counts_from_every_thread(capsys, monkeypatch):
    monkeypatch.setattr(progress_lines, "_PRINT_BYTES_SECONDS", 0.0)
    with ByteProgress(4_000_000_000, "verify") as progress:
        threads = [
            threading.Thread(target=lambda: [progress.add(10**7) for _ in range(100)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("dsv3: verify 0.0/4.0 GB, ")
    assert lines[0].endswith(" to go")
    assert lines[-2].startswith("dsv3: verify 4.0/4.0 GB, ")
    assert lines[-1].startswith("dsv3: verify 4.0 GB in ")


def test_progress_shows_bytes_read_and_total(capsys):
    with ByteProgress(3_000_000, "verify") as progress:
        progress.add(1_000_000)
    assert capsys.readouterr().err.startswith("dsv3: verify 1.0 MB of 3.0 in ")

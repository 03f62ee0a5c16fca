"""Output and refusals of dsv3 plan."""

import json
import re

import pytest

from tests.support.checkpoints import sparse_config
from tests.support.command import run
from tests.training.tiny import CONFIG as TINY

SETTINGS = {
    "--model": "moonlight-16b",
    "--target": "gpu:h200x1",
    "--layout": "single",
    "--batch": "64",
    "--context": "4096",
}


def plan(*more: str, **changes: str | None) -> int:
    """Runs the command and returns its exit status. Settings that are None are left out."""
    words = SETTINGS | {f"--{name}": value for name, value in changes.items()}
    pairs = (pair for pair in words.items() if pair[1] is not None)
    return run("plan", *(word for pair in pairs for word in pair), *more)


def finite(text: str) -> dict:
    """Parses one JSON object without NaN or Infinity, so that any parser accepts it."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_table(capsys):
    assert plan() == 0
    out = capsys.readouterr().out
    title = "moonlight-16b in bf16 on gpu:h200x1, 1 device, single: 64 sequences of 4,096 tokens"
    assert title in out
    assert "latent cache" in out
    assert "bound by" in out
    assert "network" in out


def test_an_engine(capsys):
    demo = {"model": "demo", "context": "512"}
    assert plan("--serve", **demo) == 0
    out = capsys.readouterr().out
    assert "single: an engine of 64 running requests of at most 512 tokens" in out
    lines = {line[:36].strip(): line[36:].split() for line in out.splitlines()}
    (tokens,) = lines["tokens in the cache of all requests"]
    assert plan("--serve", "--json", "--cache-tokens", "6400", **demo) == 0
    result = finite(capsys.readouterr().out)
    assert (result["serve"], result["cache_tokens"], result["prefill_chunk"]) == (True, 6400, 64)
    assert int(tokens.replace(",", "")) <= result["largest_cache_tokens"]
    assert plan("--json", **demo) == 0
    result = finite(capsys.readouterr().out)
    assert (result["serve"], result["cache_tokens"]) == (False, None)


def test_defaults_and_names_of_others(capsys):
    """With the names that a user knows, a plan needs neither a batch nor a context."""
    defaults = {"batch": None, "context": None, "layout": None}
    assert plan("--json", model="moonshotai/Moonlight-16B-A3B", target="H200", **defaults) == 0
    result = finite(capsys.readouterr().out)
    assert (result["batch"], result["context"], result["hosts"]) == (64, 4096, 1)
    command = "dsv3 serve --model moonshotai/Moonlight-16B-A3B --max-len 4160 --max-running 64"
    assert result["commands"] == [command]
    step = result["bounds"]["decode"]["seconds"]
    assert result["tpot_seconds_at_best"] == step
    demo = {**defaults, "model": "demo", "layout": "tensor_parallel"}
    assert plan(target="h200:2", **demo) == 0
    out = capsys.readouterr().out
    assert "64 sequences of 4,095 tokens" in out
    assert "at best: TPOT " in out
    command = "CUDA_VISIBLE_DEVICES=0,1 dsv3 serve --model demo --layout tensor_parallel "
    assert f"hosts: 1\nto serve it:\n  {command}" in out
    settings = {**defaults, "layout": "dp_attention_ep", "model": "demo", "target": "h200x16"}
    assert plan("--serve", "--json", **(settings | {"target": "96xh200"})) == 2
    capsys.readouterr()
    assert plan("--serve", **settings) == 0
    assert "an engine of 64 running requests of at most 4,096" in (out := capsys.readouterr().out)
    assert "hosts: 2 with 8 GPUs each\nto serve it, on a Ray cluster of these hosts:\n  p" in out


def test_what_does_not_fit_is_said_in_bytes(capsys):
    """No layout is blamed that the user has not chosen."""
    changes = {"model": "demo", "batch": "400000", "context": "4000", "layout": None}
    assert plan(target="v5e:1x2", **changes) == 2
    out, err = capsys.readouterr()
    assert out.startswith(
        "demo in bf16 on tpu:v5e:1x2, 2 devices: 400,000 sequences of 4,000 tokens do not fit\n"
    )
    layouts = re.search(r"in none of the (\d) layouts that run here. The smallest peak is of ", out)
    assert layouts
    part = re.search(r"the largest part is (.*), (\d+\.\d\d) GB, which alone is more than the", out)
    assert part
    assert float(part[2]) > 16.79
    assert re.search(
        rf"got \d+\.\d GB or more in each of {layouts[1]} layouts: \d+\.\d GB too", err
    )
    assert "parallel" not in err.partition("what fits")[0]


@pytest.mark.slow
def test_json_and_the_largest_batch(capsys):
    assert plan("--json", model="demo", context="512") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["devices"] == 1
    assert result["peak_bytes"] == max(each["peak"] for each in result["bytes"].values())
    assert result["bounds"]["decode"]["binding"] in ("weights", "cache", "arithmetic")
    assert plan("--json", model="demo", context="512", batch=str(result["largest_batch"])) == 0
    assert json.loads(capsys.readouterr().out)["largest_batch"] == result["largest_batch"]
    assert plan(model="demo", context="512", batch=str(result["largest_batch"] + 1)) == 2
    out, err = capsys.readouterr()
    assert "too much: 0." in out
    assert "expected at most 149.1 GB per device of gpu:h200x1, got 149." in err


def test_the_demo(capsys):
    assert plan(model="demo", context="512") == 0
    assert "demo in bf16" in capsys.readouterr().out


@pytest.mark.slow
def test_a_refusal_proposes_flags_that_fit(capsys):
    settings = {"layout": "tensor_parallel", "target": "gpu:h200x2", "model": "demo"}
    settings |= {"batch": "40000", "context": "512"}
    assert plan(**settings) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("dsv3 plan: error: expected at most 149.1 GB per device of gpu:h200x2")
    proposals = line.split("what fits: ")[1].split("; ")
    for what in proposals:
        assert f"  {what}" in out.splitlines()
        assert plan(*what.split(), **settings) == 0
    assert any(what.startswith("--batch ") for what in proposals)
    assert any(what.startswith("--prefill-chunk ") for what in proposals)
    capsys.readouterr()


@pytest.mark.slow
def test_a_refusal_has_a_table(capsys):
    """JSON has the bytes of each phase, the memory, the missing bytes and the largest part."""
    changes = {"model": "demo", "context": "512", "batch": "100000", "target": "h100"}
    assert plan(**changes) == 2
    out, err = capsys.readouterr()
    assert "on gpu:h100x1, 1 device, single: 100,000 sequences of 512 tokens do not fit" in out
    lines = {line[:36].strip(): line[36:].split() for line in out.splitlines()}
    needed, available = ([float(x) for x in lines[name]] for name in ("peak", "available"))
    assert available == [83.91, 83.91]
    assert f"too much: {max(needed) - 83.91:.2f}" in out
    assert "the largest part is" in out
    assert len(err.splitlines()) == 1
    assert plan("--json", **changes) == 2
    result = finite(capsys.readouterr().out)
    assert result["fits"] is False
    assert result["missing_bytes"] == result["peak_bytes"] - result["memory_bytes"]
    assert result["largest_part"]["bytes"] <= result["peak_bytes"]
    assert result["what_fits"]


def test_without_a_layout_the_fastest_is_chosen(capsys):
    changes = {"layout": None, "target": "h100x2", "batch": "16", "model": "demo", "context": "512"}
    assert plan("--json", **changes) == 0
    result = finite(capsys.readouterr().out)
    (first, *_) = layouts = result["chosen"]["layouts"]
    assert result["fits"] is True
    assert result["layout"] == first["layout"] == result["chosen"]["because"].split()[0].strip(":")
    assert first["seconds"] == min(each["seconds"] for each in layouts)
    assert plan(**changes) == 0
    assert f"layout: {result['chosen']['because']}" in capsys.readouterr().out.splitlines()
    assert plan("--json", **(changes | {"layout": result["layout"]})) == 0
    assert finite(capsys.readouterr().out)["chosen"] is None


def test_given_settings_are_not_chosen(capsys):
    changes = {"layout": None, "target": "h100x4", "batch": "16", "model": "demo", "context": "512"}
    more = "--activations", "bf16", "--no-float8-dispatch", "--exchange", "all_to_all"
    assert plan("--json", *more, **changes) == 0
    for each in finite(capsys.readouterr().out)["chosen"]["layouts"]:
        given = each["activations"], each["float8_dispatch"], each["exchange"]
        assert given == (None, False, "all_to_all")


@pytest.mark.slow
def test_gpus_without_our_kernels_are_noted(capsys):
    assert plan("--json", target="a100-80gb", batch="4") == 0
    assert finite(capsys.readouterr().out)["kernels"] is False
    assert plan(target="a100-80gb", batch="4") == 0
    assert "note: this project has no kernels for a100-80gb" in capsys.readouterr().out


def test_sparse_attention_without_kernels_is_noted(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(sparse_config()))
    tpus = {"target": "tpu:v5p:2x2x1", "layout": "dp_attention_ep", "batch": "4"}
    assert plan(model=str(tmp_path), context="64", **tpus) == 0
    out = capsys.readouterr().out
    assert "note: this project has no kernels for sparse attention" in out
    assert plan(model=str(tmp_path), context="64") == 0
    assert "sparse attention have been timed with eight layers only" in capsys.readouterr().out


def test_a_cache_in_float8(capsys, tmp_path):
    """Latents of 32 + 8 numbers and keys of 16 in bfloat16, or keys of 16 bytes with a scale."""
    (tmp_path / "config.json").write_text(json.dumps(sparse_config()))
    cached = {}
    for more in ((), ("--cache-dtype", "fp8_index")):
        assert plan("--json", *more, model=str(tmp_path), context="127") == 0
        result = finite(capsys.readouterr().out)
        cached[result["cache_dtype"]] = result["bytes"]["decode"]["cache"]
    assert cached["fp8_index"] / cached[None] == (80 + 16 + 4) / (80 + 32)
    assert plan("--cache-dtype", "fp8_index") == 2
    message = "cache_dtype fp8_index: expected a model with indexers, got deepseek_v3"
    assert message in capsys.readouterr().err
    assert plan("--cache-dtype", "fp8", model=str(tmp_path), context="127") == 2
    assert "expected a latent of a multiple of 128 columns, got 32" in capsys.readouterr().err


def test_help_offers_models_that_can_be_planned(capsys):
    assert run("plan", "--help") == 0
    out = capsys.readouterr().out
    assert "deepseek-v3.1" in out
    assert "deepseek-v3.2" in out


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/x.png", "expected a file in a directory that exists, got "),
        ("x.txt", "expected a file name that ends with .png, .svg or .pdf, got "),
        ("x", "expected a file name that ends with .png, .svg or .pdf, got "),
        ("folder.png", "expected a file, got the directory "),
    ],
)
def test_a_picture_that_cannot_be_saved_is_refused_before_work(path, message, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    # The missing model would be reported later.
    assert plan("--sweep", str(tmp_path / path), model="gpt-2") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dsv3 plan: error: --sweep: {message}{tmp_path}")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "gpu:h200x8"}, "single: expected 1 device, got 8"),
        ({"target": "200"}, "target: expected a number of GPUs, such as h200x8, or"),
        ({"model": "gpt-2"}, "model: expected demo, a directory or one of deepseek-v3"),
        ({"batch": "0"}, "batch: expected 1 or more, got 0"),
        (
            {"context": "8192"},
            "context: expected fewer than the model's 8192 positions, got 8192",
        ),
        ({"model": "moonlight"}, "got 'moonlight'; did you mean moonlight-16b?"),
        ({"target": "h200x8", "layout": "train"}, "--layout train: expected --train with it"),
        (
            {"activations": "float8"},
            "activations: expected quantization fp8 or int4 with float8 activations, got bf16",
        ),
        ({"target": "gpu:h200x32", "layout": "tensor_parallel"}, "num_attention_heads: expected"),
        ({"target": "gpu:h200x3", "layout": "dp_attention_ep"}, "num_experts: expected a multiple"),
        (
            {"target": "gpu:h200x4", "layout": "dp_attention_ep", "batch": "6"},
            "batch: expected a size that divides over 4 devices, got 6",
        ),
    ],
)
def test_bad_input_is_one_line(changes, message, capsys):
    assert plan(**changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_cache_tokens_are_an_engines(capsys):
    assert plan("--cache-tokens", "6400") == 2
    assert "--cache-tokens: expected --serve too" in capsys.readouterr().err


def test_a_model_without_mtp_layers_cannot_draft(capsys):
    assert plan("--mtp") == 2
    assert "mtp: expected a model with an MTP layer" in capsys.readouterr().err


@pytest.mark.slow
def test_a_sweep(capsys, tmp_path):
    picture = tmp_path / "sweep.png"
    assert plan("--json", "--sweep", str(picture), model="demo", context="512") == 0
    points = json.loads(capsys.readouterr().out)["sweep"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    alone = [point for point in points if not point["mtp"]]
    assert [point["batch"] for point in alone] == [2**n for n in range(len(alone))]
    users = [point["tokens_per_s_per_user"] for point in alone]
    devices = [point["tokens_per_s_per_device"] for point in alone]
    assert users == sorted(users, reverse=True)
    assert devices == sorted(devices)


SERVED = {"context": "5120", "batch": "256"}


@pytest.mark.slow
def test_a_simulation_of_a_measured_engine(capsys):
    """The replay that gives the parameters comes out as it was measured."""
    measured = "benchmarks/results/engine_moonlight_h200.json"
    words = f"--serve --trace chat --rate 24 --requests 320 --json --step-times {measured}".split()
    assert plan(*words, **SERVED) == 0
    result = finite(capsys.readouterr().out)
    assert result["finished"] == 320
    assert result["output_tokens_per_second"] == pytest.approx(4151, rel=0.03)
    assert result["ttft_ms"]["p50"] == pytest.approx(42.3, rel=0.1)
    assert result["tpot_ms"]["p50"] == pytest.approx(14.3, rel=0.05)


@pytest.mark.slow
def test_a_simulation_at_peak_rates(capsys):
    words = ["--serve", "--trace", "poisson", "--rate", "20", "--seconds", "3"]
    words += ["--target-tpot-ms", "5", "--hit-share", "0.5"]
    assert plan(*words, **SERVED) == 0
    out = capsys.readouterr().out
    assert "simulated seconds, on 0.125 nodes (1 devices)" in out
    assert "targets met by" in out


@pytest.mark.slow
def test_a_simulation_of_two_pools_with_controllers(capsys):
    words = ["--serve", "--trace", "poisson", "--rate", "20", "--seconds", "3"]
    words += ["--target-tpot-ms", "5", "--hit-share", "0.5"]
    assert plan(*words, "--control", "--prefill-target", "h200", **SERVED) == 0
    assert "  prefill: busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--trace chat", "--trace: expected --serve too"),
        ("--rate 3", "--rate: expected --trace too"),
        ("--serve --trace poisson", "--rate: expected requests per second with --trace poisson"),
        ("--serve --trace chat --rate 0", "--rate: expected a number above 0, got 0.0"),
        ("--serve --trace chat --hit-share 2", "--hit-share: expected 0 to 1, got 2.0"),
        ("--serve --trace chat --control", "--control: expected --target-ttft-ms or"),
        ("--serve --trace chat --step-times pyproject.toml", "expected a result of scripts/bench_"),
        ("--serve --trace chat --reached 2 1 1", "memory: expected a share above 0 and at most 1"),
    ],
)
def test_refused_simulations(words, message, capsys):
    assert plan(*words.split(), **SERVED) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.splitlines()) == 1


TRAIN = {"batch": "2", "context": "64", "layout": None, "model": "demo"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> dict[str, str | None]:
    """Flags for a model that is traced in seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return TRAIN | {"model": str(folder)}


@pytest.mark.slow
def test_training(tiny, capsys):
    assert plan("--train", **tiny) == 0
    out = capsys.readouterr().out
    title = " on gpu:h200x1, 1 device, single: 2 sequences of 64 tokens per step"
    assert out.splitlines()[0].endswith(title)
    for label in ("float32 weights", "optimizer moments", "activations", "peak", "available"):
        assert f"  {label} " in out
    assert "  fits with --remat none --accumulate 1\n" in out
    assert plan("--train", "--json", "--lora-rank", "4", **tiny) == 0
    result = finite(capsys.readouterr().out)
    assert (result["fits"], result["what_fits"], result["compiled"]) == (True, None, None)
    assert result["peak_bytes"] == sum(result["bytes"].values()) < result["memory_bytes"]
    assert result["bytes"]["frozen"] > result["bytes"]["masters"] > 0
    assert plan("--train", "--lora-rank", "4", "--quantization", "int4", "--json", **tiny) == 0
    quantized = finite(capsys.readouterr().out)["bytes"]
    assert quantized["frozen"] < 0.7 * result["bytes"]["frozen"]
    assert quantized["masters"] == result["bytes"]["masters"]


@pytest.mark.slow
def test_training_that_does_not_fit(tiny, capsys, monkeypatch):
    monkeypatch.setattr("dsv3_jax.cli.plan_training.available_bytes", lambda target: 1000)
    assert plan("--train", "--json", "--remat", **tiny | {"batch": "1"}) == 2
    out, err = capsys.readouterr()
    result = finite(out)
    assert result["fits"] is False
    last = err.splitlines()[-1]
    assert last.startswith("dsv3 plan: error: a step needs ")
    assert last.endswith(result["what_fits"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--train", "--serve"), "--serve: expected no --train with it"),
        (("--train", "--quantization", "fp8"), "--quantization: expected none with --train"),
        (("--remat",), "--remat: expected --train with it"),
        (("--expert-devices", "2"), "--expert-devices 2: expected --train with it"),
        (("--context-devices", "2"), "--context-devices 2: expected --train with it"),
        (("--layout", "train"), "--layout train: expected --train with it"),
        (("--train", "--accumulate", "3"), "batch: expected a multiple of accumulate=3, got 2"),
        (("--train", "--layout", "train", "--target", "h200x4"), "batch: expected a multiple of 4"),
        (
            ("--train", "--context-devices", "4", "--target", "h200x4", "--context", "34"),
            "length: expected a multiple of 8 tokens per sequence for context_devices=4, got 34",
        ),
    ],
)
def test_flags_of_training_and_serving_do_not_mix(flags, message, capsys):
    assert plan(*flags, **TRAIN) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err.splitlines()[-1]

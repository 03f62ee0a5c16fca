"""dsv3 plan: what it prints, and what it refuses."""

import json

import pytest

from tests.support.command import run

SETTINGS = {
    "--model": "moonlight-16b",
    "--target": "gpu:h200x1",
    "--layout": "single",
    "--batch": "64",
    "--context": "4096",
}


def plan(*more: str, **changes: str) -> int:
    words = SETTINGS | {f"--{name}": value for name, value in changes.items()}
    return run("plan", *(word for pair in words.items() for word in pair), *more)


def test_a_table(capsys):
    assert plan() == 0
    out = capsys.readouterr().out
    assert "moonlight-16b in bf16 on gpu:h200x1, 1 device, single: 64 rows of 4096 tokens" in out
    assert "latent cache" in out
    assert "bound by" in out
    assert "network" in out


def test_json_and_the_largest_that_fit(capsys):
    assert plan("--json", model="demo", context="512") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 1
    assert found["peak_bytes"] == max(each["peak"] for each in found["bytes"].values())
    assert found["bounds"]["decode"]["binding"] in ("weights", "cache", "arithmetic")
    assert plan("--json", model="demo", context="512", batch=str(found["largest_batch"])) == 0
    assert json.loads(capsys.readouterr().out)["largest_batch"] == found["largest_batch"]
    assert plan(model="demo", context="512", batch=str(found["largest_batch"] + 1)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected at most 149.1 GB a device of gpu:h200x1, got 149." in err


def test_the_demo(capsys):
    assert plan(model="demo", context="512") == 0
    assert "demo in bf16" in capsys.readouterr().out


def test_what_does_not_fit_is_refused_with_what_would(capsys):
    settings = {"layout": "tensor_parallel", "target": "gpu:h200x2", "model": "demo"}
    settings |= {"batch": "40000", "context": "512"}
    assert plan(**settings) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dsv3 plan: error: expected at most 149.1 GB a device of gpu:h200x2")
    for what in line.split("what fits: ")[1].split("; "):
        flag, value = what.split()
        assert plan(**(settings | {flag.removeprefix("--"): value})) == 0
    assert "--batch " in line
    assert "--prefill-chunk " in line
    capsys.readouterr()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "gpu:h200x8"}, "single: expected 1 devices, got 8"),
        ({"target": "h200"}, "target: expected gpu:KINDxDEVICES"),
        ({"model": "gpt-2"}, "model: expected demo, a directory or one of deepseek-v3"),
        ({"batch": "0"}, "batch: expected 1 or more, got 0"),
        (
            {"context": "8192"},
            "context: expected fewer tokens than the 8192 that the model reaches",
        ),
        ({"activations": "float8"}, "activations: expected them with quantization fp8, got bf16"),
        ({"target": "gpu:h200x32", "layout": "tensor_parallel"}, "num_attention_heads: expected"),
        ({"target": "gpu:h200x3", "layout": "dp_attention_ep"}, "num_experts: expected a multiple"),
        (
            {"target": "gpu:h200x4", "layout": "dp_attention_ep", "batch": "6"},
            "batch: expected rows that divide over 4 devices, got 6",
        ),
    ],
)
def test_bad_input_is_one_line(changes, says, capsys):
    assert plan(**changes) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_model_without_mtp_layers_cannot_draft(capsys):
    assert plan("--mtp") == 2
    assert "mtp: expected a model with an MTP layer" in capsys.readouterr().err


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

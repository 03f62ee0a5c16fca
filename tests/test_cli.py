"""The dsv3 command, in this process but for one real one."""

import json
import re
import shutil
import subprocess
import sys

import jax
import pytest

from dsv3_jax.checkpoint.load import DEMO
from dsv3_jax.cli import collectives
from tests.support.command import run

pytestmark = pytest.mark.usefixtures("own_compile_cache")


def generate(*arguments: str) -> int:
    return run("generate", "--max-new-tokens", "8", *arguments)


def test_text_goes_to_stdout_and_the_rest_to_stderr(capsys):
    assert generate("--prompt", "import os\n", "--echo") == 0
    out, err = capsys.readouterr()
    assert out.startswith("import os\nimport ")
    assert "loaded demo" in err
    assert "tokens/s, first token after" in err


def test_speculation_is_reported(capsys):
    drafting = ("--draft", "mtp", "--draft-depth", "2")
    plain = [generate("--json", "--prompt", "import os\n", "--prompt", "x ="), capsys.readouterr()]
    drafted = [
        generate("--json", "--prompt", "import os\n", "--prompt", "x =", *drafting),
        capsys.readouterr(),
    ]
    assert plain[0] == drafted[0] == 0
    without, found = (json.loads(captured.out) for _, captured in (plain, drafted))
    for one, other in zip(without["completions"], found["completions"], strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["speculation"] is None
        assert other["speculation"]["draft"] == "mtp"
        assert other["speculation"]["tokens"] == len(other["tokens"]) == 8
    total = found["stats"]["speculation"]
    assert len(total["acceptance"]) == len(total["drafted"]) == 2
    assert total["accept_length"] == 16 / total["steps"]
    assert found["stats"]["drafted"] == sum(total["drafted"]) > 0
    assert "mtp: " in drafted[1].err


def test_synthetic_text_is_labelled(capsys):
    assert generate("--prompt", "import os\n", "--stream", "--draft", "synthetic:0.5") == 0
    assert "draft synthetic:0.5: what follows is NOT the model's text" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else(capsys):
    status = generate("--json", "--prompt", "import os\n", "--prompt", "x =", "--logprobs", "2")
    assert status == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert out.count("\n") == 1
    assert result["model"] == "demo"
    first, second = result["completions"]
    assert len(first["tokens"]) == len(first["logprobs"]) == len(first["top_logprobs"]) == 8
    assert first["finish_reason"] == "length"
    assert second["prompt_tokens"] < first["prompt_tokens"] + 3
    stats = result["stats"]
    assert stats["new_tokens"] == 16
    assert stats["tokens_per_second"] > 0 < stats["time_to_first_token"]
    assert stats["drafted"] == stats["accepted"] == stats["acceptance_rate"] == 0


# What Gloo's threads print when they connect, a word at a time and between each other's.
GLOO = re.compile(r"\[Gloo\]|Rank|is|connected|to|peer|ranks|Expected|number|of|[\d\s:.]")


def without_gloo(lines):
    return [line for line in lines if GLOO.sub("", line)]


def test_gloos_words_are_left_out():
    ends = "peer ranks. Expected number of connected peer ranks is : 3"
    torn = f"Rank 0 is connected to [Gloo] Rank 31 {ends}"
    rest = f" is connected to 3 {ends}"
    assert without_gloo([torn, "x = 1", rest, "Rank = 3"]) == ["x = 1", "Rank = 3"]


@pytest.mark.slow
def test_a_layout_of_several_processes(capsys):
    command = ["generate", "--prompt", "x", "--max-new-tokens", "8"]
    assert run(*command) == 0
    command += ["--distributed", "--layout", "tp_attention_ep"]
    launch = [sys.executable, "scripts/launch_local.py", "-n", "2", "--devices-per-process", "2"]
    start = "import sys; from dsv3_jax.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [*launch, "--", sys.executable, "-c", start, *command], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    wanted = capsys.readouterr().out.splitlines()
    lines = done.stdout.splitlines()
    said = [[line[4:] for line in lines if line.startswith(f"[{i}] ")] for i in range(2)]
    assert without_gloo(said[0]) == without_gloo(wanted)
    assert without_gloo(said[1]) == []


def test_a_layout(capsys):
    plain = generate("--prompt", "import os\n"), capsys.readouterr().out
    layout = ("--layout", "dp_attention_ep", "--exchange", "all_to_all")
    assert plain == (generate("--prompt", "import os\n", *layout), capsys.readouterr().out)


def test_streamed_text_is_the_generated_text(capsys):
    arguments = ("--prompt", "import os\n", "--temperature", "0.8", "--seed", "4")
    assert generate(*arguments) == 0
    whole = capsys.readouterr().out
    assert generate("--stream", *arguments) == 0
    assert capsys.readouterr().out == whole


def test_chat_reads_standard_input(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.read", lambda: "Hello?", raising=False)
    assert generate("--chat", "--json", "--prompt", "-") == 0
    tokens = json.loads(capsys.readouterr().out)["completions"][0]["prompt_tokens"]
    assert generate("--json", "--prompt", "Hello?") == 0
    plain = json.loads(capsys.readouterr().out)["completions"][0]["prompt_tokens"]
    assert tokens == plain + 2  # <User> before and <Assistant> behind, and no second BOS


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--prompt", ""], "prompt: expected text, got an empty prompt"),
        (
            ["--prompt", "x", "--temperature", "-1"],
            "temperature: expected a number in [0, 3.4e38], got -1.0",
        ),
        (["--prompt", "x", "--temperature", "warm"], "--temperature"),
        (["--prompt", "x", "--top-p", "0"], "top_p"),
        (["--prompt", "x", "--max-new-tokens", "0"], "max_new_tokens"),
        (
            ["--prompt", "x", "--logprobs", "21"],
            "logprobs: expected an integer from 0 to 20, got 21",
        ),
        (["--prompt", "x", "--max-len", "5000"], "max_len: expected 2 to 4096"),
        (["--prompt", "x y z x y z", "--max-len", "2"], "prompt: expected at most 1 tokens"),
        (["--prompt", "x", "--draft", "medusa"], "draft"),
        (["--prompt", "x", "--draft", "mtp", "--draft-depth", "9"], "draft_depth"),
        (["--prompt", "x", "--layout", "pipeline"], "--layout"),
        (["--prompt", "x", "--exchange", "all_to_all"], "--exchange: expected a --layout"),
        (["--prompt", "x", "--distributed"], "--distributed: expected a --layout"),
        (["--prompt", "x", "--frobnicate"], "--frobnicate"),
        (["--prompt", "x", "--temp", "0"], "--temp"),
        (["--prompt", "x", "--prompt", "y", "--stream"], "--stream: expected one prompt, got 2"),
        (["--prompt", "x", "--stream", "--json"], "--json"),
        (["--prompt", "x", "--model", "/nowhere/at all"], "expected 'demo', a directory"),
        ([], "--prompt"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(arguments, named, capsys):
    assert generate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith(("dsv3: error: ", "dsv3 generate: error: "))
    assert named in last
    assert all(line.startswith("dsv3: ") for line in err.splitlines()[:-1])


def test_a_damaged_checkpoint_is_one_line_and_status_2(tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(DEMO, copy)
    shard = next(copy.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert generate("--prompt", "x", "--model", str(copy)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "truncated" in err


def test_no_command_and_an_unknown_one(capsys):
    assert run() == 2
    assert run("generat") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2
    assert "generate" in err


def test_doctor(capsys):
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"] == jax.__version__
    assert found["devices"]["platform"] == "cpu"
    assert found["back-ends"]["mla_decode: reference"] == "works"
    assert found["back-ends"]["grouped_matmul: cpu"] == "works"
    assert run("doctor") == 0
    assert "back-ends" in capsys.readouterr().out


@pytest.mark.slow
def test_doctor_times_exchanges(monkeypatch, capsys):
    monkeypatch.setattr(collectives, "_TOKENS", (2,))
    assert run("doctor", "--json", "--collectives") == 0
    (found,) = json.loads(capsys.readouterr().out)["collectives"].items()
    exchanges = "all_gather", "all_to_all", "one_sided"
    times = ", ".join(rf"{name} \d+, {name} in float8 \d+" for name in exchanges)
    assert found[0] == "2 x 256 a device"
    assert re.fullmatch(rf"{times} us: take ({'|'.join(exchanges)})", found[1])


def test_doctor_sees_a_back_end_that_is_wrong(monkeypatch, capsys):
    from pallas_kernels.mla_decode import api

    def broken(*args, **kwargs):
        raise RuntimeError("no\nsuch luck")

    def wrong(*args, **kwargs):
        return jax.tree.map(lambda x: x + 1, api.BACKENDS["reference"](*args, **kwargs))

    monkeypatch.setitem(api.BACKENDS, "broken", broken)
    monkeypatch.setitem(api.BACKENDS, "wrong", wrong)
    assert run("doctor", "--json") == 0
    found = json.loads(capsys.readouterr().out)["back-ends"]
    assert found["mla_decode: broken"] == "fails: RuntimeError: no"
    assert found["mla_decode: wrong"].startswith("wrong: differs")


def test_the_command_itself():
    """Another process: nothing but the JSON on stdout, whatever the libraries say."""
    command = [
        sys.executable,
        "-c",
        "import sys; from dsv3_jax.cli.main import main; sys.exit(main())",
        "generate",
        "--json",
        "--max-new-tokens",
        "2",
    ]
    good = subprocess.run([*command, "--prompt", "import"], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["stats"]["new_tokens"] == 2
    bad = subprocess.run(
        [*command, "--prompt", "x", "--min-p", "2"], capture_output=True, text=True
    )
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert "Traceback" not in bad.stderr


def test_a_reader_that_leaves_early():
    """As head does: no traceback, and the status of a command that SIGPIPE ended."""
    code = "import sys; from dsv3_jax.cli.main import main; sys.exit(main(['verify', 'demo']))"
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert "Traceback" not in command.stderr.read()
    assert command.wait() == 141
    command.stderr.close()

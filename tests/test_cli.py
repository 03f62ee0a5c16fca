"""The dsv3 command, in this process except for one test."""

import json
import re
import shutil
import subprocess
import sys
from functools import partial

import jax
import pytest

from dsv3_jax.checkpoint.find import DEMO
from dsv3_jax.cli import loading, probes, run_generation
from dsv3_jax.generation.completion import Completion, Generation, Stats
from dsv3_jax.generation.errors import Interrupted, NonFiniteLogitsError
from dsv3_jax.offline.generator import Generator
from tests.support.checkpoints import random_tensors, write_checkpoint
from tests.support.command import run
from tests.training.tiny import CONFIG

pytestmark = pytest.mark.usefixtures("own_compile_cache")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[str, ...]:
    """Flags of a model that compiles in seconds and reads the demo's tokens."""
    directory = tmp_path_factory.mktemp("tiny") / "tiny"
    config = {**CONFIG, "vocab_size": 2048}
    write_checkpoint(directory, config, random_tensors(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    return "--model", str(directory), "--dtype", "float32"


def generate(*arguments: str) -> int:
    return run("generate", "--max-new-tokens", "8", *arguments)


@pytest.mark.slow
def test_text_goes_to_stdout_and_the_rest_to_stderr(capsys):
    assert generate("--prompt", "import os\n", "--echo") == 0
    out, err = capsys.readouterr()
    assert out.startswith("import os\nimport ")
    assert "loaded demo" in err
    assert "tokens/s, first token after" in err


@pytest.mark.slow
def test_speculation_is_reported(tiny, capsys):
    drafting = ("--draft", "mtp", "--draft-depth", "2")
    given = (*tiny, "--json", "--prompt", "import os\n", "--prompt", "x =", "--logprobs", "2")
    plain = [generate(*given), capsys.readouterr()]
    drafted = [generate(*given, *drafting), capsys.readouterr()]
    assert plain[0] == drafted[0] == 0
    without, speculative = (json.loads(captured.out) for _, captured in (plain, drafted))
    for one, other in zip(without["completions"], speculative["completions"], strict=True):
        assert one["tokens"] == other["tokens"]
        assert one["speculation"] is None
        assert other["speculation"]["draft"] == "mtp"
        assert other["speculation"]["tokens"] + 1 == len(other["tokens"]) == 8
    total = speculative["stats"]["speculation"]
    assert len(total["acceptance"]) == len(total["drafted"]) == 2
    assert total["accept_length"] == 14 / total["steps"]
    assert speculative["stats"]["drafted"] == sum(total["drafted"]) > 0
    assert "mtp: " in drafted[1].err


def test_synthetic_text_is_labelled(tiny, capsys, monkeypatch):
    monkeypatch.setattr(Generator, "warm_up", lambda *args, **settings: 0.0)
    monkeypatch.setattr(run_generation, "_stream", lambda *arguments: None)
    assert generate(*tiny, "--prompt", "x =", "--stream", "--draft", "synthetic:0.5") == 0
    assert "draft synthetic:0.5: what follows is NOT the model's text" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else(tiny, capsys):
    given = ("--json", "--prompt", "import os\n", "--prompt", "x =", "--logprobs", "2")
    assert generate(*tiny, *given) == 0
    out, _ = capsys.readouterr()
    result = json.loads(out)
    assert out.count("\n") == 1
    assert result["model"] == tiny[1]
    first, second = result["completions"]
    assert len(first["tokens"]) == len(first["logprobs"]) == len(first["top_logprobs"]) == 8
    assert first["finish_reason"] == "length"
    assert second["prompt_tokens"] < first["prompt_tokens"] + 3
    stats = result["stats"]
    assert stats["new_tokens"] == 16
    assert stats["tokens_per_second"] > 0 < stats["time_to_first_token"]
    assert stats["drafted"] == stats["accepted"] == stats["acceptance_rate"] == 0


# Gloo's threads print this when they connect, one word at a time and interleaved.
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
    lines_by_process = [
        [line[4:] for line in lines if line.startswith(f"[{i}] ")] for i in range(2)
    ]
    assert without_gloo(lines_by_process[0]) == without_gloo(wanted)
    assert without_gloo(lines_by_process[1]) == []


@pytest.mark.slow
def test_a_layout(tiny, capsys):
    given = (*tiny, "--prompt", "import os\n")
    plain = generate(*given), capsys.readouterr().out
    layout = ("--layout", "dp_attention_ep", "--exchange", "all_to_all")
    assert plain == (generate(*given, *layout), capsys.readouterr().out)


def test_several_completions_of_each_prompt(capsys, monkeypatch):
    """Each completion follows its own prompt."""
    asked = []

    def completes(self, prompts, **settings):
        asked.append(settings)
        several = [Completion(f"= {i}", [7], [-1.0], "length", 3) for i in range(4)]
        return Generation(several, Stats(2, 4, 0.1, 0.2, 20.0))

    def warms_up(self, batch_size, **settings):
        asked.append(batch_size)
        return 0.0

    monkeypatch.setattr(Generator, "warm_up", warms_up)
    monkeypatch.setattr(Generator, "generate", completes)
    assert generate("--prompt", "x ", "--prompt", "y ", "--n", "2", "--seed", "5", "--echo") == 0
    assert capsys.readouterr().out.splitlines() == [
        *("==> completion 1 of 2, prompt 1 of 2: x <==", "x = 0", ""),
        *("==> completion 2 of 2, prompt 1 of 2: x <==", "x = 1", ""),
        *("==> completion 1 of 2, prompt 2 of 2: y <==", "y = 2", ""),
        *("==> completion 2 of 2, prompt 2 of 2: y <==", "y = 3"),
    ]
    batch_size, settings = asked
    assert batch_size == 4
    assert (settings["n"], settings["seed"]) == (2, 5)


@pytest.mark.slow
def test_streamed_text_is_the_generated_text(tiny, capsys):
    arguments = (*tiny, "--prompt", "import os\n", "--temperature", "0.8", "--seed", "4")
    assert generate(*arguments) == 0
    whole = capsys.readouterr().out
    assert generate("--stream", *arguments) == 0
    assert capsys.readouterr().out == whole


@pytest.mark.slow
def test_chat_reads_standard_input(tiny, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin.read", lambda: "Hello?", raising=False)
    assert generate(*tiny, "--chat", "--json", "--prompt", "-") == 0
    tokens = json.loads(capsys.readouterr().out)["completions"][0]["prompt_tokens"]
    assert generate(*tiny, "--json", "--prompt", "Hello?") == 0
    plain = json.loads(capsys.readouterr().out)["completions"][0]["prompt_tokens"]
    assert tokens == plain + 2  # <User> before, <Assistant> after, and no second BOS


BAD_USAGE = pytest.mark.parametrize(
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
        (["--prompt", "x", "--max-len", "5000"], "--max-len: expected 2 to 4096"),
        (["--prompt", "x y z x y z", "--max-len", "2"], "prompt: expected at most 1 token ("),
        (["--prompt", "x", "--draft", "medusa"], "draft"),
        (["--prompt", "x", "--draft", "mtp", "--draft-depth", "9"], "draft_depth"),
        (["--prompt", "x", "--layout", "pipeline"], "--layout"),
        (["--prompt", "x", "--exchange", "all_to_all"], "--exchange: expected --layout"),
        (["--prompt", "x", "--distributed"], "--distributed: expected --layout"),
        (
            ["--prompt", "x", "--layout", "dp_attention_ep", "--exchange", "ragged_all_to_all"],
            "--exchange ragged_all_to_all: XLA does not implement it on CPUs",
        ),
        (["--prompt", "x", "--frobnicate"], "--frobnicate"),
        (["--prompt", "x", "--temp", "0"], "--temp"),
        (["--prompt", "x", "--prompt", "y", "--stream"], "--stream: expected one prompt, got 2"),
        (["--prompt", "x", "--stream", "--json"], "--json"),
        (["--prompt", "x", "--stream", "--n", "2"], "--stream: expected one completion, got --n 2"),
        (["--prompt", "x", "--n", "0"], "n: expected an integer of at least 1, got 0"),
        (["--prompt", "x", "--model", "/nowhere/at all"], "expected 'demo', a directory"),
        ([], "--prompt"),
        (["--prompt", "x", "--max-len", "0"], "--max-len: expected an integer of at least 2"),
        (["--prompt", "x", "--max-len", "-3"], "--max-len: expected an integer of at least 2"),
        (
            ["--prompt", "x", "--max-len", "100000"],
            "--max-len: expected 2 to 4096 (the model's max_position_embeddings), got 100000",
        ),
        (["--prompt", "x", "--max-len", "9"], "--max-new-tokens: expected at most 7 (a cache of 9"),
        (["--prompt", "x", "--max-new-tokens", "4095"], "--max-new-tokens: expected at most 4094"),
        (["--prompt", "x", "--logprobs", "2"], "--logprobs: expected --json with it"),
        (["--prompt", "x", "--system", "y"], "--system: expected --chat with it"),
        (["--prompt", "x", "--seed", "-1"], "seed: expected an integer in [0, 2**32), got -1"),
        (["--prompt", "x", "--min-p", "nan"], "min_p: expected a number in [0, 1], got nan"),
        (
            ["--prompt", "x", "--presence-penalty", "3"],
            "presence_penalty: expected a number in [-2, 2], got 3.0",
        ),
        (["--prompt", "x", "--stop", ""], "stop: expected strings that are not empty"),
        (
            ["--prompt", "x", "--activations", "float8"],
            "expected --quantization fp8 or int4 with it",
        ),
        (["--prompt", "-", "--prompt", "-"], "--prompt: expected - once"),
        (["--prompt", "a\udcffb"], "--prompt: expected UTF-8, got the byte 0xff at character 1"),
        (["--prompt", "\ud800"], "--prompt: expected Unicode text, got the lone surrogate U+D800"),
        (["--prompt", "x", "--stop", "\udc80"], "--stop: expected UTF-8, got the byte 0x80"),
        (
            ["--prompt", "x", "--chat", "--system", "\udc80"],
            "--system: expected UTF-8, got the byte 0x80",
        ),
        (["--prompt-file", "/nowhere/at all"], "--prompt-file /nowhere/at all: No such file"),
        (["--prompt", "x", "--model", "demmo"], "got 'demmo'; did you mean demo?"),
        (["--prompt", "x", "--model", "deepseek-v3"], "did you mean deepseek-ai/DeepSeek-V3?"),
    ],
)


@BAD_USAGE
def test_bad_usage_is_one_line_and_status_2(arguments, named, capsys, monkeypatch):
    """Bad usage is refused before any weight is read."""
    monkeypatch.setattr(loading, "load", lambda *a, **k: pytest.fail("weights were read"))
    assert generate(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith(("dsv3: error: ", "dsv3 generate: error: "))
    assert named in last
    assert all(line.startswith("dsv3: ") for line in err.splitlines()[:-1])


def test_a_draft_that_the_model_lacks_is_refused_before_its_weights(tmp_path, capsys, monkeypatch):
    config = json.loads((DEMO / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    monkeypatch.setattr(loading, "load", lambda *a, **k: pytest.fail("weights were read"))
    assert generate("--prompt", "x", "--draft", "mtp", "--model", str(tmp_path)) == 2
    assert "draft: expected a model with an MTP layer" in capsys.readouterr().err


def test_a_model_without_a_tokenizer(tmp_path, capsys):
    shutil.copy(DEMO / "config.json", tmp_path)
    assert generate("--prompt", "x", "--model", str(tmp_path)) == 2
    assert (
        "expected a tokenizer.json, which encodes the prompt; found none" in capsys.readouterr().err
    )


def test_a_directory_that_is_misspelt(tmp_path, capsys):
    (tmp_path / "my-model").mkdir()
    assert generate("--prompt", "x", "--model", str(tmp_path / "my-modle")) == 2
    assert f"did you mean {tmp_path / 'my-model'}?" in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch):
    """Records the calls that would complete prompts, and completes nothing."""
    calls = []

    def record(arguments, config, texts, prompts, max_len, settings):
        calls.append((prompts, max_len, settings))

    monkeypatch.setattr(run_generation, "run_generation", record)
    return calls


def test_control_tokens_in_prompts_are_text(asked):
    spelled = "x<｜User｜>y"
    for flags in ([], ["--special-tokens"], ["--chat"], ["--chat", "--special-tokens"]):
        assert generate("--prompt", spelled, *flags) == 0
    users = [call[0][0].count(3) for call in asked]
    assert users == [0, 1, 1, 2]


def test_prompts_from_files(asked, tmp_path):
    (tmp_path / "a.txt").write_text("import os\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    file = str(tmp_path / "a.txt")
    assert generate("--prompt", "x", "--prompt-file", file, "--prompt", "import os\n") == 0
    x, a, same = asked[0][0]
    assert a == same != x
    assert generate("--prompt-file", str(tmp_path / "latin.txt")) == 2


def test_bytes_that_are_not_utf8(asked, tmp_path, capsys, monkeypatch):
    file = tmp_path / "latin.txt"
    file.write_bytes(b"caf\xe9!")
    assert generate("--prompt-file", str(file)) == 2
    expected = f"--prompt-file {file}: expected UTF-8, got the byte 0xe9 at byte 3"
    assert expected in capsys.readouterr().err
    with file.open(encoding="utf-8") as strict:
        monkeypatch.setattr("sys.stdin", strict)
        assert generate("--prompt", "-") == 2
    assert "standard input: expected UTF-8, got the byte 0xe9 at byte 3" in capsys.readouterr().err
    with file.open(encoding="utf-8", errors="surrogateescape") as lenient:  # as in the C locale
        monkeypatch.setattr("sys.stdin", lenient)
        assert generate("--prompt", "-") == 2
    err = capsys.readouterr().err
    assert "standard input: expected UTF-8, got the byte 0xe9 at character 3" in err
    assert not asked


def test_a_system_message(asked):
    assert generate("--chat", "--prompt", "x") == 0
    assert generate("--chat", "--prompt", "x", "--system", "import os") == 0
    (bos, *alone), (first, *both) = (call[0][0] for call in asked)
    assert bos == first == 0
    assert both[-len(alone) :] == alone
    assert len(both) > len(alone)


def test_the_cache_is_as_long_as_needed(asked):
    """Without --max-new-tokens, a prompt near the model's end gets the tokens that fit."""
    assert run("generate", "--prompt", "x " * 4070) == 0
    assert generate("--prompt", "x") == 0
    (prompts, length, settings), (_, short, _) = asked
    assert (length, short) == (4096, 256)
    assert settings["max_new_tokens"] == 4096 - len(prompts[0]) < 64


@pytest.mark.parametrize(
    ("error", "status"), [(Interrupted, 130), (partial(NonFiniteLogitsError, "not finite"), 2)]
)
def test_what_was_generated_before_an_error_is_printed(error, status, capsys, monkeypatch):
    completion = Completion("so far", [7, 8], [-1.0, float("nan")], "interrupted", 3)
    generation = Generation([completion], Stats(2, 2, 0.1, 0.2, 20.0))

    def ends(self, prompts, **settings):
        raise error(generation)

    monkeypatch.setattr(Generator, "warm_up", lambda *args, **settings: 0.0)
    monkeypatch.setattr(Generator, "generate", ends)
    assert generate("--prompt", "x") == status
    assert capsys.readouterr().out == "so far\n"
    assert generate("--prompt", "x", "--json") == status
    (got,) = json.loads(capsys.readouterr().out)["completions"]
    assert got["tokens"] == [7, 8]
    assert got["finish_reason"] == "interrupted"


def test_a_model_that_does_not_fit_is_one_line(capsys, monkeypatch):
    def warm_up(self, *arguments, **settings):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 GiB.\n at")

    monkeypatch.setattr(Generator, "warm_up", warm_up)
    assert generate("--prompt", "x") == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("dsv3 generate: error: demo: expected a model and a cache that fit")
    assert line.endswith("got: RESOURCE_EXHAUSTED: Out of memory: 9 GiB.")


def test_errors_of_the_device_other_than_memory_are_raised(capsys, monkeypatch):
    def warm_up(self, *arguments, **settings):
        raise jax.errors.JaxRuntimeError("INTERNAL: a kernel trapped")

    monkeypatch.setattr(Generator, "warm_up", warm_up)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a kernel trapped"):
        generate("--prompt", "x")


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


@pytest.mark.slow
def test_doctor(capsys):
    assert run("doctor", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["versions"]["jax"] == jax.__version__
    assert result["devices"]["platform"] == "cpu"
    assert result["back-ends"]["mla_decode: reference"] == "works"
    assert result["back-ends"]["grouped_matmul: cpu"] == "works"
    # Each back-end accepts its probe on the right machine.
    outcomes = set(result["back-ends"].values())
    assert outcomes == {
        "works",
        "refused: runs on Hopper GPUs, this is cpu",
        "refused: runs on NVIDIA GPUs, this is cpu",
        "refused: runs on TPUs, this is cpu",
    }
    assert result["probes"].keys() == {name.split(":")[0] for name in result["back-ends"]}
    sparse = "sparse_index", "top_k", "sparse_mla_decode", "sparse_mla_prefill"
    assert result["probes"].keys() >= set(sparse)
    none = "reference, in plain JAX: no faster back-end takes the probe here"
    of_sparse = [result["chosen"][op] for op in sparse]
    assert of_sparse == ["blocked", none, none, none]
    assert result["chosen"].keys() == result["probes"].keys()
    assert result["chosen"]["mla_decode"] == "cpu"
    assert (
        "reserve 95% of a GPU's memory" in result["allocator"]["generate, eval, serve, chat, train"]
    )
    assert run("doctor") == 0
    assert "back-ends" in capsys.readouterr().out


@pytest.mark.slow
def test_doctor_times_exchanges(monkeypatch, capsys):
    monkeypatch.setattr(probes, "_TOKENS", (2,))
    assert run("doctor", "--json", "--collectives") == 0
    (entry,) = json.loads(capsys.readouterr().out)["collectives"].items()
    exchanges = "all_gather", "all_to_all", "one_sided"
    times = ", ".join(rf"{name} \d+, {name} in float8 \d+" for name in exchanges)
    assert entry[0] == "2 x 256 a device"
    assert re.fullmatch(rf"{times} us: take ({'|'.join(exchanges)})", entry[1])


@pytest.mark.slow
def test_doctor_sees_a_back_end_that_is_wrong(monkeypatch, capsys):
    from pallas_kernels.mla_decode import api

    def broken(*args, **kwargs):
        raise RuntimeError("no\nsuch luck")

    def wrong(*args, **kwargs):
        return jax.tree.map(lambda x: x + 1, api.BACKENDS["reference"](*args, **kwargs))

    monkeypatch.setitem(api.BACKENDS, "broken", broken)
    monkeypatch.setitem(api.BACKENDS, "wrong", wrong)
    assert run("doctor", "--json") == 0
    outcomes = json.loads(capsys.readouterr().out)["back-ends"]
    assert outcomes["mla_decode: broken"] == "fails: RuntimeError: no"
    assert outcomes["mla_decode: wrong"].startswith("wrong: differs")


def test_doctor_goes_on_without_a_reference(monkeypatch, capsys):
    from pallas_kernels.block_quant import api

    def broken(*args, **kwargs):
        raise RuntimeError

    monkeypatch.setitem(api.BACKENDS, "reference", broken)
    monkeypatch.setattr(probes, "probes", lambda real=probes.probes: real()[-1:])
    assert run("doctor", "--json") == 0
    outcomes = json.loads(capsys.readouterr().out)["back-ends"]
    assert outcomes == {"block_quant: reference": "fails: RuntimeError: "}


def test_doctor_times_what_works(monkeypatch):
    """Also results that contain infinities, as the scores of tokens that a query does not see."""
    from pallas_kernels.sparse_index import api

    def probe(real=probes.probes):
        return [each for each in real() if each.op == "sparse_index"]

    def wrong(*args, **kwargs):
        return jax.numpy.nan_to_num(api.BACKENDS["reference"](*args, **kwargs), neginf=0)

    monkeypatch.setattr(probes, "probes", probe)
    monkeypatch.setitem(api.BACKENDS, "wrong", wrong)
    outcomes = probes.examine(timed=True)
    for name in ("blocked", "reference"):
        assert re.fullmatch(r"works, \d+ us a call", outcomes[f"sparse_index: {name}"])
    assert outcomes["sparse_index: wrong"] == "wrong: differs from the reference by inf"


@pytest.mark.parametrize("below", [(), ("x",)])
def test_an_unusable_compile_cache(below, tmp_path, capsys):
    file = tmp_path / "file"
    file.touch()
    given = file.joinpath(*below)
    assert generate("--prompt", "x", "--compile-cache", str(given)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"--compile-cache: expected a directory that can be written, got {given} (" in err


@pytest.mark.slow
def test_the_command_itself():
    """In another process: stdout has only the JSON, whatever libraries print."""
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
    """A reader such as head closes the pipe: no traceback, and the status of SIGPIPE."""
    code = "import sys; from dsv3_jax.cli.main import main; sys.exit(main(['verify', 'demo']))"
    command = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert "Traceback" not in command.stderr.read()
    assert command.wait() == 141
    command.stderr.close()

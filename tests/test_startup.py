"""Help, usage errors and `import dsv3_jax` do not wait for JAX, which they do not need."""

import ast
import importlib
import inspect
import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import dsv3_jax
import sharding
from dsv3_jax import other_names
from dsv3_jax.cli.main import COMMANDS, main, parser
from dsv3_jax.cli.output import print_json
from dsv3_jax.generation.request import RequestReader
from sharding.names import LayoutName

# Packages that are slow to import, or import a slow one.
HEAVY = {
    *("flax", "grain", "huggingface_hub", "jax", "jaxlib", "jinja2", "matplotlib", "ml_dtypes"),
    *("numpy", "optax", "orbax", "pallas_kernels", "rich", "tensorstore", "tokenizers"),
}

USAGE = """
import json, sys
from dsv3_jax.cli.main import main
statuses = []
for arguments in json.loads(sys.argv[1]):
    try:
        statuses.append(main(arguments))
    except SystemExit as left:
        statuses.append(left.code)
print(json.dumps([statuses, sorted(sys.modules)]))
"""


def python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def packages(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def test_help_and_usage_errors_import_nothing_heavy():
    helps = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS)]
    errors = [[], ["generat"], ["--verson"]]
    errors += [[name, "--frobnicate"] for name in COMMANDS]
    errors += [["generate", "--prompt", "x", "--layout", "pipeline"], ["convert", "demo"]]
    settings = ["--temperature=-1", "--top-p=0", "--max-len=0", "--logprobs=2", "--draft=medusa"]
    settings += ["--draft-depth=9", "--seed=-1", "--stop=", "--system=x", "--prompt-file=/nowhere"]
    errors += [["generate", "--prompt", "x", setting] for setting in settings]
    errors += [["bench", "serve", "--rate=-1"], ["bench", "serve", "--url=x"]]
    errors += [["chat", "--temperature=-1"], ["chat", "--max-len=1"]]
    statuses, modules = json.loads(python(USAGE, json.dumps(helps + errors)).splitlines()[-1])
    assert statuses == [0] * len(helps) + [2] * len(errors)
    assert not packages(modules) & HEAVY


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--verson", "dsv3: error: unknown argument --verson; did you mean --version?"),
        ("--model demo generate", "dsv3: error: unknown argument --model"),
        ("generat --prompt x", "dsv3: error: argument COMMAND: expected one of generate, convert"),
        ("generat --prompt x", "got 'generat'; did you mean generate?"),
        (
            "generate --promt x",
            "unknown argument --promt; did you mean --prompt?",
        ),
        ("generate --prompt x --temp=1", "unknown argument --temp; did you mean --temperature?"),
        ("generate --prompt x --frobnicate", "unknown argument --frobnicate"),
        ("generate --prompt x --layout trian", "got 'trian'; did you mean train?"),
        ("generate --prompt x y", "error: unexpected argument 'y'; did you mean --prompt y?"),
        ("generate demo", "unexpected argument 'demo'; did you mean --model demo?"),
        ("serve demo", "dsv3 serve: error: unexpected argument 'demo'; did you mean --model demo?"),
        ("chat org/name", "unexpected argument 'org/name'; did you mean --model org/name?"),
        ("serve --tensor-parallel-size 8", "unknown argument --tensor-parallel-size; did you mean"),
        ("serve --tp=8", "did you mean --layout, which shards the model over all devices?"),
        ("serve -tp 8", "unknown argument -tp; did you mean --layout, which"),
        ("serve --enable-expert-parallel", "did you mean --layout, which"),
        ("serve --max-model-len 9", "unknown argument --max-model-len; did you mean --max-len?"),
        ("serve --context-length 9", "did you mean --max-len?"),
        ("serve --max-num-seqs 9", "did you mean --max-running?"),
        ("serve --max-running-requests 9", "did you mean --max-running?"),
        ("serve --gpu-memory-utilization 0.9", "did you mean --cache-tokens?"),
        ("serve --mem-fraction-static 0.9", "did you mean --cache-tokens?"),
        ("serve --kv-cache-dtype fp8", "did you mean --cache-dtype?"),
        ("serve --served-model-name x", "did you mean --served-name?"),
        ("serve --model-path x", "did you mean --model?"),
        ("serve --api-key x", "did you mean --api-key-file?"),
        ("serve --trust-remote-code", "it is not needed, because no code of a checkpoint runs"),
        ("generate --prompt x --max-tokens 9", "did you mean --max-new-tokens?"),
        ("bench serve --num-prompts 9", "did you mean --num-requests?"),
        ("plan --max-model-len 9", "did you mean --context?"),
        ("generate --prompt x --top-k x", "argument --top-k: invalid int value: 'x'"),
        (
            "train --no-remta --out x",
            "unknown argument --no-remta; did you mean --no-remat?",
        ),
        ("convert demo", "dsv3 convert: error: the following arguments are required: DST"),
        ("verify -- --json", None),
        ("generate --prompt x --seed -1 --json", None),
    ],
)
def test_a_usage_error_names_the_argument_and_the_help(arguments, message, capsys):
    """A message of None means valid arguments."""
    if message is None:
        parser().parse_args(arguments.split())
        return
    with pytest.raises(SystemExit) as left:
        parser().parse_args(arguments.split())
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err
    program = err.partition(":")[0]
    assert err.endswith(f" (see {program} --help)\n")


@pytest.mark.parametrize(
    ("call", "name", "meant"),
    [
        (lambda: dsv3_jax.load("demo", tensor_parallel_size=8), "tensor_parallel_size", "layout"),
        (lambda: dsv3_jax.load("demo", torch_dtype="x"), "torch_dtype", "dtype"),
        (lambda: dsv3_jax.Generator(None, None, max_model_len=9), "max_model_len", "max_len"),
        (lambda: dsv3_jax.Engine(None, None, max_num_seqs=9), "max_num_seqs", "max_running"),
        (lambda: dsv3_jax.Generator.generate(None, "x", max_tokens=9), "max_tokens", "max_new_tok"),
        (lambda: dsv3_jax.Generator.generate(None, "x", max_length=9), "max_length", "max_new_tok"),
        # The settings of Engine.submit, too, come here.
        (lambda: RequestReader.read(None, "x", max_tokens=9), "max_tokens", "max_new_tokens"),
        (
            lambda: RequestReader.read(None, "x", stop_token_ids=[9]),
            "stop_token_ids",
            "stop_tokens",
        ),
    ],
)
def test_an_argument_of_another_project_gets_a_hint(call, name, meant):
    message = f"unexpected keyword argument '{name}'; did you mean {meant}"
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


def test_an_unknown_argument_without_a_hint():
    with pytest.raises(TypeError, match=r"^unexpected keyword argument 'frobnicate'$"):
        dsv3_jax.load("demo", frobnicate=1)
    with pytest.raises(TypeError, match=r"do_sample.*a temperature of 0 is greedy"):
        dsv3_jax.Generator.generate(None, "x", do_sample=True)


def test_every_name_of_ours_exists():
    """A hint that names nothing would mislead."""
    (commands,) = parser()._subparsers._group_actions
    flags = {
        each for command in commands.choices.values() for each in command._option_string_actions
    }
    functions = (dsv3_jax.load, dsv3_jax.Generator, dsv3_jax.Generator.generate, dsv3_jax.Engine)
    known = {name for each in functions for name in inspect.signature(each).parameters}
    for ours in other_names._NAMES:
        assert "--" + ours.replace("_", "-") in flags or ours in known, ours


def test_help_is_there_at_once():
    """Measures processor time, to which other programs do not contribute."""
    took = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python("from dsv3_jax.cli.main import main; main(['--version'])")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(took) < 0.3


def test_the_package_imports_jax_when_a_name_needs_it():
    code = "import json, sys, dsv3_jax, sharding.names; dsv3_jax.presets, dsv3_jax.ModelConfig;"
    modules = json.loads(python(code + "print(json.dumps(sorted(sys.modules)))"))
    assert not packages(modules) & HEAVY


@pytest.mark.parametrize("package", [dsv3_jax, sharding])
def test_names_are_the_same_to_type_checkers_and_at_run_time(package):
    tree = ast.parse(Path(package.__file__).read_text("utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    assert isinstance(block.test, ast.Name)
    assert block.test.id == "TYPE_CHECKING"
    imported = {
        alias.name: None if node.module == package.__name__ else node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == package._MODULES
    assert sorted(package.__all__) == sorted(imported)
    assert set(package.__all__) <= set(dir(package))
    names: dict[str, object] = {}
    exec(f"from {package.__name__} import *", names)
    for name, module in imported.items():
        home = importlib.import_module(module or f"{package.__name__}.{name}")
        assert names[name] is (getattr(home, name) if module else home)
    with pytest.raises(AttributeError, match=f"module '{package.__name__}' has no attribute 'nam'"):
        _ = package.nam


def test_layouts_have_their_names():
    assert get_args(LayoutName) == tuple(sharding.PRESETS)


# ---- exit statuses -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "status", "message"),
    [
        (None, 0, ""),
        (ValueError("expected a, got b"), 2, "dsv3 doctor: error: expected a, got b\n"),
        (PermissionError(13, "Permission denied", "/a"), 2, "error: /a: Permission denied\n"),
        (OSError(28, "No space left on device"), 2, "error: No space left on device\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_status(raised, status, message, monkeypatch, capsys):
    def run(arguments):
        if raised is not None:
            raise raised

    monkeypatch.setattr("dsv3_jax.cli.doctor.run", run)
    assert main(["doctor"]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith(message)
    assert err.count("\n") == (status == 2)


def test_an_internal_error_has_its_traceback(monkeypatch):
    def run(arguments):
        raise RuntimeError("a bug")

    monkeypatch.setattr("dsv3_jax.cli.doctor.run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["doctor"])


INTERRUPTED = """
import os, signal, sys
from dsv3_jax.__main__ import main
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass  # Python takes the signal here
"""


def interrupted(code: str) -> tuple[int, str, str]:
    """Returns status, stdout and stderr of ``dsv3 doctor``, which ``code`` interrupts."""
    command = [sys.executable, "-c", INTERRUPTED + code + "sys.exit(main())", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", ["dsv3_jax.cli.main", "dsv3_jax.config", "jax"])
def test_an_interrupt_during_an_import(module):
    """The import may be of the command's own modules or of those that a subcommand needs. An
    extension that imports the module may turn KeyboardInterrupt into an ImportError."""
    code = f"""
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                interrupt()
            except KeyboardInterrupt:
                raise ImportError("initialization failed")
sys.meta_path.insert(0, Finder())
"""
    assert interrupted(code) == (130, "", "")


@pytest.mark.parametrize(
    "run",
    [
        "interrupt()",
        # A callback from which Python does not propagate exceptions.
        "Dropped(); time.sleep(30)",
        # The signal is sent again while Python reports the first one.
        "interrupts._RESEND_SECONDS = 0; Dropped(); time.sleep(30)",
        # The interrupted code raises another exception.
        "try:\n        interrupt()\n    except KeyboardInterrupt:\n        raise ImportError",
    ],
)
def test_an_interrupt_while_a_command_runs(run):
    code = f"""
import time, types
from dsv3_jax import interrupts
class Dropped:
    def __del__(self):
        interrupt()
def run(arguments):
    {run}
module = sys.modules["dsv3_jax.cli.doctor"] = types.ModuleType("dsv3_jax.cli.doctor")
module.run = run
"""
    assert interrupted(code) == (130, "", "")


def test_an_ignored_interrupt_stays_ignored():
    code = """
import types
signal.signal(signal.SIGINT, signal.SIG_IGN)
module = sys.modules["dsv3_jax.cli.doctor"] = types.ModuleType("dsv3_jax.cli.doctor")
module.run = lambda arguments: interrupt()
"""
    assert interrupted(code) == (0, "", "")


# ---- JSON ----------------------------------------------------------------------------------------


def test_json_has_no_nan(capsys):
    print_json({"a": [1.5, float("nan"), -float("inf")], "b": ({"c": float("inf")}, "Zürich", 3)})
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result == {"a": [1.5, None, None], "b": [{"c": None}, "Zürich", 3]}


def test_every_command_prints_json_by_the_same_function():
    folder = Path(dsv3_jax.__file__).parent / "cli"
    calls = [path.name for path in folder.rglob("*.py") if "json.dump" in path.read_text("utf-8")]
    assert calls == ["output.py"]

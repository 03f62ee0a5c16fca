"""Help, usage errors and `import dsv3_jax` do not wait for JAX, which they do not need."""

import ast
import importlib
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import dsv3_jax
import sharding
from dsv3_jax.cli.arguments import (
    bench,
    chat,
    convert,
    doctor,
    export,
    generate,
    plan,
    serve,
    train,
    verify,
)
from dsv3_jax.cli.main import main, parser
from dsv3_jax.cli.output import print_json
from sharding.names import LayoutName

COMMANDS = [
    module.__name__.rsplit(".", 1)[1]
    for module in (bench, chat, convert, doctor, export, generate, plan, serve, train, verify)
]

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
        ("generate --prompt x y", "dsv3 generate: error: unexpected argument 'y'"),
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
from dsv3_jax.cli import interrupts
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

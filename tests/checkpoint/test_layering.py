"""Working with checkpoints does not import the model; only loading and writing models do."""

import json
import subprocess
import sys

WITHOUT_MODEL = ("check", "compare", "convert", "export", "find", "open_checkpoint", "verify")
SCRIPT = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(f"dsv3_jax.checkpoint.{name}")
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_import(*names: str) -> list[str]:
    """Imports modules of the package in a new process. Returns all modules that it then has."""
    command = [sys.executable, "-c", SCRIPT, *names]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(result.stdout)


def is_of_model(module: str) -> bool:
    packages = ("dsv3_jax.model", "dsv3_jax.layers", "pallas_kernels", "sharding", "flax")
    return f"{module}.".startswith(tuple(f"{package}." for package in packages))


def test_conversion_does_not_import_the_model():
    assert not [name for name in modules_after_import(*WITHOUT_MODEL) if is_of_model(name)]


def test_loading_imports_the_model():
    """Shows that the test above would notice the import."""
    assert any(is_of_model(name) for name in modules_after_import("load"))

"""Imports only go down through the layers of packages, and form no cycle."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Each package, and the packages of this repository that it may import.
LAYERS = {
    "pallas_kernels": {"pallas_kernels"},
    "sharding": {"pallas_kernels", "sharding"},
    "dsv3_jax": {"pallas_kernels", "sharding", "dsv3_jax"},
}

# Subpackages of dsv3_jax that may import the model but not each other.
SIBLINGS = ("checkpoint", "generation", "training")


def imports(source: str) -> Iterator[str]:
    """Yields the full dotted names that a module imports, `from a import b` as a.b.

    Imports inside functions and under TYPE_CHECKING count too.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(folder: str) -> list[Path]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths, f"no modules below {folder}"
    return paths


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Returns the modules that each module imports.

    Args:
      sources: source of each module by its dotted name. Imports of other modules are ignored.
    """
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        graph[module] = set()
        for name in imports(source):
            while name not in sources and "." in name:
                name = name.rpartition(".")[0]
            if name in sources and name != module:
                graph[module].add(name)
    return graph


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Returns the modules along one import cycle, or nothing."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("package", LAYERS)
def test_imports_only_go_down(package):
    own = {*LAYERS, "scripts", "tests", "notebooks"}
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(package)
        for name in imports(path.read_text("utf-8"))
        if (top := name.split(".")[0]) in own and top not in LAYERS[package]
    ]
    assert not wrong


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_siblings_do_not_know_each_other(sibling):
    others = tuple(f"dsv3_jax.{other}" for other in (*SIBLINGS, "cli") if other != sibling)
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules(f"dsv3_jax/{sibling}")
        for name in imports(path.read_text("utf-8"))
        if f"{name}.".startswith(tuple(f"{other}." for other in others))
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("room", "above"),
    [
        ("scheduling", ("dsv3_jax.engine.device", "dsv3_jax.engine.requests", "jax")),
        ("device", ("dsv3_jax.engine.requests",)),
        ("requests", ()),
    ],
)
def test_rooms_of_the_engine(room, above):
    """Scheduling knows no arrays; none of the rooms knows the engine and the loop above them."""
    above = (*above, "dsv3_jax.engine.engine", "dsv3_jax.engine.loop")
    for path in modules(f"dsv3_jax/engine/{room}"):
        for name in imports(path.read_text("utf-8")):
            assert not f"{name}.".startswith(tuple(f"{each}." for each in above)), path


@pytest.mark.parametrize("below", ["engine", "generation", "checkpoint", "training", "layers"])
def test_the_generator_is_above_what_it_runs(below):
    for path in modules(f"dsv3_jax/{below}"):
        for name in imports(path.read_text("utf-8")):
            assert not f"{name}.".startswith("dsv3_jax.offline."), path


def test_only_the_command_and_replicas_import_the_server():
    """And the server imports the engine and what is below it."""
    above = (
        "cli",
        "serve_ray",
        "checkpoint",
        "training",
        "plan",
        "viz",
        "inspection",
        "traces",
        "__main__",
    )
    for path in modules("dsv3_jax"):
        folder = path.relative_to(ROOT / "dsv3_jax").parts[0]
        for name in imports(path.read_text("utf-8")):
            if folder == "server":
                assert not name.startswith(tuple(f"dsv3_jax.{each}" for each in above)), path
            elif folder not in ("cli", "serve_ray"):
                assert not f"{name}.".startswith("dsv3_jax.server."), path


def test_only_replicas_import_ray():
    for path in modules("dsv3_jax"):
        folder = path.relative_to(ROOT / "dsv3_jax").parts[0]
        for name in imports(path.read_text("utf-8")):
            if folder != "serve_ray":
                assert not f"{name}.".startswith(("ray.", "dsv3_jax.serve_ray.")), path


def test_layers_import_nothing_of_the_model_around_them():
    below = ("layers", "config", "quantization", "attn_impl", "parameter_path")
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in modules("dsv3_jax/layers")
        for name in imports(path.read_text("utf-8"))
        if name.startswith("dsv3_jax.") and name.split(".")[1] not in below
    ]
    assert not wrong


def test_imports_form_no_cycle():
    """No cycle is hidden inside a function or under TYPE_CHECKING either."""
    sources = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): (
            path.read_text("utf-8")
        )
        for package in LAYERS
        for path in modules(package)
    }
    graph = import_graph(sources)
    assert "dsv3_jax.hf_config" in graph["dsv3_jax.config"]
    assert not cycle(graph)


def test_the_check_sees_every_kind_of_import():
    source = "import a.b\nfrom c import d\ndef f():\n    from e.f import g as h\n"
    assert list(imports(source)) == ["a.b", "c.d", "e.f.g"]


@pytest.mark.parametrize(
    "hidden",
    [
        "def read():\n    from a.config import read\n",
        "def read():\n    from a import config\n",
        "if TYPE_CHECKING:\n    import a.config\n",
    ],
)
def test_the_check_sees_hidden_cycles(hidden):
    sources = {"a": "", "a.config": "import a.hf_config\n", "a.hf_config": hidden}
    assert set(cycle(import_graph(sources))) == {"a.config", "a.hf_config"}
    assert not cycle(import_graph(sources | {"a.hf_config": "import json\n"}))

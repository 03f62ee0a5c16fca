"""Production code uses every function of the kernels, and at least two values of every setting.

The checks read the source and compare names, so a name that two functions share can hide one that
nothing uses; nothing that is used is reported.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCTION = ("pallas_kernels", "sharding", "dsv3_jax")

FOR_TESTS = {"implementation", "interpret", "platform", "most_polls", "config"}
"""Parameters by which users and tests select what this machine can run or what takes long to reach:
a back-end, the interpreter, the CPU in place of a GPU, the limit of a barrier that hangs, and tiles
that production code selects by shapes."""

PUBLIC = ("api.py", "reference.py")
"""Files whose functions take the arguments of the public ones."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A parameter with a default, or such a field of a dataclass."""

    owner: str
    """The function or class that is called."""
    name: str
    position: int | None
    """Its place among the arguments of a call; None if it is passed by name only."""
    default: str
    """The source of its default."""
    where: str


@functools.cache
def trees() -> dict[Path, ast.Module]:
    paths = [path for folder in PRODUCTION for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path: ast.parse(path.read_text("utf-8")) for path in paths}


def nodes(folder: str) -> Iterator[tuple[Path, ast.AST]]:
    for path, tree in trees().items():
        if path.is_relative_to(ROOT / folder):
            yield from ((path, node) for node in ast.walk(tree))


def called_name(node: ast.expr) -> str:
    """Returns the last name of what is called, also in ``partial(f, ...)(...)``."""
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
        case ast.Call(args=[first, *_]):
            return called_name(first)
    return ""


@functools.cache
def calls() -> dict[str, list[ast.Call]]:
    """Returns the calls of each name. ``partial(f, ...)`` calls f, and ``cls(...)`` its class."""
    of_name: dict[str, list[ast.Call]] = defaultdict(list)
    for folder in PRODUCTION:
        for _, node in nodes(folder):
            if isinstance(node, ast.ClassDef):
                own = [each for each in ast.walk(node) if isinstance(each, ast.Call)]
                of_name[node.name] += [call for call in own if called_name(call.func) == "cls"]
            if isinstance(node, ast.Call):
                name = called_name(node.func)
                of_name[name].append(node)
                if name == "partial" and node.args:
                    function, *arguments = node.args
                    inner = ast.Call(func=function, args=arguments, keywords=node.keywords)
                    of_name[called_name(function)].append(inner)
    return of_name


@functools.cache
def names() -> set[str]:
    """Returns every name that an expression of production code has, and every string."""
    present = set()
    for folder in PRODUCTION:
        for _, node in nodes(folder):
            match node:
                case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=str(name)):
                    present.add(name)
    return present


def settings(folder: str) -> Iterator[Setting]:
    methods = {
        child: node
        for _, node in nodes(folder)
        if isinstance(node, ast.ClassDef)
        for child in node.body
    }
    for path, node in nodes(folder):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ClassDef):
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            for i, field in enumerate(fields):
                is_constant = "ClassVar" in ast.unparse(field.annotation)
                if field.value and isinstance(field.target, ast.Name) and not is_constant:
                    name = field.target.id
                    yield Setting(node.name, name, i, ast.unparse(field.value), where)
        elif isinstance(node, ast.FunctionDef):
            owner = methods.get(node)
            is_constructor = owner is not None and node.name == "__init__"
            called = owner.name if owner is not None and is_constructor else node.name
            arguments = node.args
            positional = [*arguments.posonlyargs, *arguments.args]
            first = len(positional) - len(arguments.defaults)
            for i, default in enumerate(arguments.defaults, first):
                position = i - int(owner is not None)
                yield Setting(called, positional[i].arg, position, ast.unparse(default), where)
            for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
                if default is not None:
                    yield Setting(called, each.arg, None, ast.unparse(default), where)


def values(setting: Setting) -> set[str] | None:
    """Returns the constants that production code gives a setting; None if it may be anything."""
    constants = set()
    replaced = [call for name in ("replace", "_replace") for call in calls()[name]]
    for call in [*calls().get(setting.owner, []), *replaced]:
        given = {each.arg: each.value for each in call.keywords}
        value = given.get(setting.name)
        if call in replaced and value is None:
            continue
        if None in given or any(isinstance(each, ast.Starred) for each in call.args):
            return None
        if value is None and setting.position is not None and setting.position < len(call.args):
            value = call.args[setting.position]
        if value is not None and not isinstance(value, ast.Constant):
            return None
        constants.add(setting.default if value is None else repr(value.value))
    return constants


@pytest.mark.parametrize("folder", ["pallas_kernels", "sharding"])
def test_every_function_is_used(folder):
    """A decorator may use its function."""
    unused = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, node in nodes(folder)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not (node.name.startswith("__") or node.decorator_list or node.name in names())
    ]
    assert not unused


@pytest.mark.parametrize("folder", ["pallas_kernels"])
def test_no_setting_has_one_value(folder):
    """A parameter whose calls all leave it out, or all give it its default, is a constant."""
    unused = []
    for setting in settings(folder):
        is_public = setting.where.split(":")[0].endswith(PUBLIC)
        # `name=name` keeps a loop's value for a function made in it.
        is_bound = setting.name == setting.default
        if not (is_public or is_bound or setting.name in FOR_TESTS):
            given = values(setting)
            if given == {setting.default} and setting.owner != "_":
                unused.append(f"{setting.where} {setting.owner}({setting.name}={setting.default})")
    assert not unused


def test_what_is_reported(monkeypatch):
    source = """
def scale(x, factor=1, *, fast=False, exact=True):
    return x
def forgotten():
    scale(1, factor); scale(2, fast=True)
"""
    monkeypatch.setattr(f"{__name__}.trees", lambda: {ROOT / "sharding/a.py": ast.parse(source)})
    for function in (calls, names):
        function.cache_clear()
    try:
        given = {setting.name: values(setting) for setting in settings("sharding")}
        assert given == {"factor": None, "fast": {"False", "True"}, "exact": {"True"}}
        assert "forgotten" not in names()
    finally:
        for function in (calls, names):
            function.cache_clear()

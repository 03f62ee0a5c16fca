"""Settings are checked without JAX: by the standard library alone."""

import ast
import sys
from pathlib import Path

import pytest

from dsv3_jax.generation import settings
from dsv3_jax.generation.settings import check_settings


def test_the_module_imports_the_standard_library_alone():
    tree = ast.parse(Path(settings.__file__).read_text("utf-8"))
    names = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert names
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1},
        {"top_p": 0.0},
        {"top_k": 1.5},
        {"min_p": 2},
        {"seed": 2**32},
        {"max_new_tokens": 0},
        {"logprobs": 21},
        {"stop": ["a", ""]},
        {"stop_tokens": [-1]},
        {"ignore_eos": "no"},
        {"draft": "mpt"},
        {"draft": "synthetic:nan"},
        {"draft": "ngram", "draft_depth": 5},
    ],
    ids=str,
)
def test_wrong_settings(wrong):
    name = list(wrong)[-1]
    with pytest.raises(ValueError, match=f"^{name}: expected .*got "):
        check_settings(**{"top_k": 3, "stop": ("a", "b")} | wrong)


def test_right_settings():
    check_settings(temperature=0.6, top_p=1, stop="\n", stop_tokens=range(3), ignore_eos=True)
    check_settings(draft="synthetic:0.5", draft_depth="auto", logprobs=20)
    check_settings()


def test_unknown_settings():
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        check_settings(temprature=1)

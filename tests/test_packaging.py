"""Contents of an installation, and its refusal of foreign packages with the same names."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from dsv3_jax import own_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
TOP = ("dsv3_jax", *own_packages.NAMES)


def test_packages_are_listed():
    """Packages that pyproject does not list are missing from an installation."""
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    existing = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in TOP
        for path in (ROOT / package).rglob("*.py")
    }
    assert listed == existing | {"dsv3_jax.demo", "dsv3_jax.demo_sparse"}
    assert {name.partition(".")[0] for name in listed} == set(TOP)


@pytest.mark.slow
def test_the_wheel(tmp_path):
    """The wheel has the demo and the markers of typed packages, and builds without a warning."""
    pytest.importorskip("setuptools", minversion="77")
    for package in TOP:
        shutil.copytree(
            ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tmp_path)
    code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    (tmp_path / "dist").mkdir()
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "Warning" not in built.stdout + built.stderr
    (wheel,) = (tmp_path / "dist").iterdir()
    files = zipfile.ZipFile(wheel).namelist()
    assert {f"{package}/py.typed" for package in TOP} <= set(files)
    demos = {path.relative_to(ROOT) for path in ROOT.glob("dsv3_jax/demo*/*")}
    page = {f"dsv3_jax/server/page/{name}" for name in ("index.html", "style.css", "chat.js")}
    assert page <= set(files)
    assert {Path(file) for file in files if file.startswith("dsv3_jax/demo")} == demos
    assert len({path.parent for path in demos}) == 2


@pytest.mark.parametrize("name", own_packages.NAMES)
@pytest.mark.parametrize("imported", [False, True], ids=["found", "imported"])
def test_a_package_of_the_same_name_is_refused(name, imported, tmp_path):
    other = tmp_path / name
    other.mkdir()
    (other / "__init__.py").touch()
    code = f"import {name}\nimport dsv3_jax" if imported else "import dsv3_jax"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    expected = f"expected its own package {name!r} in {ROOT / name}, found {other};"
    assert last.startswith(f"ImportError: dsv3_jax: {expected}")


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(own_packages, "NAMES", ("sharding", "nothing_of_that_name"))
    with pytest.raises(ImportError, match=r"package 'nothing_of_that_name' in .*, found none;"):
        own_packages.check()

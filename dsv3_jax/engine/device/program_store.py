"""Compiled programs in a directory, so that a later process neither traces nor compiles them.

A compilation cache saves XLA's part. Tracing and lowering are Python, cannot run in parallel, and
take most of the time once the cache is filled. A stored program needs neither.

Nothing may change what a program computes without changing its fingerprint: it covers the source
files of this project, the versions of JAX and the driver, JAX's settings, the devices, the model's
structure, and every shape. A program with another fingerprint, or a damaged file, is compiled again
and replaced, and a warning names the reason.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
from jax.experimental import serialize_executable

from dsv3_jax.files import atomic_write

logger = logging.getLogger(__name__)

_MAGIC = b"dsv3-jax program 1\n"
_PACKAGES = ("dsv3_jax", "pallas_kernels", "sharding")
_ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Settings of JAX that change where or how something is reported or cached, but no program.
_IRRELEVANT = re.compile(r"cache|log|dump|debug|explain|traceback|topology_timeout")


class ProgramStore:
    """Stores the compiled programs of one engine.

    Loading runs code, so that a user who can write to the directory can run code in this process.

    Args:
      directory: is created if it does not exist.
      fingerprint: what the programs depend on, as text by the name that warnings give it. See
        :func:`environment`.
      devices: the devices of the programs, in their order.

    Raises:
      NotImplementedError: there are several processes. Each has only a part of a program.
      OSError: the directory cannot be created.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        fingerprint: Mapping[str, str],
        devices: Sequence[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
    ):
        if jax.process_count() > 1:
            raise NotImplementedError(
                f"program store: is for one process, there are {jax.process_count()}"
            )
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._fingerprint = {name: _digest(text.encode()) for name, text in fingerprint.items()}
        self._devices = devices

    def load(self, name: str, shape: str) -> jax.stages.Compiled | None:
        """Returns a program with this description of its shape, or None if it must be compiled."""
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            return self._refuse(name, f"cannot be read: {error}")
        if not content.startswith(_MAGIC):
            return self._refuse(name, "is not a stored program")
        header, _, payload = content[len(_MAGIC) :].partition(b"\n")
        try:
            stored: dict[str, str] = json.loads(header)
            digest = stored.pop("payload")
        except (ValueError, KeyError, AttributeError, TypeError):
            return self._refuse(name, "is damaged")
        expected = self._expected(shape)
        if other := sorted(k for k in {*stored, *expected} if stored.get(k) != expected.get(k)):
            return self._refuse(name, f"is of another state: {', '.join(other)}")
        if digest != _digest(payload):
            return self._refuse(name, "is damaged")
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(payload), execution_devices=self._devices
            )
        # Whatever XLA or pickle raise, the program can be compiled.
        except Exception as error:
            return self._refuse(name, f"cannot be loaded: {type(error).__name__}: {error}")

    def save(self, name: str, shape: str, compiled: jax.stages.Compiled) -> None:
        """Stores a program. A failure is reported, and the engine goes on without the file.

        On CPUs nothing is stored while JAX's compilation cache is in use: XLA serializes a program
        that came from the cache without its functions, and it fails when it runs.
        """
        cached = jax.config.values["jax_enable_compilation_cache"]
        cached = cached and jax.config.values["jax_compilation_cache_dir"]
        if cached and self._devices[0].platform == "cpu":
            logger.warning("program store: %s was not stored: it may be from a cache", name)
            return
        try:
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            header = json.dumps({**self._expected(shape), "payload": _digest(payload)})
            atomic_write(self._path(name), _MAGIC + header.encode() + b"\n" + payload)
        except Exception as error:
            logger.warning("program store: %s was not stored: %s", name, error)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.program"

    def _expected(self, shape: str) -> dict[str, str]:
        return {**self._fingerprint, "shape": shape}

    def _refuse(self, name: str, reason: str) -> None:
        logger.warning("program store: %s %s; it is compiled again", self._path(name), reason)


def environment(devices: Sequence[Any]) -> dict[str, str]:
    """Returns what every program of this process depends on, by name."""
    settings = {k: str(v) for k, v in jax.config.values.items() if not _IRRELEVANT.search(k)}
    return {
        "source files": _source_files(),
        "versions": f"{jax.__version__} {importlib.metadata.version('jaxlib')} {flax.__version__}",
        "driver": str(devices[0].client.platform_version),
        "devices": str([(device.id, device.device_kind) for device in devices]),
        "settings of JAX": json.dumps(settings, sort_keys=True),
        "environment": str([os.environ.get(name, "") for name in _ENVIRONMENT]),
    }


@functools.cache
def _source_files() -> str:
    """Returns a digest of the project's Python files."""
    root = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for package in _PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            digest.update(f"{path.relative_to(root)} {_digest(path.read_bytes())}\n".encode())
    return digest.hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

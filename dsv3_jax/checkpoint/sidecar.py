"""The small files of a source that a store keeps, so that an export can give all of it back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import xxhash

from dsv3_jax.checkpoint.failures import naming
from dsv3_jax.checkpoint.safetensors_file import FileArray, write_file

FOLDER = "source"
HEADERS = "headers"
UNUSED = "unused.safetensors"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_LARGEST = 64 * 2**20


def keep(
    source: Path, tensors: Mapping[str, FileArray], unused: tuple[str, ...], store: Path
) -> None:
    """Writes ``store/source``: config, tokenizer, code and licence, headers, unread tensors."""
    folder = store / FOLDER
    (folder / HEADERS).mkdir(parents=True, exist_ok=True)
    for path in small_files(source):
        with naming(path):
            content = path.read_bytes()
        with naming(folder / path.name):
            (folder / path.name).write_bytes(content)
    for file in {id(t.file): t.file for t in tensors.values()}.values():
        with naming(folder / HEADERS / file.path.name):
            (folder / HEADERS / file.path.name).write_bytes(file.header)
    if unused:
        with naming(folder / UNUSED):
            write_file(folder / UNUSED, {name: tensors[name][...] for name in unused})


def small_files(directory: Path) -> list[Path]:
    """Files beside the weights, by name."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and path.stat().st_size <= _LARGEST
    )


def hashes(store: Path) -> dict[str, str]:
    """XXH3 (128 bits) of every kept file, by its path in ``store/source``."""
    folder = store / FOLDER
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in paths
    }


def sync(directory: Path) -> None:
    """Every file and folder below, down to the disk."""
    for folder, _, files in os.walk(directory):
        for path in (*(os.path.join(folder, file) for file in files), folder):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

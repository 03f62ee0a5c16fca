"""The small files of a source that a store keeps, so that an export can give all of it back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash

from dsv3_jax.checkpoint.safetensors_file import FileArray, write_file
from dsv3_jax.files import atomic_write, naming

FOLDER = "source"
HEADERS = "headers"
UNUSED = "unused.safetensors"

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_LARGEST = 64 * 2**20


def keep(
    source: Path, tensors: Mapping[str, FileArray], unused: tuple[str, ...], store: Path
) -> None:
    """Writes ``store/source`` anew: config, tokenizer, code and licence, headers, unread tensors.

    Raises:
      ValueError: a small file has the name of the folder of headers.
      OSError: a file cannot be read or written.
    """
    folder = store / FOLDER
    if folder.exists():
        shutil.rmtree(folder)
    (folder / HEADERS).mkdir(parents=True)
    for path in small_files(source):
        if path.name == HEADERS:
            raise ValueError(f"{path}: a store cannot keep a file of this name; rename it first")
        with naming(path):
            content = path.read_bytes()
        atomic_write(folder / path.name, content)
    for file in {id(t.file): t.file for t in tensors.values()}.values():
        atomic_write(folder / HEADERS / file.path.name, file.header)
    if unused:
        with naming(folder / UNUSED):
            write_file(folder / UNUSED, {name: tensors[name][...] for name in unused})


def small_files(directory: Path) -> list[Path]:
    """Files beside the weights, by name. Symbolic links are followed: the Hub's cache is made of
    them."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and path.stat().st_size <= _LARGEST
    )


def hashes(store: Path) -> dict[str, str]:
    """XXH3 (128 bits) of every kept file, by its path in ``store/source``. A symbolic link counts
    as missing: a conversion writes none, and one could lead out of the store."""
    folder = store / FOLDER
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in paths
    }

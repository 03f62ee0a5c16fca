"""The source's small files that a store keeps, so that an export can reproduce the source."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import xxhash

from dsv3_jax.checkpoint.reader import FileArray, write_file
from dsv3_jax.files import atomic_write, naming

FOLDER = "source"  # folder of a store with the small files
HEADERS = "headers"  # folder in it with the headers of the source's safetensors files
UNUSED = "unused.safetensors"  # file in it with the tensors that no model reads

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_MAX_BYTES = 64 * 2**20


def copy_small_files(
    source: Path, tensors: Mapping[str, FileArray], unused: tuple[str, ...], store: Path
) -> None:
    """Writes ``store/source`` anew: config, tokenizer, code, licence, headers, unused tensors."""
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
    """Returns the small files next to the weights, sorted by name.

    Symbolic links are followed, because the Hub's cache consists of them.
    """
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and path.suffix not in _WEIGHTS
        and path.stat().st_size <= _MAX_BYTES
    )


def hashes(store: Path) -> dict[str, str]:
    """Returns the XXH3 hash (128 bits) of every small file, by its path in ``store/source``.

    A symbolic link counts as missing. A conversion writes none, and it could point out of the
    store.
    """
    folder = store / FOLDER
    paths = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return {
        path.relative_to(folder).as_posix(): xxhash.xxh3_128_hexdigest(path.read_bytes())
        for path in paths
    }

"""From a store back to a Hugging Face directory: the very files it was made from, or new ones."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from dsv3_jax.checkpoint import sidecar
from dsv3_jax.checkpoint.arrays import Arrays, LazyArray, as_bytes, pieces
from dsv3_jax.checkpoint.check import check_tensors
from dsv3_jax.checkpoint.formats import Forms, recode
from dsv3_jax.checkpoint.manifest import NAME
from dsv3_jax.checkpoint.messages import os_error_message
from dsv3_jax.checkpoint.reader import INDEX
from dsv3_jax.checkpoint.safetensors_file import (
    NUMPY,
    SafetensorsFile,
    header_of,
    parsed_header,
)
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.checkpoint.tensor_table import (
    UNUSED_SUFFIXES,
    Table,
    TensorSpec,
    copies,
    tensor_table,
)
from dsv3_jax.checkpoint.threads import Progress, in_threads
from dsv3_jax.checkpoint.unfinished import check_new, new_directory, partial_of
from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.files import atomic_file, atomic_write
from dsv3_jax.quantization import BlockQuantization

To = Literal["fp8", "bf16"]

_SHARD_BYTES = 4_300_000_000


class Shard(NamedTuple):
    """A file to be."""

    name: str
    header: bytes
    tensors: tuple[str, ...]
    bytes: int
    """Behind the header."""
    parts: Callable[[], Iterator[np.ndarray]]
    """What fills it, in order."""


def export(
    store: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    to: To | None = None,
    *,
    workers: int = 2,
    progress: Progress | None = None,
) -> ExportPlan:
    """Writes a store as a Hugging Face directory, which transformers and others load.

    Where the store kept every byte of its source and ``to`` asks for no other form, the files are
    the source's own, byte for byte. Everything is written beside ``directory``, which appears when
    it is whole; shards that an interrupted export finished are not written again. The store is only
    read, and file names that it holds lead nowhere but into ``directory``.

    Args:
      directory: must not exist.
      to: float8 with block scales, or bfloat16. None: the store's own form; of integers bfloat16.
      workers: shards that are written at once.
      progress: is called with bytes that are written, from several threads.

    Returns:
      What was written.

    Raises:
      ValueError: no whole store, one that is damaged, a directory that exists or that another
        process is writing, or a disk that is full or fails.
    """
    out = Path(directory)
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    check_new(out)
    if Path(store).resolve() in out.resolve().parents:
        raise ValueError(f"{out}: expected a directory outside of the store {store}")
    planned = plan_export(StoreReader(Path(store)), to)
    tell = progress or (lambda count: None)
    try:
        with new_directory(out, {"store": planned.identity, "to": to}) as partial:
            in_threads(workers, lambda shard: _write(partial, shard, tell), planned.shards)
            for name, content in planned.small.items():
                atomic_write(partial / name, content)
    except OSError as error:
        raise ValueError(f"{os_error_message(error)}; {resume_hint(out)}") from None
    return planned


def resume_hint(directory: Path) -> str:
    """What an export that was interrupted leaves behind, for its message; empty if nothing."""
    partial = partial_of(directory)
    if not partial.is_dir():
        return "nothing was written"
    return f"finished shards are kept in {partial}; the same command continues with them"


class ExportPlan(NamedTuple):
    """What an export will write."""

    verbatim: bool
    shards: list[Shard]
    small: dict[str, bytes]
    """The other files."""
    identity: str
    """Of the store."""

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def plan_export(reader: StoreReader, to: To | None) -> ExportPlan:
    """
    Raises:
      ValueError: an unknown ``to``, a kept file or a tensor that is missing or damaged, or names
        that a store's conversion would not have written.
    """
    if to is not None:
        check_choice("to", to, ("fp8", "bf16"))
    manifest, folder = reader.manifest, reader.source
    found = sidecar.hashes(reader.directory)
    if bad := sorted(n for n in {*found, *manifest.kept} if found.get(n) != manifest.kept.get(n)):
        raise ValueError(f"{folder / bad[0]}: missing, unknown or damaged")
    names = [n for n in manifest.kept if "/" not in n and n != sidecar.UNUSED]
    if clash := sorted(set(names) & set(manifest.files)):
        raise ValueError(f"{reader.directory / NAME}: {clash[0]} is both a kept file and a shard")
    small = {name: (folder / name).read_bytes() for name in names}
    identity = xxhash.xxh3_128_hexdigest((reader.directory / NAME).read_bytes())
    form = "fp8" if isinstance(reader.config.quantization, BlockQuantization) else "bf16"
    if to in (None, form) and _keeps_every_byte(reader):
        return ExportPlan(True, _original_shards(reader), small, identity)
    check_tensors(reader.config, reader)
    config = _target_config(reader, to or form)
    shards = _new_shards(reader, config)
    weight_map = {name: shard.name for shard in shards for name in shard.tensors}
    size = sum(shard.bytes for shard in shards)
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    small[INDEX] = _json(index)
    small["config.json"] = _json(_hf_config(manifest.config, config))
    return ExportPlan(False, shards, small, identity)


def _keeps_every_byte(reader: StoreReader) -> bool:
    held, repeats = reader.manifest.tensors, copies(reader.config)
    return all(
        name.endswith(UNUSED_SUFFIXES)
        or (
            ((kept := held.get(repeats.get(name, name))) is not None)
            and (kept.dtype, kept.shape, kept.hash) == (tensor.dtype, tensor.shape, tensor.hash)
        )
        for name, tensor in reader.manifest.source.items()
    )


# ---- the source's own files ----------------------------------------------------------------------


def _original_shards(reader: StoreReader) -> list[Shard]:
    repeats, wanted = copies(reader.config), reader.manifest.source
    unused: Arrays = {}
    if (path := reader.source / sidecar.UNUSED).is_file():
        unused = SafetensorsFile(path)

    def parts(names: tuple[str, ...]) -> Iterator[np.ndarray]:
        for name in names:
            array = unused[name] if name in unused else reader[repeats.get(name, name)]
            yield from _checked(name, array, wanted[name].hash)

    shards = []
    for name, file in reader.manifest.files.items():
        path = reader.source / sidecar.HEADERS / name
        header = path.read_bytes()
        entries = parsed_header(path, header)
        tensors = tuple(sorted(entries, key=lambda name: entries[name]["data_offsets"]))
        for tensor in tensors:
            is_unused = tensor in unused
            held = wanted.get(tensor)
            if (
                held is None
                or not (is_unused or repeats.get(tensor, tensor) in reader)
                or (entries[tensor]["dtype"], entries[tensor]["shape"]) != (held.dtype, held.shape)
            ):
                raise ValueError(f"{path}: {tensor}: not the tensor that the manifest has")
        size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if file.bytes != 8 + len(header) + size:
            raise ValueError(
                f"{path}: expected a header of {file.bytes:,} bytes in all, as the manifest has, "
                f"got one of {8 + len(header) + size:,}"
            )
        shards.append(Shard(name, header, tensors, size, functools.partial(parts, tensors)))
    return shards


def _checked(name: str, array: LazyArray, wanted: str, multiple: int = 128) -> Iterator[np.ndarray]:
    """The array in pieces; fails behind the last if they are not what was once converted."""
    hasher = xxhash.xxh3_128()
    for rows in pieces(array.shape, multiple):
        part = array[rows] if array.shape else array[...]
        hasher.update(as_bytes(part))
        yield part
    if hasher.hexdigest() != wanted:
        raise ValueError(f"{name}: the store is damaged; expected the hash {wanted}")


# ---- files in another form -----------------------------------------------------------------------


def _target_config(reader: StoreReader, to: To) -> ModelConfig:
    quantization = None
    if to == "fp8":
        quantization = ModelConfig.from_hf(reader.manifest.config).quantization
        quantization = quantization or BlockQuantization()
    return dataclasses.replace(reader.config, quantization=quantization, dtype="bfloat16")


def _hf_config(published: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The source's config.json, but for the form of the weights."""
    out = {k: v for k, v in published.items() if k not in ("quantization_config", "dtype")}
    if config.quantization is not None:
        out["quantization_config"] = config.to_hf()["quantization_config"]
    return out | {"torch_dtype": config.dtype}


def _new_shards(reader: StoreReader, config: ModelConfig) -> list[Shard]:
    """Tensors in the order data flows, a new file when one is full; scales with their weights."""
    table, repeats = tensor_table(config), copies(config)
    suffix = config.quantization.scale_suffix if config.quantization is not None else "."
    groups: list[Table] = [{}]
    for name, spec in table.items():
        if name in repeats and name not in reader.manifest.source:
            continue
        full = sum(s.nbytes for s in groups[-1].values()) + spec.nbytes > _SHARD_BYTES
        if full and groups[-1] and not name.endswith(suffix):
            groups.append({})
        groups[-1][name] = spec

    def parts(group: Table) -> Iterator[np.ndarray]:
        for name in group:
            if not name.endswith(suffix):
                scaled = name + suffix in group
                yield from _recoded(reader, repeats.get(name, name), config, group[name], scaled)

    return [
        Shard(
            f"model-{i:05d}-of-{len(groups):05d}.safetensors",
            header_of(group),
            tuple(group),
            sum(spec.nbytes for spec in group.values()),
            functools.partial(parts, group),
        )
        for i, group in enumerate(groups, 1)
    ]


def _recoded(
    reader: StoreReader, name: str, config: ModelConfig, spec: TensorSpec, scaled: bool
) -> Iterator[np.ndarray]:
    """The tensor in pieces, then its scales if the form has some."""
    held, tensors = reader.config.quantization, reader.manifest.tensors
    scale_name = "" if held is None else name + held.scale_suffix
    if scaled and scale_name in reader and held == config.quantization:
        for key in (name, scale_name):
            yield from _checked(key, reader[key], tensors[key].hash)
        return
    scales = None
    if scale_name in reader:
        scale = reader[scale_name]
        scales = np.concatenate([*_checked(scale_name, scale, tensors[scale_name].hash)])
    forms = Forms(held, config.quantization if scaled else None, NUMPY[spec.dtype])
    first, made = 0, []
    for values in _checked(name, reader[name], tensors[name].hash, forms.rows):
        part, new = recode(values, scales, first, forms)
        first += len(values) if values.shape else 1
        made += [] if new is None else [new]
        yield part
    yield from made


# ---- writing -------------------------------------------------------------------------------------


def _write(directory: Path, shard: Shard, progress: Progress) -> None:
    path = directory / shard.name
    if path.is_file():
        progress(shard.bytes)
        return
    with atomic_file(path) as file:
        file.write(len(shard.header).to_bytes(8, "little") + shard.header)
        for part in shard.parts():
            file.write(as_bytes(part))
            progress(part.nbytes)
        written = file.tell() - 8 - len(shard.header)
        if written != shard.bytes:
            raise ValueError(
                f"{shard.name}: the store is damaged: expected {shard.bytes:,} bytes of tensors, "
                f"got {written:,}"
            )


def _json(content: object) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()

"""Export of a store as a Hugging Face directory: the source's exact files, or new ones."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from dsv3_jax.checkpoint.arrays import (
    Arrays,
    LazyArray,
    Progress,
    as_bytes,
    ignore_progress,
    pieces,
    run_in_threads,
)
from dsv3_jax.checkpoint.check import check_tensors, without_plain_modules
from dsv3_jax.checkpoint.formats import Recoding, recode
from dsv3_jax.checkpoint.kinds import check_new, new_directory, partial_directory
from dsv3_jax.checkpoint.manifest import (
    HEADERS,
    NAME,
    UNUSED,
    small_file_hashes,
)
from dsv3_jax.checkpoint.reader import (
    INDEX,
    NUMPY,
    SafetensorsFile,
    header_of,
    index_content,
    json_text,
    parsed_header,
    shard_name,
)
from dsv3_jax.checkpoint.store import StoreReader
from dsv3_jax.checkpoint.tensor_table import (
    UNUSED_SUFFIXES,
    Table,
    TensorSpec,
    copies,
    tensor_table,
)
from dsv3_jax.config import ModelConfig
from dsv3_jax.field_checks import check_choice
from dsv3_jax.files import atomic_file, atomic_write, check_free
from dsv3_jax.quantization import BlockQuantization
from dsv3_jax.tokenizer_files import with_required_bos
from dsv3_jax.words import os_error_message

Target = Literal["fp8", "bf16"]

_SHARD_BYTES = 4_300_000_000


class Shard(NamedTuple):
    """A safetensors file that an export will write."""

    name: str
    header: bytes  # JSON header, without its length
    tensors: tuple[str, ...]  # names of its tensors, in the order of their bytes
    bytes: int  # size of the data after the header
    read: Callable[[], Iterator[np.ndarray]]  # reads the data from the store, piece by piece


class ExportPlan(NamedTuple):
    """Files that an export will write."""

    verbatim: bool  # whether they are the exact files of the source
    shards: list[Shard]  # files with tensors
    small_files: dict[str, bytes]  # content of the other files, by name
    identity: str  # XXH3 hash of the store's manifest

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(shard.bytes for shard in self.shards)


def export(
    store: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    to: Target | None = None,
    *,
    workers: int = 2,
    progress: Progress | None = None,
) -> ExportPlan:
    """Writes a store as a Hugging Face directory, which transformers and other programs load.

    If the store has every byte of its source, and ``to`` does not request another form, the files
    are identical to those of the source. Otherwise tokenizer.json adds BOS itself where the
    tokenizer's configuration requires BOS. Files are written to a temporary directory, which is
    renamed to ``directory`` when it is complete. An interrupted export keeps its finished shards
    for the next one. The store is only read. File names in the store cannot lead out of
    ``directory``.

    Args:
      directory: new directory. It must not exist.
      to: float8 with block scales, or bfloat16. None keeps the form of the store, except that
        integers become bfloat16.
      workers: number of shards to write at once.
      progress: called from several threads with numbers of written bytes.

    Returns:
      The plan that was carried out.

    Raises:
      ValueError: the store is incomplete or damaged, the directory exists or another process is
        writing it, or the disk has too little space or failed.
    """
    destination = Path(directory)
    if workers < 1:
        raise ValueError(f"workers: expected at least 1, got {workers}")
    check_new(destination)
    if Path(store).resolve() in destination.resolve().parents:
        raise ValueError(f"{destination}: expected a directory outside of the store {store}")
    planned = plan_export(StoreReader(Path(store)), to)
    check_space(planned, destination)
    report = progress or ignore_progress
    try:
        with new_directory(destination, {"store": planned.identity, "to": to}) as partial:
            run_in_threads(workers, lambda shard: _write(partial, shard, report), planned.shards)
            for name, content in planned.small_files.items():
                atomic_write(partial / name, content)
    except OSError as error:
        raise ValueError(f"{os_error_message(error)}; {resume_hint(destination)}") from None
    return planned


def check_space(planned: ExportPlan, destination: Path) -> None:
    """Checks that an export fits on the disk. Files of an interrupted export are either continued
    with or deleted."""
    partial = partial_directory(destination)
    written = sum(path.stat().st_size for path in partial.glob("*")) if partial.is_dir() else 0
    needed = sum(8 + len(shard.header) + shard.bytes for shard in planned.shards)
    check_free(destination, needed + sum(map(len, planned.small_files.values())) - written)


def resume_hint(directory: Path) -> str:
    """Returns the end of the error message of an interrupted export: what can be resumed."""
    partial = partial_directory(directory)
    if not partial.is_dir():
        return "nothing was written"
    return f"finished shards are kept in {partial}; the same command continues with them"


def plan_export(reader: StoreReader, to: Target | None) -> ExportPlan:
    """Plans the export of a store from its headers and small files. Raises ValueError if ``to`` is
    unknown, a small file or a tensor is missing or damaged, or a name is not one that a conversion
    writes."""
    if to is not None:
        check_choice("to", to, ("fp8", "bf16"))
    manifest, folder = reader.manifest, reader.source
    hashes = small_file_hashes(reader.directory)
    if bad := sorted(n for n in {*hashes, *manifest.kept} if hashes.get(n) != manifest.kept.get(n)):
        raise ValueError(f"{folder / bad[0]}: missing, unknown or damaged")
    names = [n for n in manifest.kept if "/" not in n and n != UNUSED]
    if clash := sorted(set(names) & set(manifest.files)):
        raise ValueError(f"{reader.directory / NAME}: {clash[0]} is both a kept file and a shard")
    small_files = {name: (folder / name).read_bytes() for name in names}
    identity = xxhash.xxh3_128_hexdigest((reader.directory / NAME).read_bytes())
    form = "fp8" if isinstance(reader.config.quantization, BlockQuantization) else "bf16"
    if to in (None, form) and _has_all_source_bytes(reader):
        return ExportPlan(True, _source_shards(reader), small_files, identity)
    check_tensors(reader.config, reader)
    config, hf_config = _configs(reader, to or form)
    shards = _new_shards(reader, config)
    index = index_content(
        {shard.name: shard.tensors for shard in shards}, sum(shard.bytes for shard in shards)
    )
    if "tokenizer.json" in names and (content := with_required_bos(folder)) is not None:
        small_files["tokenizer.json"] = content.encode()
    small_files[INDEX] = json_text(index).encode()
    small_files["config.json"] = json_text(hf_config).encode()
    return ExportPlan(False, shards, small_files, identity)


def _has_all_source_bytes(reader: StoreReader) -> bool:
    """Returns whether every tensor of the source is in the store with the same bytes."""
    originals = copies(reader.config)
    return all(
        name.endswith(UNUSED_SUFFIXES)
        or (
            (stored := reader.manifest.tensors.get(originals.get(name, name))) is not None
            and stored[:3] == source[:3]
        )  # dtype, shape and hash
        for name, source in reader.manifest.source.items()
    )


# ---- the exact files of the source ---------------------------------------------------------------


def _source_shards(reader: StoreReader) -> list[Shard]:
    originals, records = copies(reader.config), reader.manifest.source
    unused: Arrays = {}
    if (path := reader.source / UNUSED).is_file():
        unused = SafetensorsFile(path)

    def read(names: tuple[str, ...]) -> Iterator[np.ndarray]:
        for name in names:
            array = unused[name] if name in unused else reader[originals.get(name, name)]
            yield from _verified_pieces(name, array, records[name].hash)

    shards = []
    for name, file in reader.manifest.files.items():
        path = reader.source / HEADERS / name
        header = path.read_bytes()
        entries = parsed_header(path, header)
        tensors = tuple(sorted(entries, key=lambda name: entries[name]["data_offsets"]))
        for tensor in tensors:
            is_stored = tensor in unused or originals.get(tensor, tensor) in reader
            form = entries[tensor]["dtype"], entries[tensor]["shape"]
            if not is_stored or tensor not in records or form != records[tensor][:2]:
                raise ValueError(f"{path}: {tensor}: not the tensor that the manifest has")
        size = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        if file.bytes != 8 + len(header) + size:
            raise ValueError(
                f"{path}: expected a header of {file.bytes:,} bytes in all, as the manifest has, "
                f"got one of {8 + len(header) + size:,}"
            )
        shards.append(Shard(name, header, tensors, size, functools.partial(read, tensors)))
    return shards


def _verified_pieces(
    name: str, array: LazyArray, expected: str, multiple: int = 128
) -> Iterator[np.ndarray]:
    """Yields an array in pieces. Raises ValueError at the end if their hash is not ``expected``."""
    hasher = xxhash.xxh3_128()
    for rows in pieces(array.shape, multiple):
        piece = array[rows] if array.shape else array[...]
        hasher.update(as_bytes(piece))
        yield piece
    if hasher.hexdigest() != expected:
        raise ValueError(f"{name}: the store is damaged; expected the hash {expected}")


# ---- new files -----------------------------------------------------------------------------------


def _configs(reader: StoreReader, to: Target) -> tuple[ModelConfig, dict[str, Any]]:
    """Returns the config of the new files, and the source's config.json changed to it."""
    published, quantization = reader.manifest.config, None
    if to == "fp8":
        quantization = reader.config.quantization
        if not isinstance(quantization, BlockQuantization):
            source = without_plain_modules(ModelConfig.from_hf(published))
            quantization = source.quantization or BlockQuantization()
    config = dataclasses.replace(reader.config, quantization=quantization, dtype="bfloat16")
    content = {k: v for k, v in published.items() if k not in ("quantization_config", "dtype")}
    if quantization is not None:
        content["quantization_config"] = config.to_hf()["quantization_config"]
    return config, content | {"torch_dtype": config.dtype}


def _new_shards(reader: StoreReader, config: ModelConfig) -> list[Shard]:
    """Distributes the tensors over files in the order data flows, and keeps scales with weights."""
    table, originals = tensor_table(config), copies(config)
    suffix = config.quantization.scale_suffix if config.quantization is not None else "."
    groups: list[Table] = [{}]
    for name, spec in table.items():
        if name in originals and name not in reader.manifest.source:
            continue
        is_full = sum(s.nbytes for s in groups[-1].values()) + spec.nbytes > _SHARD_BYTES
        if is_full and groups[-1] and not name.endswith(suffix):
            groups.append({})
        groups[-1][name] = spec

    def read(group: Table) -> Iterator[np.ndarray]:
        for name in group:
            if not name.endswith(suffix):
                quantized = name + suffix in group
                original = originals.get(name, name)
                yield from _recoded(reader, original, config, group[name], quantized)

    return [
        Shard(
            shard_name(number, len(groups)),
            header_of(group),
            tuple(group),
            sum(spec.nbytes for spec in group.values()),
            functools.partial(read, group),
        )
        for number, group in enumerate(groups, 1)
    ]


def _recoded(
    reader: StoreReader, name: str, config: ModelConfig, spec: TensorSpec, quantized: bool
) -> Iterator[np.ndarray]:
    """Yields a tensor of the store in the target's form, in pieces, followed by its scales."""
    stored_form, records = reader.config.quantization, reader.manifest.tensors
    scale_name = "" if stored_form is None else name + stored_form.scale_suffix
    if quantized and scale_name in reader and stored_form == config.quantization:
        for key in (name, scale_name):
            yield from _verified_pieces(key, reader[key], records[key].hash)
        return
    scale = None
    if scale_name in reader:
        hash = records[scale_name].hash
        scale = np.concatenate([*_verified_pieces(scale_name, reader[scale_name], hash)])
    recoding = Recoding(stored_form, config.quantization if quantized else None, NUMPY[spec.dtype])
    first, new_scales = 0, []
    hash = records[name].hash
    for values in _verified_pieces(name, reader[name], hash, recoding.row_multiple):
        piece, new_scale = recode(values, scale, first, recoding)
        first += len(values) if values.shape else 1
        new_scales += [] if new_scale is None else [new_scale]
        yield piece
    yield from new_scales


# ---- writing -------------------------------------------------------------------------------------


def _write(directory: Path, shard: Shard, progress: Progress) -> None:
    """Writes a shard, unless an earlier export has finished it."""
    path = directory / shard.name
    if path.is_file():
        progress(shard.bytes)
        return
    with atomic_file(path) as file:
        file.write(len(shard.header).to_bytes(8, "little") + shard.header)
        for piece in shard.read():
            file.write(as_bytes(piece))
            progress(piece.nbytes)
        written = file.tell() - 8 - len(shard.header)
        if written != shard.bytes:
            raise ValueError(
                f"{shard.name}: the store is damaged: expected {shard.bytes:,} bytes of tensors, "
                f"got {written:,}"
            )

"""Creation of a store's array tree by orbax, before any values are written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import tensorstore as ts
from absl import logging
from etils import epath
from orbax.checkpoint import type_handlers

from dsv3_jax.checkpoint.store import failure
from dsv3_jax.checkpoint.stored_arrays import StoredArray


def create(directory: Path, arrays: Iterable[StoredArray]) -> None:
    """Writes the tree and the header of every array, without chunks.

    In an existing tree, files that are missing or different are replaced.
    """
    fresh = directory.with_name(directory.name + ".tree")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    verbosity = logging.get_verbosity()
    # orbax warns about the custom handler, and that there is nothing to merge.
    logging.set_verbosity(logging.FATAL)
    try:
        registry = type_handlers.create_type_handler_registry((StoredArray, _Headers()))
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=True, type_handler_registry=registry
        )
        handler.save(epath.Path(fresh), args=ocp.args.PyTreeSave(_tree(arrays)))
        handler.finalize(epath.Path(fresh))
    except Exception as error:  # the writers raise many types
        raise failure(directory, error) from None
    finally:
        logging.set_verbosity(verbosity)
    if not directory.exists():
        fresh.rename(directory)
        return
    for new in fresh.rglob("*"):
        old = directory / new.relative_to(fresh)
        if new.is_file() and not (old.is_file() and old.read_bytes() == new.read_bytes()):
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)
    shutil.rmtree(fresh)


class _Headers(type_handlers.TypeHandler):
    """Makes orbax write only the headers of arrays. Their chunks are written later."""

    def typestr(self) -> str:
        return "np.ndarray"  # the type that orbax restores

    async def serialize(
        self, values: Sequence[StoredArray], infos: Sequence[Any], args: Any = None
    ) -> list[Any]:
        context = ts.Context({"file_io_sync": False})
        for array, info in zip(values, infos, strict=True):
            spec = {
                "driver": "zarr3",
                "kvstore": {"driver": "file", "path": str(info.parent_dir / info.name)},
                "metadata": {
                    "shape": array.shape,
                    "data_type": array.dtype.name,
                    "chunk_grid": {
                        "name": "regular",
                        "configuration": {"chunk_shape": array.chunk},
                    },
                    "codecs": [
                        {
                            "name": "sharding_indexed",
                            "configuration": {
                                "chunk_shape": array.inner,
                                "codecs": [{"name": "bytes"}],
                                "index_codecs": [{"name": "bytes"}, {"name": "crc32c"}],
                            },
                        }
                    ],
                },
            }
            await ts.open(spec, create=True, context=context)
        return []

    async def metadata(self, infos: Sequence[Any]) -> Any:
        raise NotImplementedError

    async def deserialize(self, infos: Sequence[Any], args: Any = None) -> Any:
        raise NotImplementedError


def _tree(arrays: Iterable[StoredArray]) -> dict[str, Any]:
    """Returns the arrays in nested dictionaries, by the keys in their names."""
    tree: dict[str, Any] = {}
    for array in arrays:
        *keys, last = array.name.split(".")
        node = tree
        for key in keys:
            node = node.setdefault(key, {})
        node[last] = array
    return tree

"""The index of a sharded checkpoint, and the JSON files next to it, as Hugging Face writes them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

DESCRIPTION_BYTES = 400
"""Upper bound of what the index and the header of a file take for one tensor."""


def shard_name(number: int, count: int) -> str:
    """Returns the file name of shard ``number``, counted from 1, out of ``count``."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def index_content(shards: Mapping[str, Iterable[str]], total_size: int) -> dict[str, Any]:
    """Returns the content of the index.

    Args:
      shards: names of the tensors in each file.
      total_size: size of all tensors in bytes.
    """
    weight_map = {tensor: file for file, tensors in shards.items() for tensor in tensors}
    return {"metadata": {"total_size": total_size}, "weight_map": weight_map}


def json_text(content: object) -> str:
    """Formats the content of config.json or of an index."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"

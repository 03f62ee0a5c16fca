"""DeepSeek-V3/R1 in JAX: load a published checkpoint, run it, generate from it.

Names are imported on first use, so that ``import dsv3_jax`` does not wait for JAX.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dsv3_jax import own_packages

if TYPE_CHECKING:
    from dsv3_jax import distributed, presets
    from dsv3_jax.checkpoint.load import load
    from dsv3_jax.config import ModelConfig
    from dsv3_jax.engine import Engine
    from dsv3_jax.model import DeepSeekV3
    from dsv3_jax.offline.generator import Generator
    from dsv3_jax.tokenizer import Tokenizer

__version__ = "0.2.0"

__all__ = [
    "DeepSeekV3",
    "Engine",
    "Generator",
    "ModelConfig",
    "Tokenizer",
    "distributed",
    "load",
    "presets",
]

# Module that defines each name; None for a submodule of this package.
_MODULES = {
    "DeepSeekV3": "dsv3_jax.model",
    "Engine": "dsv3_jax.engine",
    "Generator": "dsv3_jax.offline.generator",
    "ModelConfig": "dsv3_jax.config",
    "Tokenizer": "dsv3_jax.tokenizer",
    "distributed": None,
    "load": "dsv3_jax.checkpoint.load",
    "presets": None,
}

own_packages.check()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    if module is None:
        return importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(importlib.import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

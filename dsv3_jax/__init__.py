"""DeepSeek-V3/R1 in JAX: load a published checkpoint, run it, generate from it."""

from dsv3_jax import distributed, presets
from dsv3_jax.checkpoint.load import load
from dsv3_jax.config import ModelConfig
from dsv3_jax.generation.generator import Generator
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "DeepSeekV3",
    "Generator",
    "ModelConfig",
    "Tokenizer",
    "distributed",
    "load",
    "presets",
]

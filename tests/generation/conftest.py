"""Fixtures of the generation tests: one tiny random model, one tokenizer, few Generators."""

from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import pytest
from flax import nnx

import dsv3_jax
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.offline.generator import Generator
from dsv3_jax.tokenizer import Tokenizer
from tests.generation.fragments import MAX_LEN, write_tokenizer
from tests.support.checkpoints import random_tensors, tiny_config, write_checkpoint

COMPILED = "/jax/core/compile/backend_compile_duration"  # name of a JAX monitoring event

Forward = Callable[[Sequence[int]], np.ndarray]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> DeepSeekV3:
    """A model with random weights and activations of order one, so that its tokens vary."""
    directory = tmp_path_factory.mktemp("tiny")
    config = tiny_config(num_hidden_layers=2, num_nextn_predict_layers=0)  # one dense, one MoE
    write_checkpoint(directory, config, random_tensors(config))
    model, tokenizer = dsv3_jax.load(directory)
    assert tokenizer is None
    return model


@pytest.fixture(scope="session")
def dense(tmp_path_factory) -> DeepSeekV3:
    """A model of one layer without experts, for tests that compile their own programs."""
    directory = tmp_path_factory.mktemp("dense")
    config = tiny_config(num_hidden_layers=1, num_nextn_predict_layers=0)
    write_checkpoint(directory, config, random_tensors(config))
    return dsv3_jax.load(directory)[0]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    """A tokenizer of 152 tokens, for an embedding of 160 rows. See fragments.py."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def generator(tiny, tokenizer) -> Generator:
    """A Generator with one batch size, 4."""
    return Generator(tiny, tokenizer, MAX_LEN, batch_sizes=(4,), prefill_chunk=4)


@pytest.fixture(scope="session")
def bare(tiny) -> Generator:
    """A Generator without a tokenizer."""
    return Generator(tiny, None, MAX_LEN, batch_sizes=(4,), prefill_chunk=16)


@pytest.fixture(scope="session")
def ladder(tiny, tokenizer) -> Generator:
    """A Generator with batch sizes 1 and 2, whose prefill chunk is longer than any prompt."""
    return Generator(tiny, tokenizer, MAX_LEN, batch_sizes=(2, 1), prefill_chunk=2 * MAX_LEN)


@pytest.fixture(scope="session")
def demo() -> Generator:
    model, tokenizer = dsv3_jax.load("demo", mtp=False)
    return Generator(model, tokenizer, 160, batch_sizes=(2,))


@pytest.fixture(scope="session")
def forward(tiny) -> Forward:
    """Function from T tokens to their logits [T, W], computed without a cache."""
    graph, weights = nnx.split(tiny)
    run = jax.jit(lambda weights, tokens: nnx.merge(graph, weights)(tokens))

    def logits(tokens: Sequence[int]) -> np.ndarray:
        padded = np.zeros((1, MAX_LEN), np.int32)
        padded[0, : len(tokens)] = tokens
        return np.array(run(weights, padded))[0, : len(tokens)]

    return logits


@pytest.fixture
def compilations() -> Iterator[list[float]]:
    """Seconds of every compilation so far, including those that the compilation cache shortened."""
    seen: list[float] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == COMPILED:
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)

"""Perplexity of texts: how well a model predicts each of their tokens.

A text is read in windows. Window k has BOS and the ``length - 1`` tokens from ``k * stride`` on as
its input, and predicts ``length`` tokens. The first window scores all of its predictions, and each
later one those that no earlier window has made: the last ``stride`` ones. So every token of a text
is scored once and, except at the beginning of the text, with at least ``length - stride`` tokens
before it. The end of a text (EOS) is not scored. Without BOS, the first token of a text is not
predicted, and a window begins with the token before its first target.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from dsv3_jax import compile_cache
from dsv3_jax.compile_cache import CompileProgress
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer
from dsv3_jax.training.corpus import check_document_tokens
from dsv3_jax.training.cross_entropy import token_nats

LOGITS_BYTES = 64 << 20
"""Bytes of logits at a time: 129 tokens of DeepSeek-V3's vocabulary."""

_SHORTEST = 16  # windows are padded to a power of two from this on, so that few lengths compile


@dataclasses.dataclass(frozen=True)
class WindowSettings:
    """Settings by which texts are cut into windows, and read by a model.

    Raises:
      ValueError: a number is out of range. The message has its name.
    """

    length: int = 1024
    """Tokens per window."""
    stride: int | None = None
    """Tokens from one window of a text to the next. A smaller one gives tokens more context, and
    takes more work. None is ``length``, which reads every token once."""
    batch: int = 8
    """Windows per forward pass."""
    cached: int | None = None
    """Number of tokens per step with which windows are read through the KV cache, in the absorbed
    form of attention that decoding uses; 1 is decoding itself. None reads whole windows without a
    cache."""

    def __post_init__(self) -> None:
        for name, least in {"length": 2, "batch": 1, "cached": 1, "stride": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}: expected at least {least}, got {value}")
        if self.stride is not None and self.stride > self.length:
            raise ValueError(
                f"stride: expected at most length, {self.length}, got {self.stride}; it would leave"
                " tokens out"
            )


class Text(NamedTuple):
    """One encoded document."""

    name: str
    ids: Int32[np.ndarray, " N"]
    """Its tokens, without BOS and EOS."""
    num_bytes: int
    """Length in UTF-8 of what is scored of it."""


class Window(NamedTuple):
    """A part of a text that the model reads at once."""

    text: int
    """Index of the text."""
    start: int
    """Number of the first target among the text's targets."""
    size: int
    """Number of targets."""
    scored: int
    """Number of targets at the end that are scored."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Result for all texts together."""

    documents: int
    num_bytes: int
    tokens: int
    """Number of scored tokens."""
    nats: float
    """Sum of ``-log p`` of the scored tokens."""

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """``exp(nats_per_token)``, or infinity where it overflows."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Information per byte of text, which does not depend on the tokenizer."""
        return self.nats / math.log(2) / self.num_bytes


class Evaluator:
    """Measures the perplexity of a model on texts, batch by batch.

    Args:
      model: runs on its layout's devices, if it has one.
      texts: from :func:`encode_texts`.

    Attributes:
      batch_tokens: number of scored tokens in each batch.

    Raises:
      ValueError: ``length`` exceeds what the model takes, or no text has a token to score.
    """

    def __init__(self, model: DeepSeekV3, texts: Sequence[Text], settings: WindowSettings):
        compile_cache.enable()
        longest = model.config.max_position_embeddings
        if settings.length > longest:
            raise ValueError(
                f"length: expected at most {longest} (max_position_embeddings), got"
                f" {settings.length}"
            )
        self._texts, self._bos = texts, model.config.bos_token_id
        multiple = 1 if model.layout is None else model.layout.batch_multiple
        self._rows = -(-settings.batch // multiple) * multiple
        self._batches = list(_batches(self._windows(settings), settings, self._rows))
        self.batch_tokens = [sum(w.scored for w in batch) for _, batch in self._batches]
        if not self.batch_tokens:
            raise ValueError("data: expected text with a token to predict, got none")
        if settings.cached is not None:
            model = model.precompute_for_decode()
        graph, self._state = nnx.split(model)
        read = _whole_windows if settings.cached is None else _through_cache(settings.cached)

        @jax.jit
        def nats_of(state: Any, inputs: Int[Array, "B T"], targets: Int[Array, "B T"]):
            return read(nnx.merge(graph, state), inputs, targets)

        self._nats_of = nats_of
        self._compiled: set[tuple[int, ...]] = set()

    def nats(self, index: int) -> float:
        """Returns the sum of ``-log p`` over the scored tokens of one batch.

        Raises:
          ValueError: it is not finite. The message names a text of the batch.
        """
        inputs, targets, is_scored = self._arrays(*self._batches[index])
        is_compiled = inputs.shape in self._compiled
        with contextlib.nullcontext() if is_compiled else CompileProgress(1):
            values = self._nats_of(self._state, jnp.asarray(inputs), jnp.asarray(targets))
        self._compiled.add(inputs.shape)
        total = float(np.sum(np.asarray(values, np.float64), where=is_scored))
        if not math.isfinite(total):
            first = self._texts[self._batches[index][1][0].text]
            raise ValueError(
                f"data: {first.name}: expected finite logits for it and the windows of its batch,"
                f" got {total} nats"
            )
        return total

    def result(self, nats: float) -> Perplexity:
        """Returns the result from the sum of all batches."""
        num_bytes = sum(text.num_bytes for text in self._texts)
        return Perplexity(len(self._texts), num_bytes, sum(self.batch_tokens), nats)

    def _windows(self, settings: WindowSettings) -> Iterator[Window]:
        stride = settings.stride or settings.length
        for index, text in enumerate(self._texts):
            targets, end = len(text.ids) - (self._bos is None), 0
            for start in range(0, targets, stride):
                before, end = end, min(start + settings.length, targets)
                yield Window(index, start, end - start, end - before)
                if end == targets:
                    break

    def _arrays(
        self, width: int, windows: Sequence[Window]
    ) -> tuple[Int32[np.ndarray, "B T"], Int32[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """Returns inputs, targets, and which targets are scored. Padding is token 0."""
        inputs, targets = np.zeros((2, self._rows, width), np.int32)
        is_scored = np.zeros(inputs.shape, bool)
        for row, (text, start, size, scored) in enumerate(windows):
            ids = self._texts[text].ids
            if self._bos is None:
                inputs[row, :size] = ids[start : start + size]
                targets[row, :size] = ids[start + 1 : start + 1 + size]
            else:
                inputs[row, 0] = self._bos
                inputs[row, 1:size] = ids[start : start + size - 1]
                targets[row, :size] = ids[start : start + size]
            is_scored[row, size - scored : size] = True
        return inputs, targets, is_scored


def encode_texts(
    documents: Sequence[tuple[str, str]], tokenizer: Tokenizer, bos: int | None
) -> list[Text]:
    """Encodes (name, text) pairs, on all cores. A control token in a text is encoded as plain
    text.

    Raises:
      ValueError: ``bos`` is not the tokenizer's.
    """
    check_document_tokens(tokenizer, bos, None)

    def encode(document: tuple[str, str]) -> Text:
        name, text = document
        ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
        num_bytes = len(text.encode())
        if bos is None and len(ids):  # its first token is not predicted
            num_bytes -= len(tokenizer.decode([int(ids[0])]).encode())
        return Text(name, ids, num_bytes)

    with ThreadPoolExecutor() as pool:
        return list(pool.map(encode, documents))


def perplexity(
    model: DeepSeekV3,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    settings: WindowSettings | None = None,
) -> Perplexity:
    """Returns the perplexity of a model on some texts.

        perplexity(model, tokenizer, ["import os"]).nats_per_token

    Raises:
      ValueError: as :class:`Evaluator`.
    """
    documents = [(f"text {i}", text) for i, text in enumerate(texts)]
    encoded = encode_texts(documents, tokenizer, model.config.bos_token_id)
    evaluator = Evaluator(model, encoded, settings or WindowSettings())
    return evaluator.result(sum(map(evaluator.nats, range(len(evaluator.batch_tokens)))))


def _batches(
    windows: Iterator[Window], settings: WindowSettings, rows: int
) -> Iterator[tuple[int, list[Window]]]:
    """Yields batches of windows of similar lengths, longest first, and their padded length."""
    by_width: dict[int, list[Window]] = {}
    for window in windows:
        width = min(max(_SHORTEST, 1 << (window.size - 1).bit_length()), settings.length)
        step = settings.cached or 1
        by_width.setdefault(-(-width // step) * step, []).append(window)
    for width, group in sorted(by_width.items(), reverse=True):
        for first in range(0, len(group), rows):
            yield width, group[first : first + rows]


def _whole_windows(
    model: DeepSeekV3, inputs: Int[Array, "B T"], targets: Int[Array, "B T"]
) -> Float32[Array, "B T"]:
    states = model.hidden_states(inputs, mtp=False)
    return _nats(model, states.main.post_norm, targets)


def _through_cache(
    step: int,
) -> Callable[[DeepSeekV3, Int[Array, "B T"], Int[Array, "B T"]], Float32[Array, "B T"]]:
    """Returns a function that reads windows through the cache, ``step`` tokens at a time."""

    def read(
        model: DeepSeekV3, inputs: Int[Array, "B T"], targets: Int[Array, "B T"]
    ) -> Float32[Array, "B T"]:
        B, T = inputs.shape
        cache = LatentKVCache.init(model.cache_spec(), B, T, layout=model.layout)

        def split(x: Int[Array, "B T"]) -> Int[Array, "steps B step"]:
            return jnp.moveaxis(x.reshape(B, T // step, step), 1, 0)

        def extend(cache: LatentKVCache, arrays: Any) -> tuple[LatentKVCache, jax.Array]:
            tokens, next_tokens = arrays
            counts = jnp.full((B,), step, jnp.int32)
            hidden, cache = model.extend(tokens, counts, cache, "absorbed")
            return cache, _nats(model, hidden.post_norm, next_tokens)

        _, nats = jax.lax.scan(extend, cache, (split(inputs), split(targets)))
        return jnp.moveaxis(nats, 0, 1).reshape(B, T)

    return read


def _nats(
    model: DeepSeekV3, hidden: Float[Array, "B T D"], targets: Int[Array, "B T"]
) -> Float32[Array, "B T"]:
    """Returns ``-log p`` of each target."""
    vocabulary = model.config.vocab_size
    return token_nats(model.logits, hidden, targets, vocabulary, LOGITS_BYTES)

"""The sizes that programs are compiled for, and which of them a step takes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

from dsv3_jax.engine.step_input import StepShape
from dsv3_jax.generation.sampling import SamplingMode
from dsv3_jax.generation.settings import MAX_TOP_LOGPROBS


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Sizes that programs are compiled for. A step takes the smallest one that holds it.

    On a mesh with data-parallel attention, numbers are those of each shard: all shards run the
    size that the fullest one needs.
    """

    decodes: tuple[int, ...]
    """Numbers of decoding requests, ascending. The last one is at least the number of slots."""
    chunks: tuple[int, ...]
    """Numbers of prefill chunks, ascending, without 0."""
    chunk_tokens: int
    """Tokens of a chunk."""
    max_steps: int
    """Most decode steps in a dispatch that prefills nothing."""
    contexts: tuple[int, ...] | None = None
    """Numbers of cached tokens before a chunk, ascending. Those of up to half the longest request
    are used, and the longest request. None compiles a loop that ends with the last cached token."""
    single_steps: bool = False
    """Whether a large step that prefills nothing has a program without the loop over decode steps,
    besides the one with it."""
    single_shape: bool = False
    """Whether every step runs the program of the largest sizes, with both parts even if one is
    empty, and with every option that a request can ask for."""

    @classmethod
    def default(cls, max_running: int, *, platform: str, multiple: int = 1) -> Buckets:
        """Returns powers of eight up to ``max_running``, and one, two, four and eight chunks.

        A chunk has 256 tokens. On a CPU, where padding costs more than another step, it has 32, and
        the numbers of decoding requests are powers of four from 1 on. XLA's GPU runtime waits for
        the device to read how often a loop runs, so that programs for GPUs have no such loop where
        they can.

        Args:
          max_running: number of slots of each shard.
          multiple: number of micro-batches. Sizes are rounded up to multiples of it.
        """
        base, first, chunk_tokens = (4, 0, 32) if platform == "cpu" else (8, 1, 256)
        decodes = (*(base**i for i in range(first, 8) if base**i < max_running), max_running)
        is_gpu = platform == "gpu"
        contexts = (0, 1024, 4096, 16384, 65536) if is_gpu else None
        decodes, chunks = (
            tuple(sorted({-(-size // multiple) * multiple for size in sizes}))
            for sizes in (decodes, (1, 2, 4, 8))
        )
        return cls(decodes, chunks, chunk_tokens, 8, contexts, single_steps=is_gpu)

    def check(self, max_running: int, multiple: int) -> None:
        """Raises ValueError unless the sizes hold ``max_running`` requests on each shard and are
        multiples of ``multiple``, the number of micro-batches."""
        if self.decodes[-1] < max_running:
            raise ValueError(
                f"buckets: expected at least {max_running} decodes, the slots of a shard, got"
                f" {self.decodes[-1]}"
            )
        for name in ("decodes", "chunks"):
            if any(size % multiple for size in getattr(self, name)):
                raise ValueError(
                    f"buckets: expected {name} that are multiples of {multiple} micro-batches, got"
                    f" {getattr(self, name)}"
                )

    def single(self) -> Buckets:
        """Returns the buckets with one shape for every step: all slots and the fewest chunks."""
        return dataclasses.replace(
            self,
            decodes=self.decodes[-1:],
            chunks=self.chunks[:1],
            max_steps=1,
            contexts=None,
            single_steps=False,
            single_shape=True,
        )

    @property
    def large_decodes(self) -> tuple[int, ...]:
        """Numbers of decoding requests in a step that prefills: those of at least as many tokens as
        a chunk. Padding fewer to that costs little compared with the chunk, and saves programs."""
        return tuple(size for size in self.decodes if size >= self.chunk_tokens) or (
            self.decodes[-1],
        )

    @property
    def sampled_chunks(self) -> tuple[int, ...]:
        """Numbers of chunks in a step that samples: every second one, which saves programs. There,
        sorting the vocabulary takes longer than the padding."""
        return self.chunks[::-1][::2][::-1]

    def shape(
        self,
        decodes: int,
        chunks: int,
        *,
        max_len: int,
        max_pages: int,
        context: int = 0,
        steps: int = 1,
        sampling: SamplingMode = "greedy",
        num_top_logprobs: int = 0,
        shards: int = 1,
    ) -> StepShape:
        """Returns the smallest shape that holds a step.

        Args:
          max_len: most tokens of a request.
          max_pages: most pages of a request.
          context: most cached tokens before one of the chunks.
          steps: decode steps of the dispatch.
          shards: number of data-parallel shards.
        """
        if self.single_shape:
            decodes, chunks = self.decodes[-1], self.chunks[-1]
            sampling, num_top_logprobs = "sampled", MAX_TOP_LOGPROBS
        chunk_sizes = self.chunks if sampling == "greedy" else self.sampled_chunks
        B = _round_up(decodes, self.large_decodes if chunks else self.decodes)
        is_single = steps == 1 and self.single_steps and B in self.large_decodes
        return StepShape(
            decodes=B,
            chunks=_round_up(chunks, chunk_sizes) if chunks else 0,
            chunk_tokens=self.chunk_tokens if chunks else 0,
            max_pages=max_pages,
            max_len=max_len,
            max_steps=1 if chunks or is_single else self.max_steps,
            context=self._context(context, max_len) if chunks else 0,
            sampling=sampling,
            num_top_logprobs=num_top_logprobs,
            shards=shards,
        )

    def shapes(self, *, max_len: int, max_pages: int, shards: int = 1) -> list[StepShape]:
        """Returns every shape that a step without top log-probabilities can have."""
        limits = {"max_len": max_len, "max_pages": max_pages, "shards": shards}
        contexts = (0,) if self.contexts is None else (*self.contexts, max_len)
        decoding = itertools.product(self.decodes, (0,), (0,), (1, self.max_steps))
        prefilling = itertools.product(self.large_decodes, self.chunks, contexts, (1,))
        shapes = [
            self.shape(B, C, context=min(S, max_len), steps=n, sampling=sampling, **limits)
            for B, C, S, n in (*decoding, *prefilling)
            for sampling in get_args(SamplingMode)
        ]
        return list(dict.fromkeys(shapes))

    def _context(self, tokens: int, max_len: int) -> int | None:
        if self.contexts is None:
            return None
        sizes = [size for size in self.contexts if 2 * size <= max_len]
        return _round_up(tokens, [*sizes, max_len])


def _round_up(size: int, sizes: tuple[int, ...] | list[int]) -> int:
    """Returns the smallest of ``sizes``, which are ascending, that is at least ``size``."""
    return next(each for each in sizes if each >= size)

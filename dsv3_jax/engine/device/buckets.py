"""The sizes that programs are compiled for, and which of them a step takes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args

from dsv3_jax.engine.device.step_input import GREEDY, StepOptions, StepShape
from dsv3_jax.generation.sampling import SamplingMode
from dsv3_jax.layers.paged_cache import Form
from pallas_kernels import target
from sharding import Layout


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
    multi_step_decodes: int | None = None
    """Largest number of decoding requests whose program has several steps; None for no limit. With
    more, a step takes long enough to launch the next one meanwhile."""
    chunk_form: Form = "expanded"
    """Form of the chunks' attention. ``absorbed`` takes more operations per cached token, but has
    no loop over the context, and pads less."""
    separate: bool = False
    """Whether a step either prefills or decodes, so that two programs compute every request."""
    single_shape: bool = False
    """Whether every step runs the program of the largest sizes, with both parts even if one is
    empty, and with every option that a request can ask for."""

    @classmethod
    def default(
        cls,
        max_running: int,
        *,
        platform: str,
        multiple: int = 1,
        is_hopper: bool = False,
        token_shards: int = 1,
        one_request: bool = False,
    ) -> Buckets:
        """Returns the sizes for a platform.

        Decoding requests come in powers of two from 8 to ``max_running`` on a GPU, whose step with
        64 requests takes a quarter longer than with 16; in powers of four on a CPU, and of eight on
        a TPU. Chunks come in powers of two up to 2,048 tokens, on a CPU up to 256.

        XLA's GPU runtime waits for the device to read how often a loop runs. Programs for GPUs
        therefore have no loop over decode steps unless these are short.

        Args:
          max_running: number of slots of each shard.
          multiple: number of micro-batches. Sizes are rounded up to multiples of it.
          is_hopper: whether these are Hopper GPUs, whose kernel takes many short sequences: chunks
            are then short, and attend in absorbed form. Elsewhere that form would gather the cached
            tokens of every few queries.
          token_shards: number of devices that share the tokens of a sequence. Several would gather
            them too.
          one_request: whether one decoding request has a size of its own. On a Hopper GPU, kernels
            for one or two tokens run most of its layers.
        """
        absorbed_chunks = is_hopper and token_shards == 1
        base, first = {"cpu": (4, 0), "gpu": (2, 3)}.get(platform, (8, 1))
        decodes = (*(base**i for i in range(first, 16) if base**i < max_running), max_running)
        chunks = (4, 8, 16, 32) if absorbed_chunks else (1, 2, 4, 8)
        decodes, chunks = (
            tuple(sorted({-(-size // multiple) * multiple for size in sizes}))
            for sizes in (decodes, chunks)
        )
        multi_step_decodes = decodes[0] if platform == "gpu" else None
        if one_request and multiple == 1:
            decodes = tuple(sorted({1, *decodes}))
        return cls(
            decodes,
            chunks,
            chunk_tokens=64 if absorbed_chunks else 32 if platform == "cpu" else 256,
            max_steps=8,
            multi_step_decodes=multi_step_decodes,
            chunk_form="absorbed" if absorbed_chunks else "expanded",
        )

    @classmethod
    def of_devices(
        cls, max_running: int, layout: Layout | None, *, one_request: bool = True
    ) -> Buckets:
        """Returns the default sizes of an engine with ``max_running`` slots on all shards of this
        layout, or on the default device. ``one_request``: as for :meth:`default`."""
        if layout is None:
            platform, shards, multiple, token_shards = target.platform(), 1, 1, 1
        else:
            platform, multiple = layout.platform or target.platform(), layout.micro_batches
            shards, token_shards = map(layout.num_shards, ("batch", "cached_tokens"))
        is_hopper = platform == "gpu" and target.compute_capability() == "9.0"
        return cls.default(
            max_running // shards,
            platform=platform,
            multiple=multiple,
            is_hopper=is_hopper,
            token_shards=token_shards,
            one_request=one_request and is_hopper and layout is None,
        )

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
            self, decodes=self.decodes[-1:], chunks=self.chunks[:1], max_steps=1, single_shape=True
        )

    @property
    def large_decodes(self) -> tuple[int, ...]:
        """Numbers of decoding requests in a step that prefills: the largest one, and then always
        the next one that is at most a quarter, down to the tokens of a chunk. Padding costs little
        compared with the chunks, and saves programs."""
        sizes = [self.decodes[-1]]
        for size in reversed(self.decodes):
            if self.chunk_tokens <= size <= sizes[-1] // 4:
                sizes.append(size)
        return tuple(reversed(sizes))

    @property
    def most_multi_step_decodes(self) -> int:
        """Most requests whose program decodes several steps in a dispatch."""
        limit = self.multi_step_decodes
        return max((size for size in self.decodes if limit is None or size <= limit), default=0)

    @property
    def sampled_chunks(self) -> tuple[int, ...]:
        """Numbers of chunks in a step that samples: every second one, which saves programs. There,
        sorting the vocabulary takes longer than the padding."""
        return self.chunks[::-1][::2][::-1]

    def shape(
        self,
        decodes: int,
        chunks: int,
        options: StepOptions = GREEDY,
        *,
        depth: int = 0,
        **sizes: int,
    ) -> StepShape:
        """Returns the smallest shape that holds a step whose requests ask for ``options``.
        ``sizes`` are fields of the shape that are the same for all steps of an engine."""
        if self.single_shape:
            decodes, chunks = self.decodes[-1], self.chunks[-1]
            options = StepOptions("sampled", True, True, True, options.prompt_logprobs)
        if chunks and options.sampling == "unfiltered":  # to save programs: prefill takes longer
            options = dataclasses.replace(options, sampling="sampled")
        chunk_sizes = self.chunks if options.sampling == "greedy" else self.sampled_chunks
        if self.separate and chunks:
            assert not decodes, "a step prefills and decodes"
            B = 0
        else:
            B = _round_up(decodes, self.large_decodes if chunks else self.decodes)
        is_multi_step = not chunks and self.most_multi_step_decodes >= B
        return StepShape(
            decodes=B,
            chunks=_round_up(chunks, chunk_sizes) if chunks else 0,
            chunk_tokens=self.chunk_tokens if chunks else 0,
            max_steps=self.max_steps if is_multi_step else 1,
            chunk_form=self.chunk_form,
            depth=depth if B else 0,
            options=options,
            **sizes,
        )

    def shapes(self, *, depth: int = 0, **sizes: int) -> list[StepShape]:
        """Returns every shape of a step whose requests ask for no more than sampling."""
        shapes = [
            self.shape(B, C, StepOptions(sampling), depth=depth, **sizes)
            for B, C in itertools.product(self.decodes, (0, *self.chunks))
            for sampling in get_args(SamplingMode)
        ]
        return list(dict.fromkeys(shapes))


def _round_up(size: int, sizes: tuple[int, ...] | list[int]) -> int:
    """Returns the smallest of ``sizes``, which are ascending, that is at least ``size``."""
    return next(each for each in sizes if each >= size)

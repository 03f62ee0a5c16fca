"""The arguments of one step, packed into a single transfer to the device.

Every array that a program takes from the host costs it tens of microseconds. A step needs about
twenty of them, so they are views into one int32 buffer, which the device cuts up again. Each begins
at a multiple of 256 bytes: XLA may pass a kernel the address of a slice instead of a copy, and
Mosaic GPU refuses other addresses.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, get_args, get_type_hints

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt32

from dsv3_jax.generation.adjustments import Adjustments, Penalties
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.sampling import Sampling, SamplingMode
from dsv3_jax.generation.settings import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MAX_TOP_LOGPROBS
from dsv3_jax.layers.paged_cache import Form


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """Options of a step that another program computes."""

    sampling: SamplingMode | None = "greedy"
    """The program serves requests of this kind. None lets the program read the temperatures."""
    top_logprobs: bool = False
    """Whether some requests ask for the most probable tokens."""
    penalties: bool = False
    """Whether some requests have penalties, biases or ``min_tokens``."""
    masks: bool = False
    """Whether some requests may not generate all tokens."""
    prompt_logprobs: bool = False
    """Whether some chunks need the log-probabilities of their tokens."""

    @classmethod
    def of(cls, requests: Iterable[Request], *, prompt_logprobs: bool = False) -> StepOptions:
        """Returns the options that serve all of these requests."""
        requests = list(requests)
        return cls(
            sampling=_sampling_mode(requests),
            top_logprobs=any(r.logprobs for r in requests),
            penalties=any(r.has_penalties for r in requests),
            masks=any(r.allowed is not None for r in requests),
            prompt_logprobs=prompt_logprobs,
        )


def _sampling_mode(requests: list[Request]) -> SamplingMode:
    sampled = [request for request in requests if request.temperature]
    if not sampled:
        return "greedy"
    return "sampled" if any(request.has_filters for request in sampled) else "unfiltered"


GREEDY = StepOptions()
"""Options of a step whose requests ask for nothing that needs another program."""


@dataclasses.dataclass(frozen=True)
class StepShape:
    """The static shape of a step. Each shape is a compiled program."""

    decodes: int
    """B of a shard: most requests that decode on it."""
    chunks: int
    """C of a shard: most prompt chunks that are prefilled on it; 0 in a step that only decodes."""
    chunk_tokens: int
    """T: tokens of a chunk, padding included."""
    max_pages: int
    """Pages of the longest request."""
    max_len: int
    """S: tokens of the longest request."""
    max_steps: int
    """Most decode steps in a dispatch; 1 in a step that prefills."""
    chunk_form: Form = "expanded"
    """Form of the chunks' attention."""
    depth: int = 0
    """Drafts of each request that decodes; 0 without a drafter."""
    shards: int = 1
    """Number of data-parallel shards."""
    mask_words: int = 0
    """Words of a mask of allowed tokens, which a step has if ``options.masks``."""
    options: StepOptions = GREEDY
    """Options that the requests of the step ask for."""

    @property
    def rows(self) -> int:
        """N = B + C of a shard: the requests that decode, then those of the chunks."""
        return self.decodes + self.chunks

    @property
    def name(self) -> str:
        """The sizes and settings that distinguish the shapes of an engine."""
        sizes = {n: getattr(self, n) for n in ("decodes", "chunks", "max_steps")}
        values = {n: v for n, v in (sizes | dataclasses.asdict(self.options)).items() if v}
        return " ".join(f"{name}={value}" for name, value in values.items())

    @property
    def num_top_logprobs(self) -> int:
        """Most probable tokens that the step reports at each position."""
        return MAX_TOP_LOGPROBS if self.options.top_logprobs else 0


class StepInput(NamedTuple):
    """Arguments of a step: of one shard on the host, of all shards on the device, where B, C and
    N = B + C are the sums over the shards.

    Slots are numbered from 0 on each shard. The number of slots of a shard, one past the last slot,
    marks unused entries.
    """

    steps: Int32[Array, " one"]
    """Number of decode steps of this dispatch."""

    decode_slots: Int32[Array, " B"]
    decode_tables: Int32[Array, "B max_pages"]
    """Block table of each request that decodes."""
    max_drafts: Int32[Array, " B"]
    """Most drafts to verify for each of them."""

    chunk_slots: Int32[Array, " C"]
    chunk_tables: Int32[Array, "C max_pages"]
    starts: Int32[Array, " C"]
    """Position of a chunk's first token."""
    counts: Int32[Array, " C"]
    """Tokens in a chunk."""
    is_last: Int32[Array, " C"]
    """1 if the chunk ends the prompt, so that the step samples the token after it."""

    admitted_slots: Int32[Array, " C"]
    """Slot that the chunk's request gets in this step; unused if it has one already. The arrays
    below describe the admitted requests."""
    prompts: Int32[Array, "C S"]
    """Tokens of the prompt, padded at the end."""
    lengths: Int32[Array, " C"]
    """Number of tokens in the prompt."""
    limits: Int32[Array, " C"]
    """Length at which the request ends."""
    temperature: Float32[Array, " C"]
    top_k: Int32[Array, " C"]
    top_p: Float32[Array, " C"]
    min_p: Float32[Array, " C"]
    seed: UInt32[Array, " C"]
    stop_tokens: Int32[Array, "C n_stop"]

    presence_penalty: Float32[Array, " N"] | None = None
    """Fields of :class:`Penalties` of all requests, from here on. None in a step without any."""
    frequency_penalty: Float32[Array, " N"] | None = None
    repetition_penalty: Float32[Array, " N"] | None = None
    prompt_lengths: Int32[Array, " N"] | None = None
    min_lengths: Int32[Array, " N"] | None = None
    bias_tokens: Int32[Array, "N n_bias"] | None = None
    biases: Float32[Array, "N n_bias"] | None = None

    allowed: UInt32[Array, "N n_words"] | None = None
    """Tokens that each request may generate now. None in a step without masks, as the next two."""
    masks_next_only: Int32[Array, " N"] | None = None
    """1 if ``allowed`` is a grammar's, which is for the next token of the request alone."""
    rewinds: Int32[Array, " B"] | None = None
    """Newest tokens of each request that decodes which its grammar has refused."""

    @property
    def penalties(self) -> Penalties | None:
        """The penalties of all requests."""
        if self.biases is None:
            return None
        fields: dict[str, Any] = {name: getattr(self, name) for name in Penalties._fields}
        return Penalties(**fields)

    @property
    def adjustments(self) -> Adjustments | None:
        """The changes to the logits of all requests."""
        if self.penalties is None and self.allowed is None:
            return None
        return Adjustments(self.penalties, self.allowed, self.masks_next_only)

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the admitted requests."""
        return Sampling(
            self.temperature, self.top_k, self.top_p, self.min_p, self.seed, self.stop_tokens
        )


class _Field(NamedTuple):
    """Location of an argument in the buffer."""

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape)


_ALIGNMENT = 64  # in int32: 256 bytes


@functools.cache
def _fields(shape: StepShape) -> dict[str, _Field]:
    """Returns the location of each argument of this shape, by the annotations of StepInput."""
    sizes = {
        "one": 1,
        "B": shape.decodes,
        "C": shape.chunks,
        "N": shape.rows,
        "S": shape.max_len,
        "max_pages": shape.max_pages,
        "n_stop": MAX_STOP_TOKENS,
        "n_bias": MAX_LOGIT_BIAS,
        "n_words": shape.mask_words,
    }
    absent = set() if shape.options.penalties else set(Penalties._fields)
    if not shape.options.masks:
        absent |= {"allowed", "masks_next_only", "rewinds"}
    fields, begin = {}, 0
    for name, annotation in get_type_hints(StepInput).items():
        if name not in absent:
            array = get_args(annotation)[0] if get_args(annotation) else annotation  # X | None
            dims = tuple(sizes[letter] for letter in array.dim_str.split())
            fields[name] = _Field(begin, dims, np.dtype(array.dtypes[0]))
            begin = -(-fields[name].end // _ALIGNMENT) * _ALIGNMENT
    return fields


def empty_input(shape: StepShape, num_slots: int) -> tuple[np.ndarray, list[StepInput]]:
    """Returns a new buffer, int32 [n], or [shards, n] for several shards of ``num_slots`` slots,
    and the arguments of each shard as writable views into it. All entries are unused."""
    fields = _fields(shape)
    buffer = np.zeros((shape.shards, max(field.end for field in fields.values())), np.int32)
    inputs = []
    for part in buffer:
        views: dict[str, Any] = {
            name: part[field.begin : field.end].view(field.dtype).reshape(field.shape)
            for name, field in fields.items()
        }
        for name in ("decode_slots", "chunk_slots", "admitted_slots"):
            views[name][...] = num_slots
        views["stop_tokens"][...] = -1
        if shape.options.penalties:
            views["repetition_penalty"][...] = 1.0
        if shape.options.masks:
            views["allowed"][...] = ~np.uint32(0)
        inputs.append(StepInput(**views))
    return buffer if shape.shards > 1 else buffer[0], inputs


def unpack(buffer: Int32[Array, "*shards n"], shape: StepShape) -> StepInput:
    """Returns the arguments in a buffer of :func:`empty_input`, on the device: those of the first
    shard, then of the second, and so on."""

    def cut(field: _Field) -> jax.Array:
        sizes = (shape.shards * field.shape[0], *field.shape[1:])
        values = buffer[..., field.begin : field.end].reshape(sizes)
        if field.dtype == np.int32:
            return values
        return jax.lax.bitcast_convert_type(values, field.dtype)

    fields: dict[str, Any] = {name: cut(field) for name, field in _fields(shape).items()}
    return StepInput(**fields)

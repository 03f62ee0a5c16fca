"""The Generator: prompts in, completions out, a few compiled programs in between."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dsv3_jax.generation.loop import decode, prefill
from dsv3_jax.generation.request import (
    Completion,
    FinishReason,
    Generation,
    Piece,
    Prompt,
    Request,
    Stats,
    check,
)
from dsv3_jax.generation.sampling import Sampling
from dsv3_jax.generation.state import RUNNING, STOPPED, DecodeState
from dsv3_jax.generation.text import TextTracker
from dsv3_jax.kv_cache import LatentKVCache
from dsv3_jax.model import DeepSeekV3
from dsv3_jax.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKENS = 8  # slots in the compiled program, the model's own end tokens among them

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Generator:
    """Generates from a model, many tokens a dispatch.

    Every shape is static: a call pads its batch to the next of ``batch_sizes`` and compiles, once,
    one prefill and one decode program for it, and one more decode program when it first asks for
    ``logprobs``. After that nothing compiles again, whatever the prompts and settings.

    A request's tokens depend on the request alone: its randomness comes from its own seed, and its
    row never mixes with others. Programs of different batch sizes may round differently, though; a
    single entry in ``batch_sizes`` rules that out too.

    Args:
      tokenizer: None takes and gives token ids only.
      max_len: most tokens a row, prompt and completion together; a static size of the cache.
      batch_sizes: batches to compile for; more prompts than the largest run in several batches.
      prefill_chunk: prompt tokens a row that go through the model at a time.
      stride: decode steps between looks at the text, for stop strings and streaming.

    Raises:
      ValueError: ``max_len`` exceeds what the model's positions reach, or a setting is wrong.
    """

    def __init__(
        self,
        model: DeepSeekV3,
        tokenizer: Tokenizer | None,
        max_len: int = 4096,
        *,
        batch_sizes: Sequence[int] = BATCH_SIZES,
        prefill_chunk: int = 128,
        stride: int = 16,
    ):
        reach = model.config.max_position_embeddings
        integer = numbers.Integral
        expected = f"2 to {reach} (max_position_embeddings)"
        check("max_len", max_len, expected, integer, 2, reach)
        if not batch_sizes:
            raise ValueError("batch_sizes: expected sizes of at least 1, got none")
        for size in batch_sizes:
            check("batch_sizes", size, "sizes of at least 1", integer, 1)
        check("prefill_chunk", prefill_chunk, "an integer of at least 1", integer, 1)
        check("stride", stride, "an integer of at least 1", integer, 1)
        self.config = model.config
        self.dtype = model.dtype
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.batch_sizes = tuple(sorted(batch_sizes))
        self.stride = stride
        vocab_size = model.config.vocab_size
        if tokenizer is not None:
            vocab_size = min(vocab_size, tokenizer.vocab_size)
        # A flat list of leaves is the cheapest argument to a jitted call: 0.4 ms for 1,500 arrays
        # where a Module takes 3.7 ms.
        graph, state = nnx.split(model)
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._graph = graph
        self._prefill = self._program(functools.partial(prefill, chunk=prefill_chunk))
        self._decode = self._program(functools.partial(decode, vocab_size=vocab_size))

    def _program(self, loop: Callable[..., DecodeState]) -> Callable[..., DecodeState]:
        def run(leaves: list[jax.Array], state: DecodeState, *args: Any) -> DecodeState:
            model = nnx.merge(self._graph, jax.tree.unflatten(self._treedef, leaves))
            return loop(model, state, *args)

        return functools.partial(jax.jit(run, donate_argnums=1), self._leaves)

    # ---- the public calls ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | Sequence[int] = 64,
        temperature: float | Sequence[float] = 0.0,
        top_p: float | Sequence[float] = 1.0,
        top_k: int | Sequence[int] = 0,
        min_p: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int = 0,
        draft: None = None,
    ) -> Generation:
        """Completes every prompt.

        Args:
          prompts: text, or token ids; one, or several of different lengths. Text is encoded with
            the special tokens its tokenizer adds.
          max_new_tokens: and the other settings up to ``seed``: one value for all prompts, or one
            for each.
          temperature: 0 is greedy. Then ``top_k``, ``top_p`` and ``min_p`` apply, in this order.
          seed: equal seeds give equal tokens for equal prompts, alone or in any batch.
          stop: ends a request where one of these strings appears, and cuts the text before it.
          stop_tokens: end a request beside the model's own end-of-sequence tokens.
          ignore_eos: go on past the model's own end-of-sequence tokens.
          logprobs: how many of the most probable tokens to report at each place (at most 20). The
            chosen token's own logprob always comes.
          draft: only None in this version: no speculation.

        Raises:
          ValueError: a prompt is empty, too long or has an id out of range, or a setting is wrong.
        """
        began = time.perf_counter()
        _check_draft(draft)
        requests = self._requests(
            prompts,
            stop=stop,
            stop_tokens=stop_tokens,
            ignore_eos=ignore_eos,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
        )
        _check_logprobs(logprobs)
        completions: list[Completion] = []
        first: float | None = None
        steps, later_tokens, later_seconds = 0, 0, 0.0
        largest = self.batch_sizes[-1]
        for at in range(0, len(requests), largest):
            batch = _Batch(self, requests[at : at + largest], logprobs)
            batch.advance(1)
            first_done = time.perf_counter()
            first = first_done - began if first is None else first
            while batch.running:
                batch.advance(self.stride if batch.watches_text else self.max_len)
            later_seconds += time.perf_counter() - first_done
            later_tokens += sum(len(t.tokens) - 1 for t in batch.trackers)
            steps += batch.steps
            completions += batch.completions()
        return Generation(
            completions,
            Stats(
                steps=steps,
                drafted=0,
                accepted=0,
                new_tokens=sum(len(c.tokens) for c in completions),
                time_to_first_token=first or 0.0,
                seconds=time.perf_counter() - began,
                tokens_per_second=later_tokens / later_seconds if later_tokens else 0.0,
            ),
        )

    def stream(self, prompt: Prompt, **settings: Any) -> Iterator[Piece]:
        """The completion of one prompt, piece by piece, ``stride`` tokens at a time.

        Takes the settings of :meth:`generate`. A piece never ends inside a character or inside what
        may become a stop string; joined, the pieces are generate's text. Settings are checked at
        the call, before the first piece.
        """
        inspect.signature(self.generate).bind(prompt, **settings)  # TypeError for unknown settings
        logprobs = settings.pop("logprobs", 0)
        _check_draft(settings.pop("draft", None))
        requests = self._requests(prompt, **settings)
        if len(requests) != 1:
            raise ValueError(f"stream: expected one prompt, got {len(requests)}")
        _check_logprobs(logprobs)

        def pieces() -> Iterator[Piece]:
            batch = _Batch(self, requests, logprobs)
            tracker = batch.trackers[0]
            sent = 0
            batch.advance(1)
            while True:
                reason = None if batch.running else batch.finish_reason(0)
                text = tracker.piece(final=reason is not None)
                if text or reason is not None:
                    yield Piece(text, tracker.tokens[sent:], reason)
                    sent = len(tracker.tokens)
                if reason is not None:
                    return
                batch.advance(self.stride)

        return pieces()

    def warm_up(self, batch_size: int = 1, *, logprobs: int = 0) -> float:
        """Compiles what a batch of that size needs; seconds it took."""
        began = time.perf_counter()
        self.generate([[0]] * batch_size, max_new_tokens=2, ignore_eos=True, logprobs=logprobs)
        return time.perf_counter() - began

    # ---- checking --------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        stop: str | Sequence[str] = (),
        stop_tokens: Sequence[int] = (),
        ignore_eos: bool = False,
        **settings: Any,
    ) -> list[Request]:
        prompts = _plain(prompts)
        several: list[Any] = list(prompts) if _several(prompts) else [prompts]
        if not several:
            raise ValueError("prompts: expected at least one, got none")
        stop = (stop,) if isinstance(stop, str) else stop
        if not isinstance(stop, Collection) or not all(isinstance(s, str) for s in stop):
            raise ValueError(f"stop: expected a string or several, got {stop!r}")
        stop = tuple(stop)
        ends = list(self._ids("stop_tokens", _plain(stop_tokens)))
        ends += () if ignore_eos else self._end_tokens()
        if self.tokenizer is not None:
            # A stop string that is a special token never appears in text, where those are left out.
            ends += [i for s in stop if (i := self.tokenizer.special_token_id(s)) is not None]
        elif stop:
            raise ValueError(f"stop: expected none, for there is no tokenizer; got {stop[0]!r}")
        ends = list(dict.fromkeys(ends))
        if len(ends) > MAX_STOP_TOKENS:
            raise ValueError(
                f"stop_tokens: expected at most {MAX_STOP_TOKENS}, the model's own among them; "
                f"got {len(ends)}"
            )
        columns: dict[str, list[Any]] = {}
        for name, value in settings.items():
            value = _plain(value)
            single = isinstance(value, str) or not isinstance(value, Sequence)
            spread = [value] * len(several) if single else list(value)
            if len(spread) != len(several):
                raise ValueError(
                    f"{name}: expected one value or {len(several)}, one a prompt; got {len(spread)}"
                )
            columns[name] = spread
        return [
            Request(
                prompt=self._prompt_ids(prompt),
                stop=stop,
                stop_tokens=tuple(ends),
                **{name: column[i] for name, column in columns.items()},
            )
            for i, prompt in enumerate(several)
        ]

    def _end_tokens(self) -> tuple[int, ...]:
        own = self.tokenizer.eos_token_id if self.tokenizer is not None else None
        return self.config.eos_token_id if own is None else (*self.config.eos_token_id, own)

    def _prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str) and prompt:
            if self.tokenizer is None:
                raise ValueError("prompt: expected token ids, for there is no tokenizer; got text")
            prompt = self.tokenizer.encode(prompt)
        ids = self._ids("prompt", _plain(prompt))
        if not ids:
            raise ValueError("prompt: expected text or token ids, got an empty prompt")
        if len(ids) >= self.max_len:
            raise ValueError(
                f"prompt: expected at most {self.max_len - 1} tokens (max_len {self.max_len}, "
                f"less one to generate), got {len(ids)}"
            )
        return ids

    def _ids(self, name: str, value: Any) -> tuple[int, ...]:
        if isinstance(value, bytes) or not isinstance(value, Sequence):
            raise ValueError(f"{name}: expected token ids, got {value!r}")
        ids = tuple(_plain(i) for i in value)
        last = self.config.vocab_size - 1
        for i in ids:
            check(name, i, f"token ids from 0 to {last}", numbers.Integral, 0, last)
        return ids


def _plain(value: Any) -> Any:
    """NumPy's and JAX's arrays as lists and numbers of Python; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _several(prompts: Any) -> bool:
    """Whether these are prompts, and not one: text or token ids."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        return False
    return not prompts or isinstance(_plain(prompts[0]), Sequence)


def _check_draft(draft: object) -> None:
    if draft is not None:
        raise ValueError(f"draft: expected None, this version does not speculate; got {draft!r}")


def _check_logprobs(logprobs: int) -> None:
    expected = f"an integer from 0 to {MAX_TOP_LOGPROBS}"
    check("logprobs", logprobs, expected, numbers.Integral, 0, MAX_TOP_LOGPROBS)


class _Batch:
    """Requests on their way through the compiled programs, and their text on the host."""

    def __init__(self, generator: Generator, requests: Sequence[Request], logprobs: int):
        self._generator = generator
        self._requests = requests
        self._logprobs = logprobs
        self.trackers = [TextTracker(generator.tokenizer, r.stop) for r in requests]
        self.watches_text = any(r.stop for r in requests)
        size = next(b for b in generator.batch_sizes if b >= len(requests))
        # Rows that only pad the batch are finished from the start.
        padded = [*requests, *[Request(prompt=(0,))] * (size - len(requests))]
        self._finished = np.array([RUNNING] * len(requests) + [STOPPED] * (size - len(requests)))
        self._state = self._initial_state(padded)
        self._sampling = _sampling(padded)
        self._state = generator._prefill(self._state)

    def _initial_state(self, rows: Sequence[Request]) -> DecodeState:
        generator, B = self._generator, len(rows)
        S = generator.max_len
        tokens = np.zeros((B, S), np.int32)
        for b, row in enumerate(rows):
            tokens[b, : len(row.prompt)] = row.prompt
        lengths = np.array([len(row.prompt) for row in rows], np.int32)
        limits = np.array([min(len(row.prompt) + row.max_new_tokens, S) for row in rows], np.int32)
        top = MAX_TOP_LOGPROBS if self._logprobs else 0
        return DecodeState(
            cache=LatentKVCache.init(generator.config, B, S, dtype=generator.dtype),
            tokens=jnp.asarray(tokens),
            lengths=jnp.asarray(lengths),
            limits=jnp.asarray(limits),
            finished=jnp.asarray(self._finished, jnp.int32),
            logprobs=jnp.zeros((B, S), jnp.float32),
            top_tokens=jnp.zeros((B, S, top), jnp.int32),
            top_logprobs=jnp.zeros((B, S, top), jnp.float32),
            steps=jnp.int32(0),
        )

    @property
    def running(self) -> bool:
        return bool(np.any(self._finished == RUNNING))

    @property
    def steps(self) -> int:
        return int(self._state.steps)

    def advance(self, steps: int) -> None:
        """Decodes up to that many tokens a row, and brings the text up to date."""
        state = self._generator._decode(self._state, self._sampling, np.int32(steps))
        tokens, lengths, finished = jax.device_get((state.tokens, state.lengths, state.finished))
        self._finished = finished.copy()
        for b, (request, tracker) in enumerate(zip(self._requests, self.trackers, strict=True)):
            if tracker.stopped:
                continue
            held = len(request.prompt) + len(tracker.tokens)
            tracker.extend(tokens[b, held : lengths[b]].tolist())
            if tracker.stopped:
                self._finished[b] = STOPPED
        if self.watches_text:
            state = dataclasses.replace(state, finished=jnp.asarray(self._finished))
        self._state = state

    def finish_reason(self, b: int) -> FinishReason:
        return "stop" if self._finished[b] == STOPPED else "length"

    def completions(self) -> list[Completion]:
        state = jax.device_get(
            (self._state.logprobs, self._state.top_tokens, self._state.top_logprobs)
        )
        return [
            self._completion(b, *(array[b] for array in state)) for b in range(len(self.trackers))
        ]

    def _completion(
        self, b: int, logprobs: np.ndarray, top_tokens: np.ndarray, top_logprobs: np.ndarray
    ) -> Completion:
        tracker, begin = self.trackers[b], len(self._requests[b].prompt)
        places = range(begin, begin + len(tracker.tokens))
        n = self._logprobs
        tops = [
            list(zip(top_tokens[p, :n].tolist(), top_logprobs[p, :n].tolist(), strict=True))
            for p in places
        ]
        return Completion(
            text=tracker.text,
            tokens=list(tracker.tokens),
            logprobs=logprobs[begin : begin + len(tracker.tokens)].tolist(),
            finish_reason=self.finish_reason(b),
            prompt_tokens=begin,
            top_logprobs=tops if n else None,
        )


def _sampling(rows: Sequence[Request]) -> Sampling:
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    stops = np.full((len(rows), MAX_STOP_TOKENS), -1)
    for b, row in enumerate(rows):
        stops[b, : len(row.stop_tokens)] = row.stop_tokens
    columns = {name: np.array([getattr(row, name) for row in rows]) for name in names}
    return Sampling.pack(stop_tokens=stops, **columns)

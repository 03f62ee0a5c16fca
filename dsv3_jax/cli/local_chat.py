"""A model that answers in this process, with an engine of one slot."""

from __future__ import annotations

import argparse
import time
from collections.abc import Generator, Sequence
from typing import Any

from dsv3_jax import compile_cache
from dsv3_jax.cli.flags import draft_of, max_len_of
from dsv3_jax.cli.loading import directory_of, load_model, make_layout_from
from dsv3_jax.cli.output import log
from dsv3_jax.cli.progress import StatusLine
from dsv3_jax.client.chat import Delta, Message
from dsv3_jax.config import ModelConfig
from dsv3_jax.engine import Engine
from dsv3_jax.server.parsers.answer_parser import ReasoningParser


class LocalChat:
    """Loads a model and compiles its programs. A context manager, which ends the engine.
    ``settings`` are those of :meth:`dsv3_jax.Engine.submit`."""

    def __init__(self, arguments: argparse.Namespace, settings: dict[str, Any]):
        self.model: str = arguments.model or "demo"
        self._settings = settings
        self._new_tokens: int | None = arguments.max_new_tokens
        self._max_len = max_len_of(arguments, ModelConfig.from_hf(directory_of(self.model)))
        if self._new_tokens is not None and self._new_tokens >= self._max_len:
            raise ValueError(
                f"--max-new-tokens: expected fewer than {self._max_len} (--max-len), got"
                f" {self._new_tokens}"
            )
        compile_cache.enable(arguments.compile_cache)
        began = time.perf_counter()
        model, tokenizer = load_model(arguments, self.model, make_layout_from(arguments))
        assert tokenizer is not None
        self._tokenizer = tokenizer
        shards = 1 if model.layout is None else model.layout.num_shards("batch")
        self._engine = Engine(
            model,
            tokenizer,
            self._max_len,
            max_running=shards,
            **draft_of(arguments),
        )
        with StatusLine("compiling"):
            self._engine.warm_up()
        seconds = time.perf_counter() - began
        log(f"loaded and compiled in {seconds:.1f} s")

    def __enter__(self) -> LocalChat:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.shutdown(drain=False)

    def answer(self, messages: Sequence[Message]) -> Generator[Delta, None, None]:
        """Yields the answer to a conversation as it arrives. Closing it ends the request. Raises
        ValueError for one that is too long."""
        prompt = self._tokenizer.chat(messages)
        available = self._max_len - len(prompt)
        if available < 1:
            raise ValueError(
                f"conversation: expected fewer than {self._max_len} tokens (--max-len), got"
                f" {len(prompt)}; /new begins another one"
            )
        new_tokens = min(self._new_tokens or available, available)
        request = self._engine.submit(prompt, max_new_tokens=new_tokens, **self._settings)
        parser = ReasoningParser.of_prompt(self._tokenizer, prompt)
        try:
            for piece in request:
                is_last = piece.finish_reason is not None
                parts = parser.add(piece, is_last=is_last)
                yield Delta(parts.content, parts.reasoning)
        finally:
            request.cancel()

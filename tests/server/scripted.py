"""A server whose engine writes given texts, and tokenizers of the family's chat formats."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dsv3_jax
from dsv3_jax import chat_formats
from dsv3_jax.engine import EngineError, EngineRequest
from dsv3_jax.engine.requests.output import RequestOutput
from dsv3_jax.engine.scheduling.step_plan import RequestResult, ScheduledRequest, StepTokens
from dsv3_jax.engine.stats import EngineStats
from dsv3_jax.generation.completion import RUNNING, STOPPED, FinishReason
from dsv3_jax.generation.request import Request
from dsv3_jax.generation.text import ReasoningMarkers
from dsv3_jax.tokenizer import SpecialTokenDecoder, Tokenizer
from tests.server.conftest import RunningServer, running

BARS = "User Assistant tool▁calls▁begin tool▁calls▁end tool▁call▁begin tool▁call▁end tool▁sep"
WORDS = "calls_section_begin calls_section_end call_begin call_argument_begin call_end"
ADDED = {
    **{f"<｜{word}｜>": False for word in BARS.split()},
    **{"<think>": False, "</think>": False, "｜DSML｜": False},
    **{f"<|tool_{word}|>": True for word in WORDS.split()},
    "<|im_end|>": True,
}
"""Further tokens of the tokenizer, and whether they are special, as in the published ones."""


def family_tokenizer(directory: Path, name: str) -> Tokenizer:
    """Returns the demo's tokenizer with the control tokens and a chat format of the family."""
    demo = Path(dsv3_jax.__file__).parent / "demo"
    described = json.loads((demo / "tokenizer.json").read_text("utf-8"))
    added = described["added_tokens"]
    known = {token["content"] for token in added}
    number = 2048
    for text, special in ADDED.items():
        if text not in known:
            added.append({**added[-1], "id": number, "content": text, "special": special})
            number += 1
    (directory / "tokenizer.json").write_text(json.dumps(described), "utf-8")
    config = (demo / "tokenizer_config.json").read_text("utf-8")
    (directory / "tokenizer_config.json").write_text(config, "utf-8")
    return Tokenizer(directory).with_chat_template(chat_formats.read(name))


@dataclasses.dataclass
class ScriptedEngine:
    """Stands in for an engine. Every request gets the text."""

    tokenizer: Tokenizer
    text: str = ""
    """Text that it writes, in which control tokens become tokens."""
    ids: list[int] | None = None
    """Tokens that it writes instead of the text."""
    finish_reason: FinishReason = "stop"
    piece_tokens: int = 1
    """Tokens of a piece."""
    requests: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Settings of all requests, with ``prompts``."""
    failure: EngineError | None = None

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def end_tokens(self) -> tuple[int, ...]:
        return (1,)

    def warm_up(self, store: Path | None = None) -> float:
        return 0.0

    def stats(self) -> Any:
        """Returns figures of an engine that has done nothing."""
        numbers = {field.name: 0 for field in dataclasses.fields(EngineStats)}
        return SimpleNamespace(**{**numbers, "tiers": ()})

    def shutdown(self, **options: Any) -> None:
        pass

    def submit_all(self, prompts: Any, *, n: int = 1, **settings: Any) -> list[EngineRequest]:
        self.requests.append({"prompts": prompts, "n": n, **settings})
        return [self._answer(prompts[0], **settings) for _ in range(n)]

    def _answer(
        self,
        prompt: list[int],
        *,
        skip_special_tokens: bool = True,
        reasoning: ReasoningMarkers | None = None,
        **settings: Any,
    ) -> EngineRequest:
        ids = self.ids or self.tokenizer.encode(
            self.text, add_special_tokens=False, split_special_tokens=False
        )
        stop = settings.get("stop") or ()
        request = Request(
            prompt=tuple(prompt), stop=(stop,) if isinstance(stop, str) else tuple(stop)
        )
        decoder = self.tokenizer if skip_special_tokens else SpecialTokenDecoder(self.tokenizer)
        handle = EngineRequest(lambda request: None)
        scheduled = ScheduledRequest(list(prompt), len(prompt) + len(ids))
        output = RequestOutput(handle, request, decoder, reasoning=reasoning)
        while ids and not output.is_stopped:
            new, ids = ids[: self.piece_tokens], ids[self.piece_tokens :]
            steps = [StepTokens(new, [0.0] * len(new), 0, None)]
            output.add(RequestResult(scheduled, steps, RUNNING if ids else STOPPED, False))
        output.end("stop" if output.is_stopped else self.finish_reason, cached_tokens=2)
        return handle


@contextlib.contextmanager
def scripted(directory: Path, name: str) -> Iterator[tuple[RunningServer, ScriptedEngine]]:
    """Runs a server with a scripted engine and a chat format."""
    tokenizer = family_tokenizer(directory, name)
    engine = ScriptedEngine(tokenizer)
    with running(engine, tokenizer) as server:  # pyright: ignore[reportArgumentType]
        yield server, engine

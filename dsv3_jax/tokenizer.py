"""A checkpoint's tokenizer and chat template, read with the tokenizers library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

# What a tokenizer is made of, and what transformers reads beside it.
FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def copy(source: Path, destination: Path) -> None:
    """Copies a tokenizer's files into a directory, which is made if need be."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


class Tokenizer:
    """Text to token ids and back, as the checkpoint's tokenizer_config.json says.

    Raises:
      ValueError: the directory holds no tokenizer.json, or a file that cannot be read.
    """

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory}: expected a tokenizer.json, found none")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer: {error}") from None
        config_path = directory / "tokenizer_config.json"
        try:
            config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
        except ValueError as error:
            raise ValueError(f"{config_path}: not JSON: {error}") from None
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)
        self._add_bos = bool(config.get("add_bos_token")) and self.bos_token_id is not None
        self._template = _chat_template(directory, config)

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """One past the highest id in use. A model's embedding may have more rows than this."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def special_token_id(self, text: str) -> int | None:
        """The id of the special token spelled so, if there is one."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((i for i, t in added.items() if t.special and t.content == text), None)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text, behind BOS where the checkpoint asks for it."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # The library's own post-processor may have put BOS there already.
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        # And the text may spell it too, as a rendered conversation does.
        if add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that form no UTF-8 character come out as U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the checkpoint's chat template.

        The template writes BOS itself, so none is added.

        Raises:
          ValueError: the checkpoint has no chat template, or it refuses the messages.
        """
        text = self.render_chat(
            messages, add_generation_prompt=add_generation_prompt, **template_arguments
        )
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        """The conversation as the text that :meth:`chat` encodes."""
        if self._template is None:
            raise ValueError(
                "this checkpoint has no chat template; expected one for a conversation"
            )
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token or "",
                eos_token=self.eos_token or "",
                **template_arguments,
            )
        except (jinja2.TemplateError, TypeError) as error:  # such as text + None
            raise ValueError(f"the chat template refuses these messages: {error}") from None


def _content(token: str | Mapping[str, Any] | None) -> str | None:
    """A special token, which a tokenizer_config.json spells as text or as an AddedToken."""
    return token["content"] if isinstance(token, Mapping) else token


def _chat_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    file = directory / "chat_template.jinja"
    source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if source is None:
        return None

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # A template comes with the weights, so it is someone else's program: sandboxed, as
    # transformers runs it, and with the two whitespace rules its templates are written for.
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"{directory}: not a chat template: {error}") from None

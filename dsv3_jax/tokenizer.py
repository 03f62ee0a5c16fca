"""A checkpoint's tokenizer and chat template, read with the tokenizers library."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dsv3_jax.chat_template import ChatTemplate, strings_in

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

    Text never becomes a control token unless the caller asks for it: a user who writes
    ``<｜Assistant｜>`` gets the tokens of these characters. Control tokens are the added tokens
    that tokenizer.json calls special, and those in angle or square brackets: DeepSeek's files do
    not call ``<｜User｜>`` and ``<think>`` special.

    Raises:
      ValueError: the directory holds no tokenizer.json, or a file that cannot be read.
    """

    def __init__(self, directory: Path):
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{directory}: expected a tokenizer.json, found none")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            self._plain = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path}: not a tokenizer: {error}") from None
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {i: token for i, token in added.items() if _is_control(token)}
        # A second tokenizer, not a flag that is set and reset: threads share this object.
        self._plain.add_special_tokens(list(self._control.values()))
        self._plain.encode_special_tokens = True
        spelled = sorted((t.content for t in self._control.values()), key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, spelled)) or r"(?!)")
        config = _read_config(directory / "tokenizer_config.json")
        self.bos_token = _content(config, "bos_token")
        self.eos_token = _content(config, "eos_token")
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)
        self._add_bos = bool(config.get("add_bos_token")) and self.bos_token_id is not None
        brackets = "".join(text[0] + text[-1] for text in spelled)
        self._template = _chat_template(directory, config, brackets)

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

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of the text.

        Args:
          add_special_tokens: puts BOS first where the checkpoint asks for it.
          split_special_tokens: treats control tokens that the text spells as plain text. False
            makes control tokens of them, as transformers does by default: for text that is
            trusted to its last character, such as :meth:`render_chat` of one's own messages.

        Raises:
          ValueError: ``text`` is not Unicode text, or it spells a control token that the tokenizer
            cannot write as plain text.
        """
        _check_text("text", text)
        if split_special_tokens:
            ids = self._plain_ids(text, add_special_tokens)
        else:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        # The library's own post-processor may have put BOS there already.
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        # And the text may spell it too, as a rendered conversation does.
        if add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def _plain_ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        encoding = self._plain.encode(text, add_special_tokens=add_special_tokens)
        ids = encoding.ids
        if self._control.keys().isdisjoint(ids):
            return ids
        # The post-processor's own are meant to be there. But a vocabulary of whole words may have
        # a control token as a word, which its text then becomes.
        for i, added in zip(ids, encoding.special_tokens_mask, strict=True):
            if i in self._control and not added:
                raise ValueError(
                    f"text: expected none that spells {self._control[i].content!r}: this tokenizer"
                    " cannot write it as plain text"
                )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that form no UTF-8 character come out as U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        split_special_tokens: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the checkpoint's chat template.

        The template writes BOS itself, so none is added.

        Args:
          messages: mappings with role, content, and what else the template takes of a message,
            such as tool_calls.
          add_generation_prompt: ends the prompt where the assistant's answer begins.
          split_special_tokens: control tokens that messages or template arguments spell are plain
            text; the template's own are real. False makes control tokens of both.
          template_arguments: what else the template takes, such as ``tools`` or ``thinking``.

        Raises:
          ValueError: the checkpoint has no chat template; ``messages`` are not a conversation; the
            template refuses them; or they spell a control token in a place where the template's
            own cannot be told from it.
        """
        arguments = {"add_generation_prompt": add_generation_prompt, **template_arguments}
        text = self.render_chat(messages, **arguments)
        _check_text("messages", text)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._template is None or not split_special_tokens:
            return ids
        marked = self._template.render_marked(messages, self._special(), arguments)
        if marked is None:
            for own in strings_in([messages, arguments]):
                if (found := self._control_pattern.search(own)) is not None:
                    raise ValueError(
                        f"messages: expected none that spells {found[0]!r}: the chat template hides"
                        " which control tokens are its own"
                    )
            return ids
        if marked == text or self._controls_of(text) == self._controls_of(marked):
            return ids
        return self._join(text, self._control_pattern.finditer(marked))

    def _controls_of(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i in self._control]

    def _join(self, text: str, own: Iterable[re.Match[str]]) -> list[int]:
        """Ids of a text in which the control tokens at these spans are real and no others."""
        tokens = {token.content: (i, token) for i, token in self._control.items()}
        ids, end, strip = [], 0, False
        for span in own:
            number, token = tokens[span[0]]
            between = text[end : span.start()]
            between = between.lstrip() if strip else between
            ids += [*self._plain_ids(between.rstrip() if token.lstrip else between), number]
            end, strip = span.end(), token.rstrip
        rest = text[end:]
        return ids + self._plain_ids(rest.lstrip() if strip else rest)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        """The conversation as text. In text the template's control tokens look like a user's, so
        :meth:`chat` encodes untrusted messages, and :meth:`encode` of this text does not."""
        if self._template is None:
            raise ValueError(
                "this checkpoint has no chat template; expected one for a conversation"
            )
        arguments = {"add_generation_prompt": add_generation_prompt, **template_arguments}
        return self._template.render(messages, self._special(), arguments)

    def _special(self) -> dict[str, str]:
        return {"bos_token": self.bos_token or "", "eos_token": self.eos_token or ""}


def _is_control(token: tokenizers.AddedToken) -> bool:
    return token.special or (token.content[:1] + token.content[-1:]) in ("<>", "[]")


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{name}: expected text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected Unicode text, got the lone surrogate "
            f"U+{ord(text[error.start]):04X} at character {error.start}"
        ) from None


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return config


def _content(config: Mapping[str, Any], name: str) -> str | None:
    """A special token, which a tokenizer_config.json spells as text or as an AddedToken."""
    token = config.get(name)
    content = token.get("content") if isinstance(token, Mapping) else token
    if token is None or (isinstance(content, str) and content):
        return content
    raise ValueError(f"tokenizer_config.json: {name}: expected a token, got {token!r:.80}")


def _chat_template(
    directory: Path, config: Mapping[str, Any], brackets: str
) -> ChatTemplate | None:
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return None if source is None else ChatTemplate(source, brackets)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{directory}: not a chat template: {error}") from None

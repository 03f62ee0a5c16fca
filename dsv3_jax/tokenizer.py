"""The tokenizer of a checkpoint, together with its chat template."""

from __future__ import annotations

import copy as copies
import functools
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dsv3_jax import chat_formats
from dsv3_jax.chat_template import ChatTemplate, strings_in
from dsv3_jax.tokenizer_files import CONFIG, FILES, read_object, read_special_tokens, read_tokenizer

_LONG = 4096  # tokens that are decoded without the interpreter's lock, like texts in _encode


class SpecialTokenDecoder:
    """Decodes token ids with the text of special tokens."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ``ids``."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def opaque_tokens(self, stop: Sequence[str]) -> frozenset[int]:
        """Returns the control tokens whose whole text is in no stop string. Readers of an answer do
        not see these texts, so that a stop string must not match a part of one."""
        controls = self._tokenizer.control_tokens.items()
        return frozenset(i for i, text in controls if not any(text in s for s in stop))

    @property
    def has_byte_fallback(self) -> bool:
        """See :attr:`Tokenizer.has_byte_fallback`."""
        return self._tokenizer.has_byte_fallback


class Tokenizer:
    """Converts text to token ids and back, with the settings of tokenizer_config.json.

    Special tokens are those of :mod:`dsv3_jax.tokenizer_files`. What tokenizer.json has stored of
    its training is not applied: truncation, padding, and the dropout of merges.

    By default text never becomes a control token. If a user's text contains ``<｜Assistant｜>``, it
    is encoded as the tokens of these characters, so that it cannot end the user's turn. Control
    tokens are the special tokens and all added tokens in angle or square brackets or full-width
    bars, because DeepSeek's files do not mark ``<｜User｜>``, ``<think>`` and ``｜DSML｜``.

    Args:
      directory: contains tokenizer.json, and optionally tokenizer_config.json and
        chat_template.jinja. DeepSeek-V3.2, which has no template, gets the one of
        :mod:`dsv3_jax.chat_formats`; config.json identifies it.

    Raises:
      ValueError: the directory contains no tokenizer.json, or a file is invalid.
    """

    def __init__(self, directory: Path):
        path = directory / FILES[0]
        if not path.is_file():
            raise ValueError(f"{directory}: expected a tokenizer.json, found none")
        config = read_object(directory / CONFIG)
        declared = read_special_tokens(directory)
        self._tokenizer, self._plain_tokenizer = read_tokenizer(path), read_tokenizer(path)
        for tokenizer in (self._tokenizer, self._plain_tokenizer):
            declared.add_to(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._control = {i: token for i, token in added.items() if _is_control(token)}
        # Encodes control tokens as plain text. It is a second tokenizer rather than a flag that is
        # set and reset, because several threads may use this object.
        self._plain_tokenizer.add_special_tokens(list(self._control.values()))
        self._plain_tokenizer.encode_special_tokens = True
        spellings = [token.content for token in self._control.values()]
        self._control_pattern = re.compile(longest_of(spellings))
        self._names = declared.names
        self.bos_token = declared.names.get("bos_token")
        self.eos_token = declared.names.get("eos_token")
        self.bos_token_id = self._id(self.bos_token)
        self.eos_token_id = self._id(self.eos_token)
        self._add_bos = bool(config.get("add_bos_token")) and self.bos_token_id is not None
        self._is_byte_level = b'"ByteLevel"' in (
            b"" if self._tokenizer.decoder is None else self._tokenizer.decoder.__getstate__()
        )
        self._brackets = "".join(text[0] + text[-1] for text in spellings)
        self._template = _chat_template(directory, config, self._brackets)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        # The library does not pickle this setting.
        self._plain_tokenizer.encode_special_tokens = True

    def __call__(self, text: str, **settings: Any) -> list[int]:
        """Returns the token ids of ``text``: :meth:`encode`, as users of transformers know it."""
        return self.encode(text, **settings)

    def __repr__(self) -> str:
        chat = "no chat template" if self._template is None else "chat template"
        return (
            f"Tokenizer({self.vocab_size:,} tokens, {len(self._control)} of them control tokens,"
            f" bos {self.bos_token!r}, eos {self.eos_token!r}, {chat})"
        )

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self._tokenizer.token_to_id(token)

    @property
    def vocab_size(self) -> int:
        """Highest token id plus 1. A model's embedding may have more rows than this."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    @property
    def has_byte_fallback(self) -> bool:
        """Whether decoding writes a whole run of byte tokens as U+FFFD if it is no valid UTF-8, as
        with tokenizers of SentencePiece."""
        decoder = self._tokenizer.decoder
        return decoder is not None and b'"ByteFallback"' in decoder.__getstate__()

    def to_json(self) -> str:
        """Returns tokenizer.json, in which all control tokens are marked as special."""
        return self._plain_tokenizer.to_str()

    @property
    def special_tokens(self) -> list[str]:
        """Texts of the special tokens, which :meth:`decode` leaves out by default."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    @property
    def control_tokens(self) -> dict[int, str]:
        """Texts of the control tokens by their ids."""
        return {i: token.content for i, token in self._control.items()}

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the chat template, or None."""
        return None if self._template is None else self._template.source

    @property
    def chat_template_variables(self) -> frozenset[str]:
        """Variables that the chat template reads, such as ``messages`` and ``tools``."""
        return frozenset() if self._template is None else frozenset(self._template.variables)

    def with_chat_template(self, source: str) -> Tokenizer:
        """Returns this tokenizer with another chat template.

        Raises:
          ValueError: ``source`` is not a template.
        """
        changed = copies.copy(self)
        try:
            changed._template = ChatTemplate(source, self._brackets)
        except ValueError as error:
            raise ValueError(f"chat template: {error}") from None
        return changed

    def special_token_id(self, text: str) -> int | None:
        """Returns the id of the special token ``text``, or None if there is no such token."""
        added = self._tokenizer.get_added_tokens_decoder()
        return next((i for i, t in added.items() if t.special and t.content == text), None)

    @functools.cached_property
    def _max_token_bytes(self) -> int | None:
        """Most bytes of text in UTF-8 that one token stands for. None if a token may stand for any
        number of them, because the tokenizer drops or changes text."""
        own = self._plain_tokenizer
        vocabulary = own.get_vocab(with_added_tokens=False)
        is_byte_level = isinstance(own.model, tokenizers.models.BPE) and not (
            set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys()
        )
        keeps_text = _keeps_text(own.normalizer, ("Sequence",)) and _keeps_text(
            own.pre_tokenizer, ("Sequence", "Split", "Digits", "ByteLevel")
        )
        added = own.get_added_tokens_decoder().values()
        if not (is_byte_level and keeps_text) or any(t.lstrip or t.rstrip for t in added):
            return None
        longest = max(map(len, vocabulary))  # one character for each byte
        return max([longest, *(len(token.content.encode()) for token in added)])

    def least_tokens(self, text: str) -> int:
        """Returns a number that the tokens of ``text`` reach at least, without encoding it. For
        tokenizers that do not work on bytes it is 0."""
        longest = self._max_token_bytes
        return 0 if longest is None else -(-len(text.encode("utf-8", "surrogatepass")) // longest)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, split_special_tokens: bool = True
    ) -> list[int]:
        """Encodes text as token ids.

        Args:
          add_special_tokens: prepend BOS if the checkpoint's configuration requires it.
          split_special_tokens: encode control tokens in the text as plain text. With False they
            become control tokens, as in transformers by default. Use False only for text that is
            trusted completely, such as :meth:`render_chat` of your own messages.

        Raises:
          ValueError: ``text`` is not a string or contains a lone surrogate; or it contains a
            control token that the tokenizer cannot encode as plain text.
        """
        _check_text("text", text)
        if split_special_tokens:
            ids = self._plain_ids(text, add_special_tokens)
        else:
            ids = _encode(self._tokenizer, text, add_special_tokens).ids
        # The library's post-processor may have added BOS already.
        if add_special_tokens and self._add_bos and ids[:1] != [self.bos_token_id]:
            ids = [self.bos_token_id, *ids]
        # A rendered conversation begins with BOS itself.
        if add_special_tokens and ids[:2] == [self.bos_token_id] * 2:
            del ids[0]
        return ids

    def _plain_ids(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encodes text without control tokens, except those that the post-processor adds."""
        encoding = _encode(self._plain_tokenizer, text, add_special_tokens)
        ids = encoding.ids
        if self._control.keys().isdisjoint(ids):
            return ids
        # A word-level vocabulary may contain the spelling of a control token as a word. Then its
        # text has no other encoding.
        for i, added in zip(ids, encoding.special_tokens_mask, strict=True):
            if i in self._control and not added:
                raise ValueError(
                    f"text: expected none that contains {self._control[i].content!r}, which this"
                    " tokenizer cannot encode as plain text"
                )
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids. Bytes that are not valid UTF-8 become U+FFFD."""
        ids = list(ids)
        if len(ids) < _LONG:
            return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]

    def token_bytes(self, token: int) -> bytes | None:
        """Returns the bytes that a token adds to a text, which may be a part of a character only.

        None for a special token, which :meth:`decode` leaves out by default. The bytes of several
        tokens, joined and decoded as UTF-8, are the text of :meth:`decode`, if the tokenizer's
        decoder is ByteLevel, as in all published ones of the family.
        """
        text = self.decode([token], skip_special_tokens=False)
        if text and not self.decode([token]):
            return None
        piece = self._tokenizer.id_to_token(token) or ""
        if not self._is_byte_level:
            byte = _BYTE_FALLBACK.fullmatch(piece)
            return text.encode() if byte is None else bytes([int(byte[1], 16)])
        if piece and all(c in _BYTES for c in piece):
            return bytes(_BYTES[c] for c in piece)
        return piece.encode()

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        split_special_tokens: bool = True,
        **template_arguments: Any,
    ) -> list[int]:
        """Encodes a conversation with the checkpoint's chat template.

        The template adds BOS itself.

        Args:
          messages: mappings with ``role``, ``content``, and further keys that the template reads,
            such as ``tool_calls``.
          add_generation_prompt: end the prompt where the assistant's answer begins.
          split_special_tokens: control tokens in messages and template arguments become plain text,
            while those that the template writes become control tokens. With False both become
            control tokens.
          template_arguments: further arguments of the template, such as ``tools`` or ``thinking``.

        Raises:
          ValueError: the checkpoint has no chat template; ``messages`` are not a conversation; the
            template rejects them; or a message contains a control token and the template changes
            its messages so that control tokens of both origins cannot be distinguished.
        """
        arguments = {"add_generation_prompt": add_generation_prompt, **template_arguments}
        text = self.render_chat(messages, **arguments)
        _check_text("messages", text)
        ids = _encode(self._tokenizer, text, False).ids
        if self._template is None or not split_special_tokens:
            return ids
        marked = self._template.render_marked(messages, self._special_tokens(), arguments)
        if marked is None:
            for untrusted in strings_in([messages, arguments]):
                if (match := self._control_pattern.search(untrusted)) is not None:
                    raise ValueError(
                        f"messages: expected none that contains {match[0]!r}, because the chat"
                        " template hides which control tokens are its own"
                    )
            return ids
        # In the marked text, only the template's own control tokens are still intact.
        if marked == text or self._control_ids(text) == self._control_ids(marked):
            return ids
        return self._encode_between(text, self._control_pattern.finditer(marked))

    def _control_ids(self, text: str) -> list[int]:
        ids = _encode(self._tokenizer, text, False).ids
        return [i for i in ids if i in self._control]

    def _encode_between(self, text: str, controls: Iterable[re.Match[str]]) -> list[int]:
        """Encodes text in which exactly the matches in ``controls`` are control tokens."""
        tokens = {token.content: (i, token) for i, token in self._control.items()}
        ids, end, strip_left = [], 0, False
        for match in controls:
            control_id, token = tokens[match[0]]
            plain = text[end : match.start()]
            plain = plain.lstrip() if strip_left else plain
            ids += [*self._plain_ids(plain.rstrip() if token.lstrip else plain), control_id]
            end, strip_left = match.end(), token.rstrip
        rest = text[end:]
        return ids + self._plain_ids(rest.lstrip() if strip_left else rest)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        **template_arguments: Any,
    ) -> str:
        """Returns the conversation as text, for display or for trusted messages.

        In text, the template's control tokens look the same as those that a user typed. Encode
        untrusted messages with :meth:`chat`, not with :meth:`encode` of this text.

        Raises:
          ValueError: the checkpoint has no chat template, ``messages`` are not a conversation, or
            the template rejects them.
        """
        if self._template is None:
            raise ValueError(
                "this checkpoint has no chat template; expected one for a conversation"
            )
        arguments = {"add_generation_prompt": add_generation_prompt, **template_arguments}
        return self._template.render(messages, self._special_tokens(), arguments)

    def _special_tokens(self) -> dict[str, str]:
        return {"bos_token": "", "eos_token": "", **self._names}


def _byte_characters() -> dict[str, int]:
    """Returns the characters with which ByteLevel tokenizers write bytes. Printable characters of
    Latin-1 stand for themselves, and the other bytes have the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_characters()
_BYTE_FALLBACK = re.compile("<0x([0-9A-F]{2})>")


def _encode(
    tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool
) -> tokenizers.Encoding:
    """Encodes text. The library releases the interpreter's lock for batches alone, so that a long
    text would stop all other threads."""
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _keeps_text(part: Any, kinds: Collection[str]) -> bool:
    """Returns whether a normalizer or pre-tokenizer, or None, keeps each byte of a text: it is of
    these kinds, in which nothing is removed."""
    described = [] if part is None else [json.loads(part.__getstate__())]
    while described:
        each = described.pop()
        if each["type"] not in kinds or each.get("behavior") == "Removed":
            return False
        if each["type"] == "Sequence":
            described += each.get("normalizers") or each.get("pretokenizers") or ()
    return True


def _is_control(token: tokenizers.AddedToken) -> bool:
    return token.special or (token.content[:1] + token.content[-1:]) in ("<>", "[]", "｜｜")


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


def longest_of(words: Iterable[str]) -> str:
    """Returns a regular expression for the longest of some words: their trie, so that where a text
    has no word, the search looks at a few characters, and not at each of the words."""
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}

    def pattern(node: dict[str, Any]) -> str:
        ways = [re.escape(first) + pattern(rest) for first, rest in node.items() if first]
        if not ways:
            return ""
        return f"(?:{'|'.join(ways)})" + ("?" if "" in node else "")

    trie.pop("", None)
    return pattern(trie) or r"(?!)"


def _chat_template(
    directory: Path, config: Mapping[str, Any], brackets: str
) -> ChatTemplate | None:
    file = directory / "chat_template.jinja"
    try:
        source = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
        if source is None:
            model_type = read_object(directory / "config.json").get("model_type")
            source = chat_formats.read("deepseek-v3.2") if model_type == "deepseek_v32" else None
        if isinstance(source, list):  # several templates with names
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return None if source is None else ChatTemplate(source, brackets)
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{directory}: not a chat template: {error}") from None

"""The files of a tokenizer: reading them, their special tokens as transformers reads them, copying.

tokenizer.json marks special tokens in its list of added tokens. Published checkpoints also declare
them elsewhere, and a declaration counts although tokenizer.json lacks the mark:

* tokenizer_config.json names tokens (``bos_token``, ``eos_token``, other keys that end in
  ``_token``), and lists more under ``extra_special_tokens`` or ``additional_special_tokens``;
* its ``added_tokens_decoder`` describes tokens by id;
* special_tokens_map.json and added_tokens.json, which older versions of transformers wrote. Their
  entries take precedence, and they are ignored if there is an ``added_tokens_decoder``.

A declared token is text, or an object with ``content`` and the flags of an added token.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, processors

CONFIG = "tokenizer_config.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"

FILES = (
    "tokenizer.json",
    CONFIG,
    SPECIAL_MAP,
    ADDED,
    "chat_template.jinja",
    "generation_config.json",
)
"""Files of a tokenizer, including those that only transformers reads."""

_LISTS = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


class SpecialTokens(NamedTuple):
    """Declarations in the files next to tokenizer.json."""

    names: dict[str, str]  # texts of the tokens that have a name, such as ``bos_token``
    by_id: dict[int, AddedToken]  # of tokenizer_config.json or added_tokens.json; some not special
    special: list[AddedToken]  # all special tokens, those in ``names`` included, without duplicates

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Adds the tokens to a tokenizer, and marks those as special that it has already. One that
        tokenizer.json describes keeps its flags, unless ``by_id`` describes it too. Raises
        ValueError if a token's id differs from the declared one."""
        tokenizer.add_tokens([self.by_id[id] for id in sorted(self.by_id)])
        for id, token in self.by_id.items():
            if (got := tokenizer.token_to_id(token.content)) != id:
                raise ValueError(
                    f"added tokens: expected the id {got} for {token.content!r}, as in"
                    f" tokenizer.json, got {id}"
                )
        known = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
        special = [known.get(token.content, token) for token in self.special]
        for token in special:
            token.special = True
        tokenizer.add_special_tokens(special)


def read_special_tokens(directory: Path) -> SpecialTokens:
    """Reads the declarations of special tokens in a checkpoint's directory. Raises ValueError if a
    file is not a JSON object, or a declaration is not a token."""
    config = read_object(directory / CONFIG)
    by_id = _by_id(config)
    files = {CONFIG: config}
    if by_id is None:
        files[SPECIAL_MAP] = read_object(directory / SPECIAL_MAP)
    names: dict[str, AddedToken | None] = {}
    listed: list[AddedToken] = []
    for file, content in files.items():
        names |= _named(file, content)
        for name in _LISTS:
            listed += _list(file, name, content.get(name))
    named = {name: token for name, token in names.items() if token is not None}
    special = {token.content: token for token in (*listed, *named.values())}
    if by_id is None:
        by_id = _added(directory / ADDED, special.keys())
    texts = {name: token.content for name, token in named.items()}
    return SpecialTokens(texts, by_id, list(special.values()))


def read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, without the settings that belong to its training."""
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, tokenizers.models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object, which is empty if the file does not exist. Raises ValueError if the file
    contains anything else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(content).__name__}")
    return content


def with_bos_processor(tokenizer_json: str, bos: str, bos_id: int | None = None) -> str:
    """Returns a tokenizer.json whose post-processor puts ``bos`` before every text: transformers 5
    ignores ``add_bos_token`` in tokenizer_config.json. Unchanged if it does so already. ``bos_id``
    is the id of BOS, if the file does not contain it."""
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    tokenizer.no_padding()
    bos_id = tokenizer.token_to_id(bos) if bos_id is None else bos_id
    if bos_id is None or tokenizer.encode("").ids[:1] == [bos_id]:
        return tokenizer_json
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, bos_id)]
    )
    # Edited as JSON, because the library would also write its defaults for absent keys.
    content = json.loads(tokenizer_json)
    before, added = content.get("post_processor"), json.loads(template.__getstate__())
    content["post_processor"] = (
        added if before is None else {"type": "Sequence", "processors": [before, added]}
    )
    return json.dumps(content, ensure_ascii=False, indent=2)


def copy(source: Path, destination: Path) -> None:
    """Copies a tokenizer's files into a directory, which is created if necessary, with
    tokenizer.json as :func:`with_required_bos` returns it. Raises ValueError if a file is
    invalid."""
    destination.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)
    if (content := with_required_bos(source)) is not None:
        (destination / FILES[0]).write_text(content, "utf-8")


def with_required_bos(directory: Path) -> str | None:
    """Returns tokenizer.json with a post-processor that adds BOS, if tokenizer_config.json requires
    BOS and the file does not add it. None if the file is right as it is, or absent.

    transformers ignores ``add_bos_token`` next to a tokenizer.json, and would encode text without
    the BOS that :meth:`Tokenizer.encode` adds. Raises ValueError if a file is invalid.
    """
    path = directory / FILES[0]
    config = read_object(directory / CONFIG)
    if not path.is_file() or not config.get("add_bos_token"):
        return None
    tokenizer, declared = read_tokenizer(path), read_special_tokens(directory)
    declared.add_to(tokenizer)
    if (bos := declared.names.get("bos_token")) is None:
        return None
    before = path.read_text("utf-8")
    content = with_bos_processor(before, bos, tokenizer.token_to_id(bos))
    return None if content == before else content


def _by_id(config: Mapping[str, Any]) -> dict[int, AddedToken] | None:
    """Returns ``added_tokens_decoder``, or None if it is absent."""
    name = "added_tokens_decoder"
    declared = config.get(name)
    if declared is None:
        return None
    if not isinstance(declared, Mapping) or not all(map(str.isdecimal, declared)):
        raise ValueError(f"{CONFIG}: {name}: expected tokens by id, got {declared!r:.80}")
    return {int(id): _token(CONFIG, f"{name}.{id}", value) for id, value in declared.items()}


def _added(path: Path, special: Container[str]) -> dict[int, AddedToken]:
    """Returns the tokens of added_tokens.json, which has an id for each text."""
    tokens = {}
    for text, id in read_object(path).items():
        if not isinstance(id, int) or not text:
            raise ValueError(f"{path}: expected an id for each token, got {text!r:.80}: {id!r:.80}")
        is_special = text in special
        tokens[id] = AddedToken(text, special=is_special, normalized=not is_special)
    return tokens


def _named(file: str, content: Mapping[str, Any]) -> dict[str, AddedToken | None]:
    """Returns the tokens with names; None for those that are null."""
    nested = content.get(_LISTS[0])
    named = {name: value for name, value in content.items() if name.endswith("_token")}
    named |= nested if isinstance(nested, Mapping) else {}
    return {
        name: None if value is None else _token(file, name, value)
        for name, value in named.items()
        # Flags such as add_bos_token are no tokens, and unused names may be empty.
        if name in ("bos_token", "eos_token") or (isinstance(value, (str, Mapping)) and value)
    }


def _list(file: str, name: str, values: Any) -> list[AddedToken]:
    """Returns the tokens of a list. An object instead of the list has tokens with names."""
    if values is None or (isinstance(values, Mapping) and name == _LISTS[0]):
        return []
    if not isinstance(values, list):
        raise ValueError(f"{file}: {name}: expected a list of tokens, got {values!r:.80}")
    return [_token(file, name, value) for value in values]


def _token(file: str, name: str, value: Any) -> AddedToken:
    """Converts a declaration, which is text or an object."""
    is_object = isinstance(value, Mapping)
    content = value.get("content") if is_object else value
    flags = {"normalized": False, "special": True}
    if is_object:
        flags = {flag: value[flag] for flag in _FLAGS if flag in value}
    is_text = isinstance(content, str) and content
    if not is_text or not all(isinstance(flag, bool) for flag in flags.values()):
        raise ValueError(f"{file}: {name}: expected a token, got {value!r:.80}")
    return AddedToken(content, **flags)

"""Tokenizer directories in the forms in which published checkpoints declare special tokens.

The vocabulary is ours: single bytes, and a few control tokens.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

BOS, EOS, PAD, TOOL = "<|bos|>", "<|eos|>", "<|pad|>", "<|tool|>"
TOKENS = (BOS, EOS, PAD, TOOL)
"""Control tokens with the ids 0 to 3."""

NAMES = {"bos_token": BOS, "eos_token": EOS}

TEXTS = (
    "ab",
    "",
    " a\n",
    f"a{BOS}b {EOS} c{TOOL}d{PAD}",
    f"{EOS}{EOS}",
    "<|bos|",
    "if a < b and c > d:\n    深度 👍🏽",
)


class Shape(NamedTuple):
    """A form of declaration, and what it declares."""

    config: dict[str, Any] | None
    """tokenizer_config.json."""
    special: str
    """Letters of the special tokens: b, e, p, t."""
    map: dict[str, Any] | None = None
    """special_tokens_map.json."""
    added: dict[str, int] | None = None
    """added_tokens.json."""
    marked: str = ""
    """Letters of the tokens that tokenizer.json marks as special."""
    unmarked: str = ""
    """Letters of its added tokens without the mark."""
    bos: str | None = BOS
    eos: str | None = EOS
    also: str = ""
    """Letters of tokens that are not special, and still single tokens."""
    settings: str = ""
    """Setting that tokenizer.json has stored: truncation, padding, template, bytes or both."""
    adds_bos: bool = False
    in_transformers: bool = True
    """Whether transformers 5.24 reads this form, and reads it alike."""


def token(content: str, **flags: bool) -> dict[str, Any]:
    """Returns a token as an object, as special_tokens_map.json has it."""
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    return {"content": content, **plain, **flags}


def added_token(content: str, **flags: bool) -> dict[str, Any]:
    """Returns a token as tokenizer_config.json of transformers 4 has it."""
    return {"__type": "AddedToken", **token(content, **flags)}


BY_ID = {
    "0": token(BOS, special=True),
    "1": token(EOS, special=True),
    "3": token(TOOL, special=False),
}
_LLAMA = {**NAMES, "tokenizer_class": "LlamaTokenizerFast", "add_eos_token": False, "legacy": True}

SHAPES: dict[str, Shape] = {
    "marked": Shape(NAMES, "be", marked="be"),
    "no config": Shape(None, "be", marked="be", bos=None, eos=None),
    "named": Shape(NAMES, "be"),
    "named without mark": Shape(NAMES, "be", unmarked="be"),
    "named as objects": Shape({"bos_token": added_token(BOS), "eos_token": added_token(EOS)}, "be"),
    "named as objects without type": Shape(
        {"bos_token": token(BOS), "eos_token": token(EOS)}, "be", in_transformers=False
    ),
    "named as stripping": Shape(
        NAMES | {"eos_token": added_token(EOS, lstrip=True, rstrip=True)}, "be"
    ),
    "padding token": Shape(NAMES | {"pad_token": PAD, "unk_token": None}, "bep"),
    "bos null": Shape(NAMES | {"bos_token": None, "add_bos_token": True}, "e", bos=None),
    "own name": Shape(NAMES | {"tool_token": TOOL}, "bet"),
    "extra list": Shape(NAMES | {"extra_special_tokens": [TOOL]}, "bet"),
    "extra object": Shape(NAMES | {"extra_special_tokens": {"tool_token": TOOL}}, "bet"),
    "additional": Shape(NAMES | {"additional_special_tokens": [TOOL, PAD]}, "betp"),
    # transformers takes the absent flag of the object for false.
    "additional objects": Shape(
        NAMES | {"additional_special_tokens": [added_token(TOOL)]}, "bet", in_transformers=False
    ),
    "map": Shape({}, "be", map=NAMES),
    "map of objects": Shape({}, "be", map={"bos_token": token(BOS), "eos_token": token(EOS)}),
    "map with list": Shape({}, "bet", map=NAMES | {"additional_special_tokens": [TOOL]}),
    "map with objects in a list": Shape(
        {}, "bet", map=NAMES | {"additional_special_tokens": [token(TOOL)]}, in_transformers=False
    ),
    "map before config": Shape({"eos_token": PAD}, "be", map=NAMES),
    "map with null": Shape(NAMES, "e", map={"bos_token": None, "eos_token": EOS}, bos=None),
    "by id": Shape(NAMES | {"added_tokens_decoder": BY_ID}, "be", also="t"),
    "by id before map": Shape(
        {"bos_token": BOS, "added_tokens_decoder": BY_ID},
        "be",
        map={"eos_token": EOS, "pad_token": PAD},
        eos=None,
        also="t",
    ),
    "added_tokens.json": Shape(NAMES, "be", added={TOOL: 3}, also="t"),
    "template": Shape(NAMES, "be", settings="template", marked="be", adds_bos=True),
    "template against flag": Shape(
        NAMES | {"add_bos_token": False}, "be", settings="template", marked="be", adds_bos=True
    ),
    "template after bytes": Shape(
        _LLAMA | {"add_bos_token": True}, "be", settings="both", marked="be", adds_bos=True
    ),
    # transformers 5 ignores the flag, transformers 4 and DeepSeek's own code do not.
    "flag": Shape(
        _LLAMA | {"add_bos_token": True},
        "be",
        settings="bytes",
        marked="be",
        adds_bos=True,
        in_transformers=False,
    ),
    "flag for the end": Shape(NAMES | {"add_eos_token": True}, "be", marked="be"),
    "truncation": Shape(NAMES, "be", settings="truncation", marked="be"),
    "padding": Shape(NAMES | {"pad_token": PAD}, "bep", settings="padding", marked="be"),
}


def write_shape(directory: Path, shape: Shape) -> None:
    """Writes the files of a shape."""
    letters = {text[2]: text for text in TOKENS}
    vocabulary = [*TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([letters[letter] for letter in shape.marked])
    made.add_tokens([AddedToken(letters[each], normalized=False) for each in shape.unmarked])
    template = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    to_bytes = processors.ByteLevel(trim_offsets=False)
    if shape.settings in ("template", "bytes", "both"):
        made.post_processor = {
            "template": template,
            "bytes": to_bytes,
            "both": processors.Sequence([to_bytes, template]),
        }[shape.settings]
    if shape.settings == "truncation":
        made.enable_truncation(4)
    if shape.settings == "padding":
        made.enable_padding(length=40, pad_id=2, pad_token=PAD)
    made.save(str(directory / "tokenizer.json"))
    for name, content in (
        ("tokenizer_config", shape.config),
        ("special_tokens_map", shape.map),
        ("added_tokens", shape.added),
    ):
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content), "utf-8")

"""Fields that say what an answer's text has to match."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from dsv3_jax.server.grammar import MAX_TEXT, GrammarSource
from dsv3_jax.server.openai.body import Body, Json, read_json


class TextForm(Protocol):
    """A description of the text."""

    def source(self, field: str) -> GrammarSource | None:
        """Returns its grammar, or None for any text.

        Args:
          field: name of the body's field, for errors.
        """
        ...


Schema = dict[str, Json] | bool

Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]

Choices = Annotated[list[Text], Field(min_length=1, max_length=1024, fail_fast=True)]

_OBJECT: Schema = {"type": "object"}
_NAMES = ("json", "json_object", "regex", "choice", "grammar")


class TextFormat(Body):
    """Any text."""

    type: Literal["text"]

    def source(self, field: str) -> GrammarSource | None:
        """Returns nothing, as there is no grammar."""
        return None


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]

    def source(self, field: str) -> GrammarSource | None:
        """Returns the source of JSON objects."""
        return GrammarSource.of_schema(_OBJECT, field)


class NamedSchema(Body):
    """A JSON schema with its name."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")] = _OBJECT
    strict: bool | None = None  # accepted and ignored: an answer always matches


class JsonSchemaFormat(Body):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def source(self, field: str) -> GrammarSource | None:
        """Returns the source of such JSON."""
        return GrammarSource.of_schema(self.json_schema.schema_, field)


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class StructuredOutputs(Body):
    """The same as in vLLM: exactly one of several descriptions of the text."""

    json_: Annotated[Schema | str | None, Field(alias="json")] = None
    """A JSON schema, or one as text."""
    json_object: Literal[True] | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None

    @model_validator(mode="after")
    def _check_count(self) -> StructuredOutputs:
        fields = {name: "json_" if name == "json" else name for name in _NAMES}
        names = [name for name, field in fields.items() if getattr(self, field) is not None]
        if len(names) != 1:
            got = ", ".join(names) or "none"
            raise ValueError(f"structured_outputs: expected one of {', '.join(_NAMES)}; got {got}")
        return self

    def source(self, field: str) -> GrammarSource | None:
        """Returns the source of the text."""
        if self.regex is not None:
            return GrammarSource("regex", self.regex, field)
        if self.grammar is not None:
            return GrammarSource("lark", self.grammar, field)
        if self.choice is not None:
            return GrammarSource.of_choices(self.choice, field)
        schema = _OBJECT if self.json_object else self.json_
        if isinstance(schema, str):
            try:
                schema = read_json(schema.encode(), "text")
            except ValueError as error:
                raise ValueError(f"{field}: json: expected a JSON schema: {error}") from None
        return GrammarSource.of_schema(schema, field)

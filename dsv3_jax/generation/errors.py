"""What ends a generation early. Both exceptions carry what was generated until then."""

from __future__ import annotations

from dsv3_jax.generation.completion import Generation


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during :meth:`Generator.generate`.

    Attributes:
      generation: a completion for every prompt. Those that were not at their end have the
        finish_reason ``"interrupted"``; prompts that were not begun have no tokens.
    """

    def __init__(self, generation: Generation):
        super().__init__("generation interrupted")
        self.generation = generation


class NonFiniteLogitsError(ValueError):
    """The model computed NaN or an infinity for the logits of the next token.

    Attributes:
      generation: a completion for every prompt, with the tokens before that. Sequences with such
        logits have the finish_reason ``"error"``; others that were not at their end,
        ``"interrupted"``.
    """

    def __init__(self, message: str, generation: Generation):
        super().__init__(message)
        self.generation = generation

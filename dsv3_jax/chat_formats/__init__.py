"""Chat formats of the DeepSeek family, as Jinja templates.

A checkpoint's own template comes first. These serve checkpoints without one, such as DeepSeek-V3.2,
and tools with checkpoints whose template does not describe them, such as DeepSeek-V3 and R1.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent

NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.jinja")))
"""Names of the formats, such as ``deepseek-v3.1``."""


def read(name: str) -> str:
    """Returns the source of a format.

    Args:
      name: one of :data:`NAMES`, or the path of a file with a Jinja template.

    Raises:
      ValueError: there is no such format or file.
    """
    path = _FOLDER / f"{name}.jinja" if name in NAMES else Path(name)
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"chat template: expected a file or one of {', '.join(NAMES)}; got {name!r} ({error})"
        ) from None

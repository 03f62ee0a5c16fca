"""The page at ``/``: a chat, its settings, and figures of the engine. It loads nothing from other
hosts."""

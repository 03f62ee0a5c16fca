"""Pictures, of numbers that others have made: every function takes arrays and gives a matplotlib
``Figure``, which a notebook shows and :func:`save` writes. By module:

- ``routing``: expert load, routes of tokens, bias updates, load of GPUs.
- ``attention``, ``attention_entropy``: forms and variants of attention; how far heads look.
- ``acceptance``: drafts of the MTP layer.
- ``mesh``: who holds what, and what travels. ``bounds``, ``frontier``: what a plan says.
- ``training``, ``balance``, ``weights``: runs, and checkpoints.

matplotlib is an extra: ``pip install 'dsv3-jax[plot]'``.
"""

from dsv3_jax.viz.canvas import save

__all__ = ["save"]

"""Plots of a model's internals, of training runs and of checkpoints.

Every function takes arrays and returns a matplotlib ``Figure``, which a notebook displays and
:func:`save` writes to a file. Modules:

- ``routing``: expert load, routing of tokens, bias updates, load of GPUs.
- ``attention``, ``attention_entropy``: forms and variants of attention, entropy of its
  probabilities.
- ``acceptance``: accepted and rejected drafts of the MTP layer.
- ``mesh``: shards of each device, and collectives.
- ``bounds``, ``frontier``: lower bounds on time and upper bounds on throughput, from a plan.
- ``training``: losses and expert load of training runs.
- ``serving``: requests, tokens per step and cache use of an engine over time.
- ``weights``: statistics of checkpoints.

matplotlib is an extra: ``pip install '.[plot]'`` in a clone.
"""

from dsv3_jax.viz.canvas import save

__all__ = ["save"]

"""Pictures, of numbers that others have made: every function takes arrays and gives a matplotlib
``Figure``, which a notebook shows and :func:`save` writes.

matplotlib is an extra: ``pip install 'dsv3-jax[plot]'``.
"""

from dsv3_jax.viz.attention import attention_forms, cache_bytes, decode_costs, step_times
from dsv3_jax.viz.canvas import save

__all__ = ["attention_forms", "cache_bytes", "decode_costs", "save", "step_times"]

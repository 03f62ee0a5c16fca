"""Pictures, of numbers that others have made: every function takes arrays and gives a matplotlib
``Figure``, which a notebook shows and :func:`save` writes.

matplotlib is an extra: ``pip install 'dsv3-jax[plot]'``.
"""

from dsv3_jax.viz.bounds import bounds
from dsv3_jax.viz.canvas import save
from dsv3_jax.viz.frontier import frontier
from dsv3_jax.viz.mesh import mesh

__all__ = ["bounds", "frontier", "mesh", "save"]

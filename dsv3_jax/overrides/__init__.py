"""Other ways to compute a decoder layer or its attention, with the same results.

A model uses one of them where its caller names it, or where the table of measured thresholds in
:mod:`~dsv3_jax.overrides.few_tokens` says that it is faster. The choice is made when a program is
traced; :mod:`dsv3_jax.layers` knows nothing of it.
"""

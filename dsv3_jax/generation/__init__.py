"""Settings of a request, sampling, drafters, verification of drafts, and completions.

The programs that use them are in :mod:`dsv3_jax.engine`, the Generator in
:mod:`dsv3_jax.offline`.
"""

"""Arguments of the subcommands: a function for each.

Nothing here imports JAX or anything else that is slow, so that help and usage errors appear at
once.
"""

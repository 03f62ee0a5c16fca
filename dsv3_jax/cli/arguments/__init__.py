"""Arguments of every subcommand, a module each: a summary for the help, and ``add_arguments``.

Nothing here imports JAX, nor anything else that takes long: help and usage errors appear at once.
"""

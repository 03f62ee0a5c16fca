"""Arguments of the subcommands, one module each: ``SUMMARY`` for the help, and ``add_arguments``.

Nothing here imports JAX or anything else that is slow, so that help and usage errors appear at
once.
"""

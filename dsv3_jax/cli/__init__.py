"""The ``dsv3`` command.

:mod:`~dsv3_jax.cli.main` parses the arguments and imports the module that is named like the
subcommand. Its function ``run(arguments)`` does the work, and raises ValueError for what is wrong
with the call; the message is printed in one line.
"""

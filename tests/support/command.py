"""Runs the dsv3 command in this process."""

from dsv3_jax.cli.main import main


def run(*arguments: object) -> int:
    """Runs the command and returns its exit status, also if argparse exits."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as exit:
        return int(exit.code or 0)

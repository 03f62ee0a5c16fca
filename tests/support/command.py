"""The dsv3 command, run in this process."""

from dsv3_jax.cli.main import main


def run(*arguments: object) -> int:
    """The exit status, also where argparse leaves by itself."""
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as left:
        return int(left.code or 0)

"""Convert a published checkpoint to a store, as ``dsv3 convert`` does.

    python scripts/convert_hf_checkpoint.py SRC DST --to fp8 [--resume] [--dry-run] [--workers N]

For those who look for a script; ``dsv3 convert --help`` tells the rest.
"""

import sys

from dsv3_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))

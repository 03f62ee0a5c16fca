"""The ``dsv3`` command."""

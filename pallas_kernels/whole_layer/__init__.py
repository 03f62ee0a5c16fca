"""A whole decoder layer of one token in one Hopper kernel. See :mod:`kernel`."""

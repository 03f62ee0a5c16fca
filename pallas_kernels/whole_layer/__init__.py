"""A whole decoder layer of one or two tokens in one Hopper kernel. See :mod:`kernel`."""

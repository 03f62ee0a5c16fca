"""A norm and several projections of its result."""

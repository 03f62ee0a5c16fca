"""Which experts a token goes to, and the pairs of both sorted by expert."""

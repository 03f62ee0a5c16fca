"""The gated half of a feed-forward network."""

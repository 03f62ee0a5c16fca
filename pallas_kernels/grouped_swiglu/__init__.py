"""The gated half of the experts' feed-forward: two grouped products and what joins them."""

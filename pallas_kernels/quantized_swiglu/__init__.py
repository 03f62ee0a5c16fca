"""The gated half of a feed-forward network of quantized matrices."""

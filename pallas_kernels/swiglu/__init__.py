"""The gated half of a feed-forward network: two matmuls and SwiGLU."""

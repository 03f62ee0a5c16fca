"""The gated half of the experts' feed-forward: two grouped matmuls and SwiGLU."""

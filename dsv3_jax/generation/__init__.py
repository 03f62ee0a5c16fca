"""Text generation: sampling, speculative decoding, the jitted loops, and the Generator."""

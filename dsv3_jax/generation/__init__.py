"""Text generation: sampling, the jitted loops, and the Generator that drives them."""

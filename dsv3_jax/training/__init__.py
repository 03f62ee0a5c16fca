"""Training: losses, expert balancing, and the step that applies them."""

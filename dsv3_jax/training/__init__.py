"""Training: corpus, losses, expert balancing, the training step, and runs of many steps."""

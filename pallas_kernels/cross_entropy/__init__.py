"""Cross-entropy of rows of logits, with its gradient in their place."""

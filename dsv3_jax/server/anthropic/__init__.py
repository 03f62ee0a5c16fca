"""/v1/messages, for Anthropic's clients."""

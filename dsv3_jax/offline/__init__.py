"""The Generator: prompts completed in the caller's thread, by the engine's programs."""

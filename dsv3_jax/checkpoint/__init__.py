"""Checkpoints in the published Hugging Face form: names, files, and the way into the model."""

"""Checkpoints: published Hugging Face directories, stores, and conversion between them."""

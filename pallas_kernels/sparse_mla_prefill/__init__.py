"""Absorbed latent attention to selected tokens of whole sequences."""

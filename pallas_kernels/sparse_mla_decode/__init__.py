"""Absorbed latent attention to selected tokens of a paged cache."""

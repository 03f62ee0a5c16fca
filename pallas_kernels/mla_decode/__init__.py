"""Absorbed latent attention over a paged cache."""

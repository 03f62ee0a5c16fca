"""Multi-head latent attention over a paged cache, in the absorbed form."""

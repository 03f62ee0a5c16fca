"""Which devices a model fits, and how fast they could serve it, before any of them is had."""

"""Which devices a model fits, and how fast they could serve it: by arithmetic, before any is had."""

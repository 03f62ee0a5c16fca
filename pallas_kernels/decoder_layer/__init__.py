"""Parts of a decoder layer as one operation, for the few tokens of a decode step."""

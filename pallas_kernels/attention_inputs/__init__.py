"""Everything in a decoder layer before attention itself, as one operation for a few tokens."""

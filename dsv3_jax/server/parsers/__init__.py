"""Parsers of a model's answers: the parts of a text, as it arrives."""

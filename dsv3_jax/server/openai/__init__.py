"""OpenAI's API: one file for each endpoint, and the types of their bodies."""

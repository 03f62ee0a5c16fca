"""Requests as their callers see them: checked settings, text, and the handles they hold."""

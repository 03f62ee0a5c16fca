"""Simulates engines and clusters under load: the engine's own loop under simulated time.

Nothing here runs JAX while it simulates. Units are seconds, tokens and bytes.
"""

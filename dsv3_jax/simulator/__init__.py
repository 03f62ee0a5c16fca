"""Simulates engines and clusters under load: the engine's own scheduler under simulated time."""

"""What the tests compare against and load: a NumPy oracle and tiny published-style checkpoints."""

"""The device side of a step: compiled programs, the state, and transfers of its arrays."""

"""The parts of a decoder layer, in the order data flows: norm, rope, attention, router, experts."""

"""The parts of the `te` compute. Most import TransformerEngine, so they are imported only where it is used."""

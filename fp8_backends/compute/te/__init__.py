"""The parts of the `te` backend. Most import TransformerEngine, so they are imported only where it is used."""

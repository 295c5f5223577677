"""The `te` backend. Most of its files import TransformerEngine, and are imported only when it is
used."""

"""Output heads with deferred logits, multiplied in chunks of tokens."""

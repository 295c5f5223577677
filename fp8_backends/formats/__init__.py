"""Number formats, scaling rules and allowed ranges of numbers."""

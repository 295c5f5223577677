"""The numeric operations: a short eager reference for each, and the fast forms that are tested against it."""

"""Activations computed in one pass over memory, with what quantizes them found along the way."""

LONGEST_ROW = 8192
"""Columns of the longest rows that the norm's kernels take. A program holds a row in its registers."""

"""Activations computed in one pass over memory, with what quantizes them found along the way."""

"""Experts of mixtures: their weights, exchange and grouped products."""

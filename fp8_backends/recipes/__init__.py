"""Recipes: handlers, backend strings, recipes of other systems, and the precision plan."""

"""The Adam step over weights and states in low precision."""

"""Find, choose and convert the layers of a model, and store their weights."""

"""What the user asks for: handlers, strings, other systems' recipes, and what a recipe promises."""

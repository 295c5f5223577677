"""Commands of `fp8-backends`, and one way to show their results."""

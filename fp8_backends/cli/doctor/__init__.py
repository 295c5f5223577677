"""`fp8-backends doctor`: what this machine can do."""

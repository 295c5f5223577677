"""`fp8-backends compare`: several backends train one model, side by side, on one page."""

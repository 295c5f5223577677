"""`fp8-backends monitor`: what a file of `monitor_every` holds, as a table and as a page."""

"""`fp8-backends config`: configuration files of other systems, checked and translated."""

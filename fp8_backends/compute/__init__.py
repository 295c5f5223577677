"""Who runs the matrix products, and with which scaling rule: the interface, the registry, what each chip can do, and
one folder for each backend."""

from .counts import DGRAD, FPROP, KINDS, WGRAD, ProductCounts
from .interface import COMPUTE_DTYPES, Compute

__all__ = ["COMPUTE_DTYPES", "DGRAD", "FPROP", "KINDS", "WGRAD", "Compute", "ProductCounts"]

"""Matrix products in FP8: the interface, the registry, facts about chips, and one folder for each
backend."""

from .counts import DGRAD, FPROP, KINDS, WGRAD, ProductCounts
from .interface import COMPUTE_DTYPES, Compute

__all__ = ["COMPUTE_DTYPES", "DGRAD", "FPROP", "KINDS", "WGRAD", "Compute", "ProductCounts"]

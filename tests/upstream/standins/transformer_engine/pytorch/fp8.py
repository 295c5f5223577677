"""What Accelerate asks before it makes a recipe of MXFP8."""


def check_mxfp8_support():
    """(whether this machine has MXFP8, why not)."""
    return True, ""

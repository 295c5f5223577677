"""A stand-in for MS-AMP, which cannot be installed any more: as much of its interface as Accelerate's code calls."""


def initialize(model, optimizer, opt_level):
    """Model and optimizer, which MS-AMP replaces by its own."""
    return model, optimizer

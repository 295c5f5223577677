"""Stand in for MS-AMP, no longer installable, as far as Accelerate's code calls it."""


def initialize(model, optimizer, opt_level):
    """Return model and optimizer; MS-AMP would replace them."""
    return model, optimizer

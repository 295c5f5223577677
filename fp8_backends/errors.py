"""The errors of this package: what is wrong, which field or layer, and what to do."""


class FP8BackendError(Exception):
    """Anything that this package refuses or finds unproven."""


class RecipeError(FP8BackendError, ValueError):
    """A backend string or a recipe field that cannot be honoured."""


class BackendUnavailableError(FP8BackendError, ImportError):
    """A valid backend that cannot run on this machine, or not yet in this version."""

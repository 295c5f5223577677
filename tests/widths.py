"""Cut wide parametrizations: one case of each kind in the default run, the others nightly."""

from __future__ import annotations

import itertools

import pytest


def nightly(*values):
    """Return a case of a parametrization for only the nightly run."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def nightly_but(kept, cases):
    """Return all cases, marked nightly unless they are in `kept`; a tuple has the values of several
    arguments."""
    cases, kept = list(cases), list(kept)
    assert all(case in cases for case in kept), "a case to keep is none of the cases"
    return [
        case if case in kept else nightly(*(case if type(case) is tuple else (case,)))
        for case in cases
    ]


def one_each(first, second):
    """Return all pairs: each of `first` with one of `second` in turn, the others marked nightly."""
    kept = zip(first, itertools.cycle(second), strict=False)
    return nightly_but(kept, itertools.product(first, second))

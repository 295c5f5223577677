"""Run TransformerEngine's Python over the stand-in in this process, before any test module is
imported."""

from __future__ import annotations

from standin import activate

activate()

"""Recipe fields of the `native` compute: TransformerEngine's rules, which it follows on any device."""

from __future__ import annotations

from ..fields import FP8_PARAMS, SCALING_FIELDS

FIELDS = (*SCALING_FIELDS, FP8_PARAMS)

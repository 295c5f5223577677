"""Before any test module is imported: TransformerEngine's Python runs over the stand-in in this process."""

from __future__ import annotations

from standin import activate

activate()

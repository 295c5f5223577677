from __future__ import annotations

from accelerate_state import fresh_accelerate

__all__ = ["fresh_accelerate"]

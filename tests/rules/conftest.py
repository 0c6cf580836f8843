"""How the property tests of the rules run: the same examples every time, and no deadline on a shared machine."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("rules", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rules")

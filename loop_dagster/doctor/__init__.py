"""The doctor: looks at an installation, names what is wrong and says how to mend it. It changes nothing.

Belongs here: what the command line needs of it. Does not belong here: the looks (one module per area, listed in
checks.py).
"""

from __future__ import annotations

from loop_dagster.doctor.checks import CHECKS, Check, examine
from loop_dagster.doctor.findings import Finding, Level

__all__ = ["CHECKS", "Check", "Finding", "Level", "examine"]

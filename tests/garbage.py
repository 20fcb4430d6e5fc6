"""Searches for garbage, without what stays."""

from __future__ import annotations

import gc
import sys

A_LIBRARY = 200
"""Modules: so many further ones are a library that somebody was the first to import."""

_modules = 0


def freeze_libraries() -> None:
    """Exempts what is here from searches for garbage; called between tests, where libraries came since the last call.

    What was collected and imported is a million objects that stay, half a second for each ``gc.collect()`` of a test
    or a library. What a test makes is searched as ever.
    """
    global _modules
    if len(sys.modules) >= _modules + A_LIBRARY:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)

"""How many examples a property test meets: its own number, or that of the long profile (conftest.py, tools/full)."""

from __future__ import annotations

import os

from hypothesis import settings

LONG = os.environ.get("HYPOTHESIS_PROFILE") == "long"


def examples(few: int) -> settings:
    """Settings of a test that meets `few` examples in the fast tier."""
    return settings(deadline=None, max_examples=settings().max_examples if LONG else few)

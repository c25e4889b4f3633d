"""The one error of the demo that is meant for the reader."""

from __future__ import annotations


class DemoError(Exception):
    """Something the person at the keyboard can act on; shown without a traceback."""

"""Process-wide switches. Few, and none of them changes a result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    """slow: what `backend="auto"` does when only a slower backend takes a problem: "warn" once per reason,
    "raise" UnsupportedProblem, or "quiet"."""

    slow: str = "warn"

    def __setattr__(self, name: str, value: str) -> None:
        from tilewise.errors import OptionError

        if name != "slow" or value not in ("warn", "raise", "quiet"):
            raise OptionError(
                f"config.{name} = {value!r}\nconfig.slow is 'warn', 'raise' or 'quiet'; there is no other."
            )
        super().__setattr__(name, value)


config = Config()

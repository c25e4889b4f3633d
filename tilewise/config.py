"""Process-wide switches. Few, and none of them changes a result."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Config:
    """slow: what `backend="auto"` does when only a slower backend takes a problem: "warn" once per reason,
    "raise" UnsupportedProblem, or "quiet". sm_margin: multiprocessors that the backend `hopper` leaves to others, such
    as communication."""

    slow: str = "warn"
    sm_margin: int = 0

    def __setattr__(self, name: str, value: object) -> None:
        from tilewise.errors import OptionError

        if name == "sm_margin":
            if type(value) is not int or value < 0:
                raise OptionError(
                    f"config.sm_margin = {value!r}\nIt is a number of multiprocessors, 0 or more."
                )
        elif name != "slow" or value not in ("warn", "raise", "quiet"):
            raise OptionError(
                f"config.{name} = {value!r}\nconfig.slow is 'warn', 'raise' or 'quiet'; beside it there is sm_margin."
            )
        super().__setattr__(name, value)


config = Config()

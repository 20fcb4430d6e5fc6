"""The best evaluation of a run: which checkpoint to keep, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class BestEvaluation:
    """Follows the evaluation loss.

    Args:
        patience: evaluations in a row that may fail to improve on the best before :attr:`is_exhausted`; None for any
            number.
    """

    def __init__(self, patience: int | None = None) -> None:
        self.patience = patience
        self.loss = math.inf
        """The least so far."""
        self.step: int | None = None
        """Its optimizer step; None before the first."""
        self.num_worse = 0
        """Evaluations since then."""

    def observe(self, step: int, loss: float) -> bool:
        """Take in an evaluation; whether it is the best. One that is nan never is."""
        is_best = loss < self.loss
        if is_best:
            self.loss, self.step, self.num_worse = loss, step, 0
        else:
            self.num_worse += 1
        return is_best

    @property
    def is_exhausted(self) -> bool:
        """Whether the run is to stop."""
        return self.patience is not None and self.num_worse >= self.patience

    def __str__(self) -> str:
        return (
            f"the evaluation loss has not fallen below {self.loss:.4f}, that of step {self.step}, in {self.num_worse} "
            f"evaluation{'' if self.num_worse == 1 else 's'}"
        )

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss, "step": self.step, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loss, self.step, self.num_worse = float(state["loss"]), state["step"], int(state["num_worse"])

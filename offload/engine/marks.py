"""What traces call the engine's work: ``KIND UNIT``, or ``KIND UNIT: DETAIL`` where part of a unit is meant.

=========================== =========================================================== ===========================
kind                        what                                                        thread
=========================== =========================================================== ===========================
``copy up``, ``copy down``  states to the device and back; updated parameters up        worker
``gradient up`` / ``down``  gradients to the device, or to the host                     worker, or in backward
``update``                  the base optimizer's call                                   worker, or the caller's
``wait``                    the caller's thread or stream waits for a unit's update     the caller's
``wait in backward``        backward waits until a unit's work gives memory back        the caller's, or autograd's
=========================== =========================================================== ===========================

A unit is a layer (``layers.3``), the embedding or the head, or :data:`ALL`; the detail names the first parameter of a
piece. In torch's profiler the names begin with :data:`PREFIX`: ``offload: update layers.3: layers.3.mlp.w1.weight``. On
an accelerator a range covers what the thread queues, and a wait mostly takes no time there: the device's stream waits.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

PREFIX = "offload: "

ALL = "all units"
"""Stands for the unit where work is not any single one's: a base optimizer that steps as a whole, hyperparameters."""

Kind = Literal["copy up", "copy down", "gradient up", "gradient down", "update", "wait in backward", "wait"]

KINDS: tuple[Kind, ...] = get_args(Kind)

WAITS: tuple[Kind, ...] = ("wait", "wait in backward")
"""Kinds in which nothing is done."""


class Mark(NamedTuple):
    """A name taken apart."""

    kind: Kind
    unit: str


def mark(kind: Kind, name: str) -> str:
    """The name of work on a unit, or on a piece (:attr:`~offload.engine.units.Piece.name`)."""
    return f"{kind} {name}"


def parse(name: str) -> Mark | None:
    """The inverse of :func:`mark`, with or without :data:`PREFIX`; None for any other name."""
    name = name.removeprefix(PREFIX)
    for kind in KINDS:
        if name.startswith(f"{kind} "):
            return Mark(kind, name[len(kind) + 1 :].partition(": ")[0])
    return None

"""Reading samples before training: bad rows, samples without labels, and how both are told."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from offload.data.rows import BadRow, Rows, Samples, Tally, num_labels
from offload.data.source import described
from offload.device import random_state, set_random_state
from offload.errors import UserError

SCAN_SECONDS = 10.0
"""How long rows are read before training that packing does not read, where bad ones stop the run."""

_FIRST_SAMPLES = 64
_SHOWN = 3


def read_rows(samples: Samples, order: Sequence[int], *, ignore_index: int, seconds: float | None) -> Tally:
    """Make samples as training will, and tally them; the random generators are left as they are.

    Args:
        samples: not packed.
        order: of reading; that of training, so that what comes first is read first.
        ignore_index: label that does not count.
        seconds: stop after so many; None reads all.
    """
    from tqdm import tqdm

    tally = Tally()
    end = None if seconds is None else time.monotonic() + seconds
    cpu = torch.device("cpu")
    state = random_state(cpu)
    try:
        # A bar appears on a terminal only, and only where reading takes its time.
        for index in tqdm(order, desc="reading data", unit=" rows", delay=1, leave=False, disable=None):
            if end is not None and time.monotonic() > end:
                break
            sample = samples[index]
            tally.add(sample, ignore_index)
            if isinstance(sample, BadRow) and sample.concerns_all:
                break
    finally:
        set_random_state(state, cpu)
    return tally


def packs_tally(packs: Any, order: Sequence[int], tallies: Iterable[Tally], ignore_index: int) -> Tally:
    """The tally of packs whose rows were tallied as they were packed.

    Args:
        packs: the data set of packs.
        order: of training.
        tallies: of the rows.
        ignore_index: label that does not count.
    """
    whole = Tally()
    for each in tallies:
        whole.read += each.read
        whole.without_labels += each.without_labels
        whole.bad += each.bad
    for position, index in enumerate(order[:_FIRST_SAMPLES]):
        pack = packs[index]
        whole.longest = max(whole.longest, len(pack["tokens"]))
        if whole.first_without == position:
            whole.first_without += num_labels(pack, ignore_index) == 0
    return whole


def check_labels(key: str, tally: Tally, max_seq_len: int | None) -> list[str]:
    """Whether there is something to learn from; a note where there is less than it seems.

    Args:
        key: of the data, for messages.
        tally: what was read.
        max_seq_len: where the tokenizer cuts.

    Raises:
        UserError: no label counts in the first samples that training would see.
    """
    good = tally.read - len(tally.bad)
    if max_seq_len is not None and tally.longest >= max_seq_len:
        why = f"prompts fill tokenizer.max_seq_len={max_seq_len} and leave no room for answers; raise it"
    else:
        why = "all of their tokens are masked; look at the roles of the messages, or set train_on_input=True"
    if tally.without_labels == 0:
        return []
    if tally.without_labels == good or tally.first_without >= _FIRST_SAMPLES:
        which = "none of its samples" if tally.without_labels == good else f"none of the first {tally.first_without}"
        raise UserError(f"{key}: {which} has a label that counts, so nothing would be learned: {why}")
    share = 100 * tally.without_labels / good
    return [f"note: {key}: {tally.without_labels} of {good} samples ({share:.1f} %) have no label that counts: {why}"]


def bad_rows_error(key: str, rows: Sequence[Rows], tally: Tally) -> UserError:
    """What a run is refused with, or stops with, for the bad rows of a tally."""
    bad = tally.bad
    if bad[-1].is_line:
        return UserError(bad[-1].reason)
    if bad[-1].concerns_all:
        owner = rows[bad[-1].source]
        return UserError(f"{owner.key}: {described(owner.section)}: {bad[-1].reason}")
    shown = [f"{rows[one.source].key}: {_told(one, rows)}" for one in bad[:_SHOWN]]
    if len(bad) == tally.read:
        all_of_them = "it is the only row" if len(bad) == 1 else f"none of the {len(bad)} rows can be used"
        return UserError(f"{shown[0]}; {all_of_them}")
    if len(bad) == 1:
        return UserError(f"{shown[0]}; mend the row, or leave it out with dataset_errors=skip")
    more = f"{len(bad)} of {tally.read} rows cannot be used; mend them, or leave them out with dataset_errors=skip"
    return UserError("\n".join([*shown, f"{key}: {more}"]))


def skipped_note(key: str, rows: Sequence[Rows], tally: Tally) -> str:
    """Which rows are left out."""
    shown = "; ".join(_told(one, rows) for one in tally.bad[:_SHOWN])
    more = f"; and {len(tally.bad) - _SHOWN} more" if len(tally.bad) > _SHOWN else ""
    return f"note: {key}: {len(tally.bad)} of {tally.read} rows are left out (dataset_errors=skip): {shown}{more}"


def unread_note(key: str, tally: Tally, total: int, seconds: float) -> list[str]:
    """A note about rows that were not read before training, if there are."""
    if tally.read == total or tally.bad:
        return []
    return [
        f"{key}: {tally.read:,} of {total:,} rows were read before training ({seconds:.0f} s); a bad one among the "
        "others stops the run after a checkpoint (dataset_errors=skip reads all)"
    ]


def _told(bad: BadRow, rows: Sequence[Rows]) -> str:
    return f"{rows[bad.source].where(bad.index)}: {bad.reason}"

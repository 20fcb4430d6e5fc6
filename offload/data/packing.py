"""Several samples in one of a fixed length, kept apart.

A pack's positions count from 0 in each document. That is all that a model of transformers needs: without an attention
mask and a cache it finds the documents by their positions, and tokens attend to their own document alone.
torchtune's models take a mask that is made of ``seq_lens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from offload.data.labels import IGNORE_INDEX
from offload.data.messages import RowError
from offload.errors import UserError


def plan(lengths: Sequence[int], size: int, method: Literal["best_fit", "in_order"] = "best_fit") -> list[list[int]]:
    """Which documents go into which pack.

    ``in_order`` fills a pack until the next document does not fit. ``best_fit`` takes the longest documents first and
    puts each where it leaves the least room; documents of a pack, and packs, then stand in the order of the data.

    Args:
        lengths: tokens of each document, 0 for one that is left out.
        size: tokens of a pack.
        method: as above; a pure function of ``lengths`` either way.

    Returns:
        the documents' numbers, for each pack.
    """
    if method == "in_order":
        packs: list[list[int]] = []
        room = 0
        for number, length in enumerate(lengths):
            if length == 0:
                continue
            if length > room:
                packs.append([])
                room = size
            packs[-1].append(number)
            room -= length
        return packs
    packs = []
    by_room: dict[int, list[int]] = {}
    rooms = 0  # bit r is set where a pack has room for r more tokens
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        length = lengths[number]
        if length == 0:
            break
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            pack = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, pack = size, len(packs)
            packs.append([])
        packs[pack].append(number)
        left = room - length
        if left:
            by_room.setdefault(left, []).append(pack)
            rooms |= 1 << left
    return sorted(map(sorted, packs))


class PackedSamples(Dataset[dict[str, Tensor]]):
    """Packs of the samples of a data set, as torchtune's ``PackedDataset`` gives them.

    Samples are read once to learn their lengths, and again when a pack is asked for: packs take no memory.

    A pack is ``tokens``, ``labels`` (unshifted) and ``input_pos`` (a token's position in its document), int64
    [max_seq_len] each, ``seq_lens``, int64 [documents], and ``padding``, the number of tokens at the end that are no
    sample's. Padding is a document of its own, the last of ``seq_lens``, and its labels do not count. Neither does a
    document's first label, which the token before it, of another document, would be trained to predict.

    Args:
        dataset: samples of ``tokens`` and ``labels``, lists of at most ``max_seq_len``.
        max_seq_len: tokens of a pack.
        pad_id: token that fills a pack up.
        method: see :func:`plan`.
        lengths: tokens of each sample where they are known, 0 for those to leave out; None reads all samples.

    Attributes:
        packs: the samples' numbers, for each pack.
        weight: the data set's.

    Raises:
        UserError: a sample is bad or longer than a pack, or there is none.
    """

    def __init__(
        self,
        dataset: Any,
        max_seq_len: int,
        *,
        pad_id: int,
        method: Literal["best_fit", "in_order"] = "best_fit",
        lengths: Sequence[int] | None = None,
    ) -> None:
        if method not in ("best_fit", "in_order"):
            raise UserError(f"packing.method: expected best_fit or in_order, got {method!r}")
        self._dataset = dataset
        self._size = max_seq_len
        self._pad_id = pad_id
        self.weight = float(getattr(dataset, "weight", 1.0))
        known = lengths_of(len(dataset), lambda number: _length(dataset, number)) if lengths is None else lengths
        longest = max(known, default=0)
        if longest > max_seq_len:
            where = _where(dataset, list(known).index(longest))
            raise UserError(
                f"{where}: it has {longest} tokens and does not fit into a pack of {max_seq_len}; "
                "set tokenizer.max_seq_len, which cuts it"
            )
        if longest == 0:
            raise UserError("dataset: there is no sample to pack")
        self.packs = plan(known, max_seq_len, method)

    @property
    def padding_idx(self) -> int:
        """The token that fills a pack up, by torchtune's name."""
        return self._pad_id

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return packed([self._dataset[number] for number in self.packs[index]], self._size, self._pad_id)


def packed(samples: Sequence[Any], size: int, pad_id: int) -> dict[str, Tensor]:
    """One pack of ``samples``, as :class:`PackedSamples` describes it."""
    tokens: list[int] = []
    labels: list[int] = []
    positions: list[int] = []
    lengths: list[int] = []
    for sample in samples:
        length = len(sample["tokens"])
        tokens += sample["tokens"]
        labels += [IGNORE_INDEX, *sample["labels"][1:]]
        positions += range(length)
        lengths.append(length)
    padding = size - len(tokens)
    if padding < 0:
        raise ValueError(f"samples of {len(tokens)} tokens do not fit into a pack of {size}")
    if padding:
        tokens += [pad_id] * padding
        labels += [IGNORE_INDEX] * padding
        positions += range(padding)
        lengths.append(padding)
    return {
        "tokens": torch.tensor(tokens),
        "labels": torch.tensor(labels),
        "input_pos": torch.tensor(positions),
        "seq_lens": torch.tensor(lengths),
        "padding": torch.tensor(padding),
    }


def lengths_of(count: int, length: Callable[[int], int | None]) -> list[int]:
    """Tokens of ``count`` samples, with a progress bar.

    Args:
        count: of the samples.
        length: of one, 0 to leave it out; None for it and all that follow.
    """
    from tqdm import tqdm

    lengths: list[int] = []
    # A bar appears on a terminal only, and only where reading takes its time.
    for number in tqdm(range(count), desc="packing", unit=" samples", delay=1, leave=False, disable=None):
        tokens = length(number)
        if tokens is None:
            break
        lengths.append(tokens)
    return lengths + [0] * (count - len(lengths))


def _length(dataset: Any, number: int) -> int:
    try:
        return len(dataset[number]["tokens"])
    except RowError as error:
        raise UserError(f"{_where(dataset, number)}: {error}; mend the row or leave it out") from error


def _where(dataset: Any, number: int) -> str:
    where = getattr(dataset, "where", None)
    return where(number) if where is not None else f"sample {number}"

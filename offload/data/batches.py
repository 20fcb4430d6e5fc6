"""Data sets, batches and their order.

The order is a pure function of seed, epoch and position, so that a run which resumes in the middle of an
epoch sees exactly the batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
import math
import multiprocessing.connection
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Dataset

from offload.component import resolve
from offload.data.labels import shift_labels
from offload.data.mixture import epoch_order
from offload.data.packing import PackedSamples
from offload.data.rows import BadRow, Rows, Samples, Tally
from offload.data.scan import (
    SCAN_SECONDS,
    bad_rows_error,
    check_labels,
    packs_tally,
    read_rows,
    skipped_note,
    unread_note,
)
from offload.data.sft import sft_dataset, shown
from offload.data.source import described, open_dataset
from offload.data.tokenizer import ChatTokenizer
from offload.errors import UserError
from offload.models.torchtune.datasets import block_causal_mask, is_packed, supports_flex_attention

_DEATH_SECONDS = 2.0
# Characters of the first sample that are shown: of a turn, and of all.
_LONGEST_PART, _LONGEST_SAMPLE = 400, 1200


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        inputs: the model's keyword arguments (tokens [batch, tokens], mask, input_pos, document_ends,
            longest_document).
        labels: int64 [batch, tokens], shifted: position t holds the token that follows t.
        num_tokens: tokens that are not padding.
        num_labels: labels that count in the loss.
        sample_length: mean tokens of a sample, packed or not; attention's cost grows with it.
        documents: int64 [batch, tokens], which sample of its pack each token belongs to, where the mask is made of
            it on the device (:func:`document_mask`).
    """

    inputs: dict[str, Any]
    labels: Tensor
    num_tokens: int
    num_labels: int
    sample_length: float
    documents: Tensor | None = None

    def without_labels(self, ignore_index: int) -> Batch:
        """The same tokens, of which nothing counts."""
        return dataclasses.replace(self, labels=torch.full_like(self.labels, ignore_index), num_tokens=0, num_labels=0)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory; :class:`torch.utils.data.DataLoader` calls it."""
        return self._map(lambda tensor: tensor.pin_memory())

    def to(self, device: torch.device) -> Batch:
        """The batch on ``device``.

        Copies from page-locked memory are queued on the current stream. PyTorch's allocator of that memory gives it
        to nobody else before they are done, so this batch may be dropped at once.
        """
        if device.type == "cpu":
            return self
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=True))
        if moved.documents is not None:
            moved.inputs["mask"] = document_mask(moved.documents)
        return moved

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        inputs = {key: change(value) if isinstance(value, Tensor) else value for key, value in self.inputs.items()}
        documents = None if self.documents is None else change(self.documents)
        return dataclasses.replace(self, inputs=inputs, labels=change(self.labels), documents=documents)


def document_mask(documents: Tensor) -> Any:
    """What a token of a pack may attend to, for flex attention: itself and what precedes it in its own sample.

    Args:
        documents: int64 [batch, tokens], which sample each token belongs to.

    Returns:
        A ``BlockMask`` on the same device; making it waits for nothing.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[batch, query] == documents[batch, key])

    size, tokens = documents.shape
    return create_block_mask(attends, size, None, tokens, tokens, device=documents.device)


class PackedCollate:
    """Packs of one length to the model's inputs, as torchtune's ``padded_collate_packed``.

    That one makes the mask for flex attention on the GPU while it collates, from memory that is not page-locked,
    which waits for the GPU and cannot be done in another process.

    Args:
        masks: the model takes a mask; otherwise it tells documents by their positions.
        has_flex_attention: leave the mask to :meth:`Batch.to` and tell the documents instead.
    """

    def __init__(self, masks: bool, has_flex_attention: bool) -> None:
        self._masks = masks
        self._has_flex_attention = has_flex_attention

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        inputs: dict[str, Any] = {
            name: torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "input_pos")
        }
        lengths = [sample["seq_lens"] for sample in samples]
        if not self._masks:
            ends = torch.cat(lengths).cumsum(0, dtype=torch.int32)
            inputs["document_ends"] = torch.nn.functional.pad(ends, (1, 0))
            inputs["longest_document"] = max(int(each.max()) for each in lengths)
            return inputs
        if self._has_flex_attention:
            inputs["documents"] = torch.stack([torch.arange(len(n)).repeat_interleave(n) for n in lengths])
        else:
            inputs["mask"] = block_causal_mask(lengths)
        return inputs


class Collate:
    """Samples to a :class:`Batch`; counts tokens before padding hides them.

    Args:
        collate_fn: the collator for these samples.
        padding_idx: the token that pads packed samples; None for samples that are not padded yet.
        ignore_index: label that does not count.
    """

    def __init__(self, collate_fn: Callable[[Any], dict[str, Any]], padding_idx: int | None, ignore_index: int):
        self._collate_fn = collate_fn
        self._padding_idx = padding_idx
        self._ignore_index = ignore_index

    @property
    def ignore_index(self) -> int:
        """The label that does not count."""
        return self._ignore_index

    @property
    def is_packed(self) -> bool:
        """The samples are packs."""
        return self._padding_idx is not None

    def __call__(self, samples: list[Any]) -> Batch | BadRow:
        """The batch of these samples; where one is a bad row, that."""
        bad = next((sample for sample in samples if isinstance(sample, BadRow)), None)
        if bad is not None:
            return bad
        num_tokens = sum(self._length(sample) for sample in samples)
        inputs = self._collate_fn(samples)
        labels = shift_labels(inputs.pop("labels"), self._ignore_index)
        count = int((labels != self._ignore_index).sum())
        num_samples = int((inputs["input_pos"] == 0).sum()) if self.is_packed else len(samples)
        documents = inputs.pop("documents", None)
        return Batch(inputs, labels, num_tokens, count, num_tokens / max(1, num_samples), documents)

    def _length(self, sample: Any) -> int:
        tokens = sample["tokens"]
        if self._padding_idx is None:
            return len(tokens)
        if "padding" in sample:
            return len(tokens) - int(sample["padding"])
        real = (torch.as_tensor(tokens) != self._padding_idx).nonzero()
        return 0 if len(real) == 0 else int(real[-1]) + 1


class Batches:
    """The micro-batches of every epoch, in an order that seed and epoch decide.

    Several processes share each micro-batch: all of them together see what one would with as many times the batch size.

    Args:
        dataset: a map-style data set.
        collate: makes a batch of samples.
        batch_size: samples per micro-batch and process; what is left at the end of an epoch is dropped.
        shuffle: permute the samples anew in each epoch.
        seed: of the permutations.
        num_workers: processes that load; 0 loads in this process.
        drop_last: drop a last batch that is not full. Otherwise each process gets as many batches as any other, one of
            them without labels where there are no samples left for it.
        rank: which part of each micro-batch is this process's.
        ranks: how many processes share it.
        pin_memory: batches are in page-locked memory, for a device that copies them while the host goes on.
        rows: where the samples come from, to tell where a bad one stands.
        mixture: ``(samples, passes per epoch)`` of each data set, where they are not all gone through once.

    Attributes:
        tally: what reading the samples before training told.
        notes: lines about that for the user.
        first_sample: the text of the first one, with what is trained of it between brackets, where that is known.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Collate,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
        drop_last: bool = True,
        rank: int = 0,
        ranks: int = 1,
        pin_memory: bool = False,
        rows: Sequence[Rows] = (),
        mixture: Sequence[tuple[int, float]] = (),
    ) -> None:
        self._dataset = dataset
        self._mixture = mixture if any(weight != 1.0 for _, weight in mixture) else ()
        self._collate = collate
        self.batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._num_workers = num_workers
        self._drop_last = drop_last
        self._rank, self._ranks = rank, ranks
        self._pin_memory = pin_memory
        self._rows = rows
        self._left_out: frozenset[int] = frozenset()
        self.tally = Tally()
        self.notes: list[str] = []
        self.first_sample: str | None = None

    @property
    def is_packed(self) -> bool:
        """The batches are of packs."""
        return self._collate.is_packed

    @property
    def num_rows(self) -> int:
        """Samples or packs, those that are left out included; their order depends on it."""
        return len(self._dataset)  # type: ignore[arg-type]

    @property
    def num_samples(self) -> int:
        """Of an epoch."""
        if self._mixture:
            # As many in every epoch, whichever of its samples a data set gives.
            most = math.ceil(max(weight for _, weight in self._mixture))
            return sum(round(size * weight) for size, weight in self._mixture) - most * len(self._left_out)
        return self.num_rows - len(self._left_out)

    @property
    def samples_per_batch(self) -> int:
        """Of a micro-batch of all processes."""
        return self.batch_size * self._ranks

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        full = self.num_samples / self.samples_per_batch
        return math.floor(full) if self._drop_last else math.ceil(full)

    @property
    def facts(self) -> dict[str, int]:
        """Counts of what was read before training."""
        return {
            "rows_read": self.tally.read,
            "rows_left_out": len(self.tally.bad),
            "samples_without_labels": self.tally.without_labels,
        }

    def leave_out(self, indices: Collection[int]) -> None:
        """Take samples out of every epoch; the others keep their order."""
        self._left_out = frozenset(indices)

    def order(self, epoch: int) -> list[int]:
        """The samples of ``epoch`` by their number.

        What is left out is taken out of the order of all: a run that met a bad row and goes on without it sees, in
        the rest of the epoch, what it would have seen.
        """
        size = self.num_rows
        if self._mixture:
            sizes, weights = zip(*self._mixture, strict=True)
            mixed = epoch_order(sizes, weights, seed=self._seed, epoch=epoch, shuffle=self._shuffle).tolist()
            return [index for index in mixed if index not in self._left_out][: self.num_samples]
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(size, generator=generator).tolist()
        else:
            order = list(range(size))
        return [index for index in order if index not in self._left_out] if self._left_out else order

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The micro-batches of ``epoch`` from number ``start`` on.

        Raises:
            UserError: at the batch that a row or a data worker failed to give.
        """
        order = self.order(epoch)
        firsts = [i * self.samples_per_batch + self._rank * self.batch_size for i in range(start, len(self))]
        batches = [order[first : first + self.batch_size] for first in firsts]
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=[batch or order[:1] for batch in batches],
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # The loader draws a seed for its workers; from here, it leaves the run's own generator alone.
            generator=torch.Generator().manual_seed(self._seed + epoch),
        )
        loaded = zip(self._load(loader), batches, strict=True)
        return (batch if mine else batch.without_labels(self._collate.ignore_index) for batch, mine in loaded)

    def _load(self, loader: DataLoader[Any]) -> Iterator[Batch]:
        try:
            with _ChildSignalsKept():
                iterator = iter(loader)
        except OSError as error:
            raise UserError(
                f"num_workers: {self._num_workers} data workers cannot be started ({error.strerror or error}); lower "
                "it (num_workers=0 loads in this process), or raise the limits of processes and memory"
            ) from error
        # One that died at once is no active child any more, so that multiprocessing would not tell of it.
        workers = getattr(iterator, "_workers", [])
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                dead = _dead_one(workers) if isinstance(error, (OSError, EOFError, RuntimeError)) else None
                if dead is None:
                    raise
                raise UserError(_dead_worker(dead)) from error
            if isinstance(batch, BadRow):
                tally = Tally(read=self.num_samples, bad=[batch])
                raise bad_rows_error(self._rows[batch.source].key, self._rows, tally)
            yield batch


class _ChildSignalsKept:
    """Keeps PyTorch from raising, wherever the main thread is, when a data worker dies.

    It would stop an optimizer in the middle of a step. A dead worker is noticed where its batch is waited for anyway.
    """

    def __enter__(self) -> None:
        self._is_main = threading.current_thread() is threading.main_thread()
        self._handler = signal.getsignal(signal.SIGCHLD) if self._is_main else None

    def __exit__(self, *_: object) -> None:
        if self._is_main and self._handler is not None:
            signal.signal(signal.SIGCHLD, self._handler)


def _dead_one(workers: Sequence[Any]) -> int | None:
    """The status with which one of the processes ended, if one did."""
    if not workers:
        return None
    # A connection breaks a moment before its process can be found dead.
    ended = multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=_DEATH_SECONDS)
    for worker in workers:
        if worker.sentinel in ended:
            worker.join()
            if worker.exitcode:
                return int(worker.exitcode)
    return None


def _dead_worker(exitcode: int) -> str:
    if exitcode == -signal.SIGBUS:
        return (
            "num_workers: a data worker ran out of shared memory (SIGBUS); enlarge /dev/shm (docker run "
            "--shm-size=8g), or load in this process with num_workers=0"
        )
    how = f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with status {exitcode}"
    hint = "; most often host memory ran out: lower num_workers" if exitcode == -signal.SIGKILL else ""
    return f"num_workers: a data worker {how}{hint}; num_workers=0 loads in this process"


def build_batches(
    section: DictConfig | Sequence[DictConfig],
    tokenizer: Any,
    *,
    key: str,
    collate_fn: str,
    ignore_index: int,
    device: torch.device | None = None,
    masks: bool = True,
    skips_bad_rows: bool = False,
    epoch: int = 0,
    start: int = 0,
    **options: Any,
) -> Batches:
    """Data set(s) of a config section as :class:`Batches`, read before training as far as that is cheap.

    Packing reads every row. Otherwise rows are read in the order of training for ``SCAN_SECONDS``, or all of them
    where bad ones are to be left out, since their number decides the length of an epoch.

    Args:
        section: one data-set component, or a list of them (concatenated).
        tokenizer: passed to each component.
        key: the section's name, for messages.
        collate_fn: dotted path of the collator for samples that are not packed.
        ignore_index: label that does not count.
        device: what the batches are for; None for the CPU.
        masks: the model tells the documents of a pack by a mask, and not by their positions.
        skips_bad_rows: leave rows out that cannot be used, rather than raise.
        epoch: where training begins.
        start: the number of the batch in it with which training begins.
        **options: of :class:`Batches`.

    Raises:
        UserError: for a data set that cannot be read or mixes packed and other samples, for rows that cannot be used,
            and where no label would count.
    """
    kind = "cpu" if device is None else device.type

    is_list = isinstance(section, list | ListConfig)
    sections: list[Any] = list(section) if is_list else [section]
    rows: list[Rows] = []
    datasets: list[Any] = []
    weights: list[float] = []
    for number, one in enumerate(sections):
        at = f"{key}.{number}" if is_list else key

        def rows_of(opened: Any, section: DictConfig = one, at: str = at) -> Rows:
            rows.append(Rows(opened, section, at, len(rows), ignore_index))
            return rows[-1]

        packs = _leaves_packing_to_us(one)
        opened = open_dataset(_without_packing(one) if packs else one, tokenizer, at, rows_of)
        weights.append(float(getattr(opened, "weight", 1.0)))
        if is_packed(opened):
            datasets.append(opened)
            continue
        each = rows_of(opened)
        datasets.append(each)
        if packs:
            if getattr(tokenizer, "max_seq_len", None) is None:
                raise UserError(f"{at}.packed: packs are as long as tokenizer.max_seq_len, which is not set; set it")
            lengths = each.lengths()
            if any(lengths):
                datasets[-1] = PackedSamples(each, tokenizer.max_seq_len, pad_id=tokenizer.pad_id, lengths=lengths)
    packed = [is_packed(dataset) or isinstance(dataset, PackedSamples) for dataset in datasets]
    if any(packed) and not all(packed):
        raise UserError(f"{key}: packed and other data sets cannot be mixed; give all of them the same packed=…")
    dataset: Any
    if all(packed):
        dataset = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
        has_flex_attention = masks and kind == "cuda" and supports_flex_attention()
        collate = Collate(PackedCollate(masks, has_flex_attention), datasets[0].padding_idx, ignore_index)
    else:
        dataset = Samples(rows)
        function = resolve(collate_fn, key="collate_fn")
        collate = Collate(_PaddingCollate(function, tokenizer.pad_id, ignore_index), None, ignore_index)
    mixture = [(len(each), weight) for each, weight in zip(datasets, weights, strict=True)]
    batches = Batches(dataset, collate, pin_memory=kind != "cpu", rows=rows, mixture=mixture, **options)

    order = batches.order(epoch)[start * batches.samples_per_batch :]
    if all(packed):
        tally = packs_tally(dataset, order, [each.tally for each in rows], ignore_index)
    elif skips_bad_rows:
        tally = read_rows(dataset, batches.order(epoch), ignore_index=ignore_index, seconds=None)
    else:
        tally = read_rows(dataset, order, ignore_index=ignore_index, seconds=SCAN_SECONDS)
        batches.notes += unread_note(key, tally, len(order), SCAN_SECONDS)
    if tally.bad:
        if not skips_bad_rows or tally.is_hopeless:
            raise bad_rows_error(key, rows, tally)
        batches.notes.append(skipped_note(key, rows, tally))
        if not all(packed):
            batches.leave_out([dataset.index_of(bad) for bad in tally.bad])
    if batches.num_samples == 0:
        raise UserError(f"{key}: {described(sections[0])} has no rows")
    batches.notes += check_labels(key, tally, getattr(tokenizer, "max_seq_len", None))
    for each in rows:
        batches.notes += each.notes()
    used = batches.order(epoch)[start * batches.samples_per_batch :]  # without what is left out
    if isinstance(tokenizer, ChatTokenizer) and used:
        batches.first_sample = shown(tokenizer, dataset[used[0]], longest=_LONGEST_PART, limit=_LONGEST_SAMPLE)
    batches.tally = tally
    return batches


def _leaves_packing_to_us(section: DictConfig) -> bool:
    """Whether a section describes packs of our own data sets, whose rows are looked at before they are packed."""
    return bool(section.get("packed")) and resolve(section["_component_"], key="dataset._component_") is sft_dataset


def _without_packing(section: DictConfig) -> DictConfig:
    plain = section.copy()
    plain["packed"] = False
    return plain


class _PaddingCollate:
    """A padding collator with its two settings bound (a class, so that workers can have it)."""

    def __init__(self, function: Callable[..., dict[str, Any]], padding_idx: int, ignore_index: int) -> None:
        self._function, self._padding_idx, self._ignore_index = function, padding_idx, ignore_index

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return self._function(samples, padding_idx=self._padding_idx, ignore_idx=self._ignore_index)

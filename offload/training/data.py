"""Data sets, batches and their order.

The order is a pure function of seed, epoch and position, so that a run which resumes in the middle of an
epoch sees exactly the batches that an uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from offload.component import resolve
from offload.errors import UserError
from offload.training.config import instantiate
from offload.training.loss import shift_labels


@dataclass
class Batch:
    """One micro-batch.

    Attributes:
        inputs: the model's keyword arguments (tokens [batch, tokens], mask, input_pos).
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
        has_flex_attention: leave the mask to :meth:`Batch.to` and tell the documents instead.
    """

    def __init__(self, has_flex_attention: bool) -> None:
        self._has_flex_attention = has_flex_attention

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        from torchtune.modules.attention_utils import create_block_causal_mask

        inputs: dict[str, Any] = {
            name: torch.stack([sample[name] for sample in samples]) for name in ("tokens", "labels", "input_pos")
        }
        lengths = [sample["seq_lens"] for sample in samples]
        if self._has_flex_attention:
            inputs["documents"] = torch.stack([torch.arange(len(n)).repeat_interleave(n) for n in lengths])
        else:
            inputs["mask"] = create_block_causal_mask(lengths)
        return inputs


class Collate:
    """Samples to a :class:`Batch`; counts tokens before padding hides them.

    Args:
        collate_fn: the collator for these samples: torchtune's, or :class:`PackedCollate`.
        padding_idx: the token that pads packed samples; None for samples that are not padded yet.
        ignore_index: label that does not count.
    """

    def __init__(self, collate_fn: Callable[[Any], dict[str, Any]], padding_idx: int | None, ignore_index: int):
        self._collate_fn = collate_fn
        self._padding_idx = padding_idx
        self._ignore_index = ignore_index

    def __call__(self, samples: list[dict[str, Any]]) -> Batch:
        num_tokens = sum(self._length(sample["tokens"]) for sample in samples)
        inputs = self._collate_fn(samples)
        labels = shift_labels(inputs.pop("labels"), self._ignore_index)
        num_labels = int((labels != self._ignore_index).sum())
        packed = self._padding_idx is not None
        num_samples = int((inputs["input_pos"] == 0).sum()) if packed else len(samples)
        documents = inputs.pop("documents", None)
        return Batch(inputs, labels, num_tokens, num_labels, num_tokens / max(1, num_samples), documents)

    def _length(self, tokens: Any) -> int:
        if self._padding_idx is None:
            return len(tokens)
        real = (torch.as_tensor(tokens) != self._padding_idx).nonzero()
        return 0 if len(real) == 0 else int(real[-1]) + 1


class Batches:
    """The micro-batches of every epoch, in an order that seed and epoch decide.

    Args:
        dataset: a map-style data set.
        collate: makes a batch of samples.
        batch_size: samples per micro-batch; what is left at the end of an epoch is dropped.
        shuffle: permute the samples anew in each epoch.
        seed: of the permutations.
        num_workers: processes that load; 0 loads in this process.
        drop_last: drop a last batch that is not full.
        pin_memory: batches are in page-locked memory, for a device that copies them while the host goes on.
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
        pin_memory: bool = False,
    ) -> None:
        self._dataset = dataset
        self._collate = collate
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._seed = seed
        self._num_workers = num_workers
        self._drop_last = drop_last
        self._pin_memory = pin_memory

    @property
    def num_samples(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        """Micro-batches per epoch."""
        full = self.num_samples / self._batch_size
        return math.floor(full) if self._drop_last else math.ceil(full)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The micro-batches of ``epoch`` from number ``start`` on."""
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        else:
            order = list(range(self.num_samples))
        batches = [order[i * self._batch_size : (i + 1) * self._batch_size] for i in range(start, len(self))]
        loader: DataLoader[Any] = DataLoader(
            self._dataset,
            batch_sampler=batches,
            collate_fn=self._collate,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            # The loader draws a seed for its workers; from here, it leaves the run's own generator alone.
            generator=torch.Generator().manual_seed(self._seed + epoch),
        )
        return iter(loader)


def build_batches(
    section: DictConfig | Sequence[DictConfig],
    tokenizer: Any,
    *,
    key: str,
    collate_fn: str,
    ignore_index: int,
    device: torch.device | None = None,
    **options: Any,
) -> Batches:
    """Data set(s) of a config section as :class:`Batches`.

    Args:
        section: one data-set component, or a list of them (concatenated).
        tokenizer: passed to each component.
        key: the section's name, for messages.
        collate_fn: dotted path of the collator for samples that are not packed.
        ignore_index: label that does not count.
        device: what the batches are for; None for the CPU.
        **options: of :class:`Batches`.

    Raises:
        UserError: for a data set that cannot be read or mixes packed and other samples.
    """
    from torchtune.datasets import ConcatDataset, PackedDataset
    from torchtune.utils._import_guard import _SUPPORTS_FLEX_ATTENTION

    kind = "cpu" if device is None else device.type

    sections: list[Any] = list(section) if isinstance(section, list | ListConfig) else [section]
    datasets = [_build_dataset(one, tokenizer, key) for one in sections]
    packed = [isinstance(dataset, PackedDataset) for dataset in datasets]
    if any(packed) and not all(packed):
        raise UserError(f"{key}: packed and other data sets cannot be mixed; give all of them the same packed=…")
    dataset = datasets[0] if len(datasets) == 1 else ConcatDataset(datasets)
    if all(packed):
        has_flex_attention = kind == "cuda" and _SUPPORTS_FLEX_ATTENTION
        collate = Collate(PackedCollate(has_flex_attention), datasets[0].padding_idx, ignore_index)
    else:
        function = resolve(collate_fn, key="collate_fn")
        collate = Collate(_PaddingCollate(function, tokenizer.pad_id, ignore_index), None, ignore_index)
    return Batches(dataset, collate, pin_memory=kind != "cpu", **options)


class _PaddingCollate:
    """torchtune's padding collators with their two settings bound (a class, so that workers can have it)."""

    def __init__(self, function: Callable[..., dict[str, Any]], padding_idx: int, ignore_index: int) -> None:
        self._function, self._padding_idx, self._ignore_index = function, padding_idx, ignore_index

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        return self._function(samples, padding_idx=self._padding_idx, ignore_idx=self._ignore_index)


def _build_dataset(section: DictConfig, tokenizer: Any, key: str) -> Any:
    try:
        return instantiate(section, tokenizer)
    except UserError:
        raise
    except Exception as error:
        # `datasets` and pyarrow raise their own exceptions for unreadable files, without a common base.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        first = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
        files = section.get("data_files")
        where = _broken_json_line(files) or f"{files or section.get('source')} cannot be read: {first}"
        raise UserError(f"{key}: {where}; mend the data or choose another with {key}.data_files=…") from error


def _broken_json_line(path: Any) -> str | None:
    """Which line of a JSON-lines file is broken; pyarrow tells a row of a block, if anything."""
    if not isinstance(path, str) or not path.endswith(".jsonl") or not os.path.isfile(path):
        return None
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            try:
                json.loads(line or "null")
            except ValueError as error:
                return f"{path}, line {number} is not JSON ({error})"
    return None

"""The order of several data sets with weights."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
import torch

from offload.data.mixture import epoch_order
from offload.errors import UserError

SEED = 7


def test_weights_of_one_are_a_permutation_of_all():
    order = epoch_order([5, 8], seed=SEED, epoch=3)
    assert torch.equal(order, torch.randperm(13, generator=torch.Generator().manual_seed(SEED + 3)))
    assert epoch_order([5, 8], seed=SEED, epoch=3, shuffle=False).tolist() == list(range(13))


@pytest.mark.parametrize("shuffle", [True, False])
def test_weights_say_how_often_a_data_set_is_gone_through(shuffle):
    lengths, weights = [10, 8, 6], [2.5, 0.25, 1]
    seen = Counter()
    for epoch in range(4):
        order = epoch_order(lengths, weights, seed=SEED, epoch=epoch, shuffle=shuffle).tolist()
        counted = Counter(order)
        assert [sum(counted[n] for n in part) for part in (range(10), range(10, 18), range(18, 24))] == [25, 2, 6]
        assert all(counted[n] in (2, 3) for n in range(10))
        seen += counted
    # Fractions take other samples in each epoch, until all had their turn.
    assert [seen[n] for n in range(10, 18)] == [1] * 8
    assert [seen[n] for n in range(10)] == [10] * 10


def test_the_order_is_a_function_of_seed_and_epoch_alone():
    def order(seed, epoch):
        return epoch_order([50, 30], [0.5, 1.5], seed=seed, epoch=epoch).tolist()

    assert order(1, 2) == order(1, 2)
    assert order(1, 2) != order(1, 3) and order(1, 2) != order(2, 2)
    program = (
        "from offload.data.mixture import epoch_order\n"
        "print(epoch_order([50, 30], [0.5, 1.5], seed=1, epoch=2).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == str(order(1, 2))


@pytest.mark.parametrize(("length", "weight"), [(3, 0), (3, -1), (3, 0.1), (3, float("nan"))])
def test_weights_that_take_nothing_are_refused(length, weight):
    with pytest.raises(UserError, match=r"dataset.weight: .* takes no sample of data set 2, which has 3"):
        epoch_order([5, length], [1, weight], seed=SEED, epoch=0)


@pytest.mark.parametrize(("length", "weight"), [(7, 3 / 7), (7, 5 / 7), (5, 1.4), (6, 0.5)])
def test_an_epoch_goes_on_where_the_last_one_ended(length, weight):
    """Also in the middle of a permutation: each round of the data has every sample once."""
    taken, epochs = round(length * weight), 2 * length
    drawn = []
    for epoch in range(epochs):
        part = epoch_order([length], [weight], seed=SEED, epoch=epoch, shuffle=False).tolist()
        assert len(part) == taken
        drawn += part[taken // length * length :]
    rounds = [sorted(drawn[begin : begin + length]) for begin in range(0, len(drawn), length)]
    assert rounds == [list(range(length))] * len(rounds)


def test_each_data_set_and_seed_takes_a_part_of_its_own():
    def part(seed, number):
        order = epoch_order([60, 60], [0.5, 0.5], seed=seed, epoch=0, shuffle=False).tolist()
        return [sample - 60 * number for sample in order[30 * number : 30 * number + 30]]

    parts = [part(seed, number) for seed in (1, 2) for number in (0, 1)]
    assert all(set(each) <= set(range(60)) for each in parts)
    assert len({tuple(sorted(each)) for each in parts}) == 4

"""Packs: which documents they hold, how they are kept apart, and gradients as if they were not packed."""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch.nn import functional

from offload.data.messages import RowError
from offload.data.packing import PackedSamples, lengths_of, packed, plan
from offload.errors import UserError

IGNORED = -100


def document(length, *, start=0, prompt=0):
    ids = list(range(start, start + length))
    return {"tokens": ids, "labels": [IGNORED] * prompt + ids[prompt:]}


def test_a_pack():
    pack = packed([document(3, start=10), document(2, start=20, prompt=1)], 8, pad_id=0)
    assert {name: value.tolist() for name, value in pack.items()} == {
        "tokens": [10, 11, 12, 20, 21, 0, 0, 0],
        "labels": [IGNORED, 11, 12, IGNORED, 21, IGNORED, IGNORED, IGNORED],
        "input_pos": [0, 1, 2, 0, 1, 0, 1, 2],
        "seq_lens": [3, 2, 3],
        "padding": 3,
    }
    full = packed([document(8)], 8, pad_id=0)
    assert full["seq_lens"].tolist() == [8] and full["padding"] == 0


def test_no_token_is_trained_to_begin_another_document():
    """Shifted, what a document's last token predicts is nothing."""
    pack = packed([document(3), document(4), document(2)], 12, pad_id=0)
    shifted = torch.cat([pack["labels"][1:], torch.tensor([IGNORED])])
    ends = pack["seq_lens"].cumsum(0) - 1
    assert (shifted[ends] == IGNORED).all()
    assert (shifted != IGNORED).sum() == 2 + 3 + 1


@pytest.mark.parametrize("method", ["best_fit", "in_order"])
@pytest.mark.parametrize("seed", range(5))
def test_a_plan_holds_every_document_once_and_no_pack_overflows(method, seed):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 3, 7, 31, 64]) for _ in range(200)]
    packs = plan(lengths, 64, method)
    assert sorted(number for pack in packs for number in pack) == [n for n, length in enumerate(lengths) if length]
    assert all(0 < sum(lengths[number] for number in pack) <= 64 for pack in packs)
    assert packs == plan(lengths, 64, method) and packs == sorted(packs)
    if method == "best_fit":
        assert len(packs) <= len(plan(lengths, 64, "in_order"))


def test_plans_by_hand():
    assert plan([5, 3, 4, 4, 2], 8, "in_order") == [[0, 1], [2, 3], [4]]
    assert plan([3, 5, 4, 6, 4, 2], 8) == [[0, 1], [2, 4], [3, 5]]
    assert plan([6, 2, 2, 5], 8, "best_fit") == [[0, 1], [2, 3]]


def test_packs_of_a_data_set():
    documents = [document(5), document(3, start=5), document(7, start=8)]
    packs = PackedSamples(documents, 8, pad_id=99)
    assert packs.packs == [[0, 1], [2]]
    assert packs[1]["tokens"].tolist() == [*range(8, 15), 99]
    assert packs.padding_idx == 99 and len(packs) == 2
    again = pickle.loads(pickle.dumps(packs))[0]
    assert all(torch.equal(value, again[name]) for name, value in packs[0].items())
    assert PackedSamples(documents, 8, pad_id=99, lengths=[5, 0, 7]).packs == [[0], [2]]


class Faulty(list):
    def __getitem__(self, index):
        if super().__getitem__(index) is None:
            raise RowError("it is odd")
        return super().__getitem__(index)

    def where(self, index):
        return f"file, line {index + 1}"


def test_a_bad_row_is_named():
    rows = Faulty([document(2), None, document(3)])
    with pytest.raises(UserError, match="^file, line 2: it is odd; mend the row or leave it out$"):
        PackedSamples(rows, 8, pad_id=0)


def test_what_does_not_fit_is_refused():
    with pytest.raises(UserError, match="sample 1: it has 9 tokens and does not fit into a pack of 8"):
        PackedSamples([document(2), document(9)], 8, pad_id=0)
    with pytest.raises(UserError, match="no sample to pack"):
        PackedSamples([document(0)], 8, pad_id=0)
    with pytest.raises(UserError, match="expected best_fit or in_order, got 'worst'"):
        PackedSamples([document(2)], 8, pad_id=0, method="worst")
    with pytest.raises(ValueError, match="samples of 9 tokens do not fit into a pack of 8"):
        packed([document(4), document(5)], 8, pad_id=0)


# Sliding windows are shorter than the documents, so that both kinds of mask have something to hide.
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "head_dim": 8},
    # Its two kinds of layers turn positions by two bases.
    "gemma3_text": {"sliding_window": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
}


def tiny(family, attention):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        **FAMILIES[family],
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)


def summed_loss(model, tokens, labels, positions=None):
    """Over the labels that count, shifted."""
    logits = model(input_ids=tokens[None], position_ids=positions, use_cache=False).logits[0]
    return functional.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum")


DOCUMENTS = ((9, 3), (2, 0), (6, 0), (11, 5))
TOKENS = sum(length for length, _ in DOCUMENTS)


def documents():
    draw = random.Random(0)
    found = []
    for length, prompt in DOCUMENTS:
        ids = [draw.randrange(97) for _ in range(length)]
        found.append({"tokens": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return found


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("size", [TOKENS, TOKENS + 4], ids=["full", "padded"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_documents_alone(family, attention, size):
    """fp32; positions alone keep documents apart in transformers' masks.

    The bound is 2e-6 of each tensor's largest gradient: sums of some hundred products in another order.
    """
    model = tiny(family, attention)
    for one in documents():
        summed_loss(model, torch.tensor(one["tokens"]), torch.tensor(one["labels"])).backward()
    expected = gradients(model)

    pack = packed(documents(), size, pad_id=0)
    summed_loss(model, pack["tokens"], pack["labels"], pack["input_pos"][None]).backward()
    found = gradients(model)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        difference = (found[name] - gradient).abs().max() / gradient.abs().max()
        assert difference < 2e-6, name

    # The comparison sees a pack whose documents attend to each other.
    summed_loss(model, pack["tokens"], pack["labels"]).backward()
    together = gradients(model)
    assert any((together[n] - g).abs().max() / g.abs().max() > 1e-3 for n, g in expected.items())


@pytest.mark.slow  # compiling flex attention for a CPU takes 20 s
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_flex_attention_keeps_documents_apart(family):
    """Logits; flex attention has no backward on a CPU."""
    model = tiny(family, "flex_attention").eval()
    pack = packed(documents(), 32, pad_id=0)
    with torch.no_grad():
        found = model(input_ids=pack["tokens"][None], position_ids=pack["input_pos"][None], use_cache=False).logits[0]
        alone = tiny(family, "eager").eval()
        expected = [alone(input_ids=torch.tensor([one["tokens"]]), use_cache=False).logits[0] for one in documents()]
    torch.testing.assert_close(found[: sum(map(len, expected))], torch.cat(expected), rtol=0, atol=1e-5)


def test_torchtunes_models_take_the_same_packs():
    """Its mask is made of seq_lens; the bound as above."""
    from offload import torchao_shim

    torchao_shim.install()
    from torchtune.models.llama2 import llama2
    from torchtune.modules.attention_utils import create_block_causal_mask

    torch.manual_seed(0)
    model = llama2(vocab_size=97, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)

    def loss(tokens, labels, **options):
        logits = model(tokens[None], **options)[0]
        return functional.cross_entropy(logits[:-1], labels[1:], ignore_index=IGNORED, reduction="sum")

    for one in documents():
        loss(torch.tensor(one["tokens"]), torch.tensor(one["labels"])).backward()
    expected = gradients(model)
    pack = packed(documents(), 32, pad_id=0)
    mask = create_block_causal_mask([pack["seq_lens"]])
    loss(pack["tokens"], pack["labels"], mask=mask, input_pos=pack["input_pos"][None]).backward()
    for name, gradient in gradients(model).items():
        assert (gradient - expected[name]).abs().max() / expected[name].abs().max() < 2e-6, name


def best_fit(lengths, size):
    """Room that is left in each pack, by looking at all of them."""
    rooms = []
    for length in sorted(filter(None, lengths), reverse=True):
        fitting = [index for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(size - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_is_what_looking_at_all_packs_finds(seed):
    chance = random.Random(seed)
    size = 40
    lengths = [chance.choice((0, 1, 1, 2, 3, 13, 20, chance.randint(1, size))) for _ in range(200)]
    packs = plan(lengths, size)
    assert sorted(number for pack in packs for number in pack) == [n for n, length in enumerate(lengths) if length]
    assert sorted(size - sum(lengths[number] for number in pack) for pack in packs) == best_fit(lengths, size)


def test_a_document_may_fill_a_pack():
    packs = PackedSamples([document(4), document(2), document(2)], 4, pad_id=0)
    assert packs.packs == [[0], [1, 2]] and packs[0]["padding"] == 0
    with pytest.raises(UserError, match="it has 4 tokens and does not fit into a pack of 3"):
        PackedSamples([document(4)], 3, pad_id=0)


def test_what_follows_the_last_that_is_wanted_is_left_out():
    asked = []

    def length(number):
        asked.append(number)
        return None if number == 2 else 5

    assert lengths_of(4, length) == [5, 5, 0, 0] and asked == [0, 1, 2]

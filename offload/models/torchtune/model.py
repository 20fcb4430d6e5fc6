"""A decoder of torchtune, as the recipes see it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from offload.models.blocks import untied
from offload.models.merging import MergedWeights
from offload.models.size import Size, matmul_parameters
from offload.models.torchtune import lora


class TorchtuneModel:
    """A :class:`offload.models.protocol.CausalLM` around a ``TransformerDecoder`` of torchtune.

    Args:
        module: the decoder.
    """

    has_separate_head = True

    def __init__(self, module: Any) -> None:
        self.module: nn.Module = module
        self._decoder = module

    def hidden(self, inputs: Mapping[str, Any]) -> Tensor:
        # torchtune 0.6.1 has no switch for it: the decoder's own unembed() would apply the head.
        self._decoder.unembed = self._decoder.norm.__call__
        try:
            hidden: Tensor = self._decoder(**inputs)
        finally:
            del self._decoder.unembed
        return hidden

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._decoder.output(hidden)
        return logits

    def head_parameters(self) -> list[nn.Parameter]:
        head = self._decoder.output
        # A tied head is no module of its own.
        return list(getattr(head, "tied_module", head).parameters())

    def blocks(self) -> list[nn.Module]:
        embedding = self._decoder.tok_embeddings
        return [*untied([embedding], self.head_parameters()), *self._decoder.layers]

    def logits(self, inputs: Mapping[str, Any]) -> Tensor:
        logits: Tensor = self._decoder(**inputs)
        return logits

    def check_packs(self) -> None:
        return None  # each of its layers attends by the mask that it is given

    def settle(self) -> None:
        return None

    def checkpoint_activations(self) -> None:
        from torchtune.modules import TransformerSelfAttentionLayer
        from torchtune.training import set_activation_checkpointing

        set_activation_checkpointing(self._decoder, auto_wrap_policy={TransformerSelfAttentionLayer})

    def offload_activations(self) -> contextlib.AbstractContextManager[Any]:
        from torchtune.training import get_act_offloading_ctx_manager

        context: contextlib.AbstractContextManager[Any] = get_act_offloading_ctx_manager(self._decoder, True)
        return context

    def compile_layers(self) -> None:
        from torchtune.training import compile_model

        compile_model(self._decoder, verbose=False)

    def size(self) -> Size:
        decoder = self._decoder
        # torchtune ties the head to the embedding without registering it: TiedLinear is no nn.Module.
        embedding = getattr(getattr(decoder, "output", None), "tied_module", None)
        frozen, trainable = matmul_parameters(decoder, tied=getattr(embedding, "weight", None))
        return Size(frozen, trainable, len(decoder.layers), decoder.num_heads, decoder.head_dim)

    @property
    def max_seq_len(self) -> int | None:
        limit: int | None = getattr(self._decoder, "max_seq_len", None)
        return limit


class AdaptedTorchtuneModel(TorchtuneModel):
    """A frozen decoder with LoRA layers that train, by one of torchtune's ``lora_*`` builders."""

    def adapter_weights(self) -> dict[str, Tensor]:
        return lora.adapter_weights(self.module)

    def adapter_config(self) -> dict[str, Any]:
        return lora.adapter_config(self.module)

    def merged_weights(self, *, goes_on: bool = False) -> MergedWeights:
        return lora.merged_weights(self.module, goes_on=goes_on)

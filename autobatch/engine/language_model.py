"""A causal language model whose forward pass ends in the loss."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from autobatch.engine.loss import Head, token_loss, zero_loss
from autobatch.engine.tensors import MicroBatchTensors


class LanguageModel(torch.nn.Module):
    """A causal language model whose forward pass returns the summed loss.

    The loss is part of the forward pass, so that under FSDP the head's weight is whole there.
    """

    def __init__(
        self,
        causal_lm: PreTrainedModel,
        *,
        loss_kernel: str,
        chunk: int,
        use_varlen: bool,
        max_length: int | None,
    ) -> None:
        """`max_length`: a bound on rows, so that kernels and compiled code need not change."""
        super().__init__()
        self._use_varlen = use_varlen
        self._max_length = max_length
        self.causal_lm = causal_lm
        self._loss_kernel = loss_kernel
        self._chunk = chunk

    def forward(self, batch: MicroBatchTensors) -> torch.Tensor:
        """Return the float32 sum of the cross-entropies of the micro-batch's labels, ()."""
        hidden = self.hidden_states(batch).flatten(0, 1)  # (T, H)
        head = self._head()
        if batch.num_label_tokens == 0:
            return zero_loss(hidden[:1], head)
        return token_loss(
            hidden.index_select(0, batch.label_index),
            batch.labels,
            head,
            kernel=self._loss_kernel,
            chunk=self._chunk,
        )

    def hidden_states(self, batch: MicroBatchTensors) -> torch.Tensor:
        """Return the decoder's last hidden states: (1, T, H) packed, (N, L, H) padded."""
        rows: dict[str, Any] = {}
        if batch.cu_seqlens is not None and self._use_varlen:
            longest = self._max_length or max(batch.row_lengths)
            rows = {"cu_seqlens": batch.cu_seqlens, "longest_row": longest}
        elif batch.cu_seqlens is not None:
            rows = {"row_lengths": batch.row_lengths}
        output = self.causal_lm.get_decoder()(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            **rows,
        )
        return output[0]

    def _head(self) -> Head:
        lm_head = self.causal_lm.get_output_embeddings()
        config = self.causal_lm.config
        scale = getattr(config, "logit_scale", None) or 1.0  # Cohere multiplies
        scale /= getattr(config, "logits_scaling", None) or 1.0  # Granite divides
        return Head(
            weight=lm_head.weight,
            bias=getattr(lm_head, "bias", None),
            softcap=getattr(config, "final_logit_softcapping", None),
            scale=scale,
        )

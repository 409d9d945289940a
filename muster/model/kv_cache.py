"""Cache of a decoder, with which each new token costs one position: keys and values of attention, states of linear
attention."""

from functools import partial
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.model.attention import Attention
from muster.model.chunked_recurrence import Operands, read_segment
from muster.model.decoder import Decoder
from muster.model.linear_attention import LinearAttention
from muster.model.piecewise_attention import whole_scores_attention

LayerCache = dict[str, Tensor]


class KvCache:
    """Cache for a batch of texts that a whole decoder reads piece by piece, at most `capacity` positions of each.

    All texts end at the same position: text b begins at `starts_B[b]`, and the positions before it are padding that no
    token attends to. Rotary positions count from the padding on, since only their differences matter. The decoder reads
    through the cache inside the `with` block; its weights may be those of a tensor-parallel rank.
    """

    def __init__(self, model: Decoder, starts_B: Tensor, capacity: int) -> None:
        self.model = model
        self.starts_B = starts_B
        self.capacity = capacity
        self.length = 0
        """Positions read so far."""
        self._padded = bool(starts_B.any())
        self._visible: dict[int | None, Tensor | None] = {}

    def __enter__(self) -> "KvCache":
        for attention in self._attentions():
            attention.core_attention = partial(self._cached_attention, {})  # type: ignore[method-assign]
        for linear in self._linear_attentions():
            linear.attend = partial(self._continued_recurrence, {})  # type: ignore[method-assign]
        self.model.position_state.starts_B = self.starts_B if self._padded else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for attention in self._attentions():
            del attention.core_attention
        for linear in self._linear_attentions():
            del linear.attend
        self.model.position_state.offset = 0
        self.model.position_state.starts_B = None

    def _attentions(self) -> list[Attention]:
        return [part for part in self.model.modules() if isinstance(part, Attention)]

    def _linear_attentions(self) -> list[LinearAttention]:
        return [part for part in self.model.modules() if isinstance(part, LinearAttention)]

    @torch.no_grad()
    def read(self, tokens_BS: Tensor) -> Tensor:
        """Read tokens that follow those read before, and return the logits (B, V) after the last one."""
        end = self.length + tokens_BS.shape[1]
        assert end <= self.capacity, f"{end} positions don't fit in {self.capacity}"
        self._visible = {window: self._visibility_mask(window, end) for window in self._windows()}
        self.model.position_state.offset = self.length
        logits_BV = self.model.next_logits(tokens_BS)
        self.length = end
        return logits_BV

    def _windows(self) -> set[int | None]:
        return {attention.window for attention in self._attentions()}

    def _visibility_mask(self, window: int | None, end: int) -> Tensor | None:
        """Return a mask of the keys that each new position attends to, (B, 1, S, K); None: all.

        A padding position attends to itself, since the softmax over nothing is not a number.
        """
        if end == self.length + 1 and not self._padded and (window is None or end <= window):
            return None
        key_K = torch.arange(end, device=self.starts_B.device)
        query_S1 = key_K[self.length :].unsqueeze(1)
        near_SK = key_K <= query_S1 if window is None else (key_K <= query_S1) & (key_K > query_S1 - window)
        visible_BSK = near_SK & (key_K >= self.starts_B.view(-1, 1, 1)) | (key_K == query_S1)
        return visible_BSK.unsqueeze(1)

    def _cached_attention(
        self,
        layer_cache: LayerCache,
        q_BHSd: Tensor,
        k_BKSd: Tensor,
        v_BKSd: Tensor,
        _: Tensor | None,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Return attention of the new positions to all so far, as far as the window reaches; `layer_cache` is one
        layer's."""
        end = self.length + k_BKSd.shape[2]
        whole = []
        for name, new in (("keys", k_BKSd), ("values", v_BKSd)):
            if name not in layer_cache:
                layer_cache[name] = new.new_empty(*new.shape[:2], self.capacity, new.shape[3])
            layer_cache[name][:, :, self.length : end] = new
            whole.append(layer_cache[name][:, :, :end])
        visible = self._visible[window]
        if softcap is not None or sinks_H is not None:
            keys, values = whole
            return whole_scores_attention(
                q_BHSd, keys, values, visible, scale or q_BHSd.shape[-1] ** -0.5, softcap, sinks_H
            )
        grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
        return F.scaled_dot_product_attention(q_BHSd, *whole, attn_mask=visible, scale=scale, enable_gqa=grouped)

    def _continued_recurrence(
        self,
        layer_cache: LayerCache,
        attention: LinearAttention,
        qkv: tuple[Tensor, ...],
        logits: Tensor | None,
        _: object,
    ) -> Tensor:
        """Return the outputs of the new positions, which follow the state of those before; a text begins anew behind
        its padding."""
        begins_BS = None
        if self._padded:
            new_S = torch.arange(self.length, self.length + qkv[0].shape[2], device=self.starts_B.device)
            begins_BS = new_S == self.starts_B.unsqueeze(1)
        out, layer_cache["state"] = read_segment(
            Operands(qkv[0], qkv[1], qkv[2], logits, begins_BS), layer_cache.get("state")
        )
        return out


class UncachedReader:
    """Stand-in for a cache with a plugin's layers, whose state is unknown: each token reads the whole text again."""

    def __init__(self, model: Decoder, starts_B: Tensor, capacity: int) -> None:
        assert not starts_B.any(), "one text at a time"
        self.model = model
        self.length = 0
        self._read: Tensor | None = None

    def __enter__(self) -> "UncachedReader":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.no_grad()
    def read(self, tokens_BS: Tensor) -> Tensor:
        """Read tokens that follow those read before, and return the logits (B, V) after the last one."""
        self._read = tokens_BS if self._read is None else torch.cat((self._read, tokens_BS), 1)
        self.length = self._read.shape[1]
        return self.model.next_logits(self._read)

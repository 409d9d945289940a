"""Keys and values of what a decoder has read, kept so that each new token costs one position."""

from functools import partial
from types import TracebackType

import torch
import torch.nn.functional as F
from torch import Tensor

from muster.model.decoder import Attention, Decoder

LayerCache = dict[str, Tensor]


class KvCache:
    """A batch of texts that a whole decoder reads bit by bit, at most `capacity` positions of each.

    The texts end at the same position: text b begins at `starts_B[b]`, and what is read before that is padding, at
    which nobody looks. Rotary positions count from the padding on, since only their differences matter. The decoder
    reads through the cache between `with` and its end; its weights may be those of a tensor-parallel rank.
    """

    def __init__(self, model: Decoder, starts_B: Tensor, capacity: int) -> None:
        self.model, self.starts_B, self.capacity = model, starts_B, capacity
        self.length = 0
        """Positions read so far."""
        self._padded = bool(starts_B.any())
        self._visible: dict[int | None, Tensor | None] = {}

    def __enter__(self) -> "KvCache":
        for attention in self._attentions():
            attention.core_attention = partial(self._cached_attention, {})  # type: ignore[method-assign]
        self.model.position_state.starts_B = self.starts_B if self._padded else None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for attention in self._attentions():
            del attention.core_attention
        self.model.position_state.offset, self.model.position_state.starts_B = 0, None

    def _attentions(self) -> list[Attention]:
        return [part for part in self.model.modules() if isinstance(part, Attention)]

    @torch.no_grad()
    def read(self, tokens_BS: Tensor) -> Tensor:
        """The logits (B, V) after the last of these tokens, which follow those that were read before."""
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
        """Which keys each new position may look at, (B, 1, S, K); None: all. A position of the padding sees itself, as
        the softmax of nothing is no number."""
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
    ) -> Tensor:
        """Attention of the new positions to all so far, as far as the window reaches; `store` is what one layer
        keeps."""
        end = self.length + k_BKSd.shape[2]
        whole = []
        for name, new in (("keys", k_BKSd), ("values", v_BKSd)):
            if name not in layer_cache:
                layer_cache[name] = new.new_empty(*new.shape[:2], self.capacity, new.shape[3])
            layer_cache[name][:, :, self.length : end] = new
            whole.append(layer_cache[name][:, :, :end])
        grouped = q_BHSd.shape[1] != k_BKSd.shape[1]
        return F.scaled_dot_product_attention(q_BHSd, *whole, attn_mask=self._visible[window], enable_gqa=grouped)


class UncachedReader:
    """Stands for a cache where layers are a plugin's, whose state nobody knows: all is read again for each token."""

    def __init__(self, model: Decoder, starts_B: Tensor, capacity: int) -> None:
        assert not starts_B.any(), "one text at a time"
        self.model, self.length = model, 0
        self._read: Tensor | None = None

    def __enter__(self) -> "UncachedReader":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @torch.no_grad()
    def read(self, tokens_BS: Tensor) -> Tensor:
        """As `KvCache.read`."""
        self._read = tokens_BS if self._read is None else torch.cat((self._read, tokens_BS), 1)
        self.length = self._read.shape[1]
        return self.model.next_logits(self._read)

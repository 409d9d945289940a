"""Text generation with a trained model, token by token."""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from muster.model.decoder import Decoder
from muster.model.init import keyed_generator
from muster.model.kernels import accumulation_dtype
from muster.model.kv_cache import KvCache, UncachedReader
from muster.spec.errors import ConfigError
from muster.spec.text_generation import SamplingParams


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams,
    context: int,
    stop_ids: Collection[int] = (),
    is_complete: Callable[[Sequence[int]], bool] | None = None,
    gather_vocab: Callable[[Tensor], Tensor] | None = None,
    skipped: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return at most `max_new_tokens` new token ids after each prompt, none from the first of `stop_ids` on.

    The continuation of a prompt doesn't depend on the others, and a draw depends on (seed, position in the text) alone.
    `is_complete` tells of new ids that nothing needs to follow them. The model sees at most `context` tokens: a longer
    text continues from the later half of them. `gather_vocab` turns a
    tensor-parallel rank's logits into those of the whole vocabulary. `skipped`: tokens of each text that lie before its
    prompt, and count for positions alone.

    Raises ConfigError on a prompt that is empty or longer than `context`.
    """
    _check(prompts, context)
    skipped = skipped or [0] * len(prompts)
    if model.has_plugin_layers and len(prompts) > 1:  # one by one, since such layers see the padding of a batch
        alone = [
            generate(model, [prompt], max_new_tokens, sampling, context, stop_ids, is_complete, gather_vocab, [before])
            for prompt, before in zip(prompts, skipped, strict=True)
        ]
        return [new for (new,) in alone]
    ends = frozenset(stop_ids)

    def is_done(new: Sequence[int]) -> bool:
        return not ends.isdisjoint(new) or (is_complete is not None and is_complete(new))

    texts, first, made = [list(prompt) for prompt in prompts], [0] * len(prompts), 0
    while made < max_new_tokens:
        windows = [text[start:] for text, start in zip(texts, first, strict=True)]
        width = max(map(len, windows))
        starts = [width - len(window) for window in windows]
        new = [[0] * start + window for start, window in zip(starts, windows, strict=True)]
        make_cache = UncachedReader if model.has_plugin_layers else KvCache
        with make_cache(model, _ids(model, starts), min(context, width + max_new_tokens - made)) as cache:
            while made < max_new_tokens and cache.length + len(new[0]) <= context:
                logits_BV = cache.read(_ids(model, new))
                if gather_vocab is not None:
                    logits_BV = gather_vocab(logits_BV)
                logits_BV = logits_BV.to(accumulation_dtype(logits_BV.dtype)).cpu()
                for text, before, logits_V in zip(texts, skipped, logits_BV, strict=True):
                    text.append(sample_token(logits_V, sampling, before + len(text)))
                made += 1
                new = [text[-1:] for text in texts]
                if all(is_done(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)):
                    made = max_new_tokens
        for row, text in enumerate(texts):
            if len(text) - first[row] > context:
                first[row] = len(text) - max(1, context // 2)
    return [_cut_at_stop(text[len(prompt) :], ends) for text, prompt in zip(texts, prompts, strict=True)]


def sample_token(logits_V: Tensor, sampling: SamplingParams, position: int) -> int:
    """Return the id of the token at `position` of a text: the likeliest at temperature 0, else a draw from the top_k
    likeliest, and of those from the likeliest that together have the probability top_p (arXiv:1904.09751 §3.1)."""
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    if 0 < sampling.top_k < len(logits_V):
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(sampling.top_k).values[-1], float("-inf"))
    p_V = torch.softmax(logits_V / sampling.temperature, dim=-1)
    if sampling.top_p < 1:
        sorted_V, order_V = p_V.sort(descending=True, stable=True)
        likelier_V = sorted_V.cumsum(0) - sorted_V
        p_V = p_V.index_fill(0, order_V[likelier_V >= sampling.top_p], 0.0)
    return int(torch.multinomial(p_V, 1, generator=keyed_generator(sampling.seed, f"sample/{position}")))


def _ids(model: Decoder, ids: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(ids, device=next(model.parameters()).device)


def _check(prompts: Sequence[Sequence[int]], context: int) -> None:
    for prompt in prompts:
        if not prompt:
            raise ConfigError("generation needs a prompt of at least one token, got an empty one")
        if len(prompt) > context:
            raise ConfigError(
                f"a prompt has {len(prompt)} tokens, but the model was trained on sequences of {context}:"
                f" expected {context} at most"
            )


def _cut_at_stop(ids: list[int], ends: Collection[int]) -> list[int]:
    return ids[: next((at for at, number in enumerate(ids) if number in ends), len(ids))]

"""TinyBERT's architecture for masked language modelling, from random weights (Jiao et al., 2020; Devlin et al., 2019).

4 layers, 312 wide, 12 heads, 1,200 in the feed-forward: with BERT's vocabulary of 30,522 pieces 14,252,592 parameters
below the head, and 14,381,394 with it; the head's last map is the table of word embeddings itself.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

_PAD = 0
_EPSILON = 1e-12  # of layer norms, as BERT's
_DEVIATION = 0.02  # of initial weights


class Embedding(nn.Module):
    """Words, positions and the one kind of segment there is, added and normalised."""

    def __init__(self, vocabulary: int, positions: int, width: int, dropout: float) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width, padding_idx=_PAD)
        self.positions = nn.Embedding(positions, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions.weight[: tokens.shape[1]] + self.segments.weight[0]
        out: Tensor = self.dropout(self.norm(self.words(tokens) + places))
        return out


class MaskedAttention(nn.Module):
    """Every token looks at every token that is not padding."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        query, key, value = (self._by_head(layer(x)) for layer in (self.query, self.key, self.value))
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + blocked
        mixed = self.dropout(scores.softmax(-1)) @ value
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Layer(nn.Module):
    """Attention, then a feed-forward map; each added to what came in, and normalised."""

    def __init__(self, width: int, heads: int, feed_forward: int, dropout: float) -> None:
        super().__init__()
        self.attention = MaskedAttention(width, heads, dropout)
        self.attention_norm = nn.LayerNorm(width, _EPSILON)
        self.wide = nn.Linear(width, feed_forward)
        self.narrow = nn.Linear(feed_forward, width)
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, blocked: Tensor) -> Tensor:
        x = self.attention_norm(x + self.dropout(self.attention(x, blocked)))
        out: Tensor = self.norm(x + self.dropout(self.narrow(functional.gelu(self.wide(x)))))
        return out


class Head(nn.Module):
    """From hidden states to a logit for every word piece; `bias` is its own, the map is the word embeddings."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.map = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width, _EPSILON)
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return functional.linear(self.norm(functional.gelu(self.map(x))), words, self.bias)


class TinyBERT(nn.Module):
    """(n, length) token numbers, 0 being padding -> (n, length, vocabulary) logits."""

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        layers: int = 4,
        width: int = 312,
        heads: int = 12,
        feed_forward: int = 1200,
        positions: int = 512,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if len(input_shape) != 1:
            raise ValueError(f"a network of tokens needs samples of shape (length,), got {input_shape}")
        if width % heads:
            raise ValueError(f"width = {width} must be a multiple of heads = {heads}")
        if input_shape[0] > positions:
            raise ValueError(f"positions = {positions} are fewer than the {input_shape[0]} tokens of a sample")
        self.embedding = Embedding(classes, positions, width, dropout)
        self.layers = nn.ModuleList(Layer(width, heads, feed_forward, dropout) for _ in range(layers))
        self.head = Head(classes, width)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        padding = (tokens == _PAD)[:, None, None, :]
        blocked = torch.where(padding, torch.finfo(x.dtype).min, 0.0).to(x.dtype)
        for layer in self.layers:
            x = layer(x, blocked)
        out: Tensor = self.head(x, self.embedding.words.weight)
        return out


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_DEVIATION)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()

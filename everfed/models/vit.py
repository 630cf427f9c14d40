"""Vision Transformer (Dosovitskiy et al., 2021): pre-norm blocks, exact GELU, learned positions, a class token.

Parameters have timm's names: `patch_embed.proj`, `cls_token`, `pos_embed`, `norm`, `head`, and in every block
`blocks.i.{norm1,attn.qkv,attn.proj,norm2,mlp.fc1,mlp.fc2}`, so that a file of timm's ViT fits one of the same size.

A forward pass in pieces, for methods that change it (prompts): `embed`, then `run_blocks`, then `norm` and `head`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Prefix = tuple[Tensor, Tensor]  # keys and values (n, length, width) that attention sees before those of the tokens
EPS = 1e-6  # of layer norms, as in timm


class Attention(nn.Module):
    """Multi-head self-attention; a prefix adds keys and values, but no queries, so the sequence keeps its length."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, prefix: Prefix | None = None) -> Tensor:
        queries, keys, values = self.qkv(x).chunk(3, dim=-1)
        if prefix is not None:
            keys, values = (torch.cat([p.to(t.dtype), t], 1) for p, t in zip(prefix, (keys, values), strict=True))
        mixed = functional.scaled_dot_product_attention(self._split(queries), self._split(keys), self._split(values))
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(n, length, width) -> (n, heads, length, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),  # of OpenAI's CLIP
}


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, activation: str) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class Block(nn.Module):
    """Attention and feed-forward network, each with a layer norm before it and a residual around it."""

    def __init__(self, width: int, heads: int, activation: str = "gelu") -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=EPS)
        self.mlp = FeedForward(width, 4 * width, activation)

    def forward(self, x: Tensor, prefix: Prefix | None = None) -> Tensor:
        x = x + self.attn(self.norm1(x), prefix)
        return x + self.mlp(self.norm2(x))


class Patches(nn.Module):
    """(n, channels, side, side) -> (n, patches, width)."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Prompts(nn.Module, ABC):
    """Learned prompts of a ViT (`everfed.models.prompts`), which use it to turn embedded tokens into features."""

    @abstractmethod
    def forward(self, vit: ViT, tokens: Tensor) -> Tensor:
        """(n, 1 + patches, width) -> (n, width)."""


class ViT(nn.Module):
    """patch: pixels a side. width, depth, heads: of the blocks. image: pixels a side to which images are resized inside
    the network (bilinear), 0 for the size they have. norm_pre: a layer norm before the blocks, and activation: one of
    ACTIVATIONS; CLIP's vision tower has the norm, OpenAI's with quick-gelu.

    The defaults, on 32x32 colour images, have 2,710,948 parameters with 100 classes. Features, the head's input, are
    the class token after the last layer norm.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        classes: int,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        image: int = 0,
        norm_pre: bool = False,
        activation: str = "gelu",
    ) -> None:
        super().__init__()
        self.image = _side(input_shape, patch, image)
        if width % heads:
            raise ValueError(f"width must be a multiple of heads; got width = {width}, heads = {heads}")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        self.activation = activation
        self.width = width
        self.patch_embed = Patches(input_shape[0], patch, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (self.image // patch) ** 2 + 1, width))
        self.norm_pre: nn.Module = nn.LayerNorm(width, eps=EPS) if norm_pre else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, heads, activation) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=EPS)
        self.head: nn.Module = nn.Linear(width, classes)
        self.prompts: Prompts | None = None
        self._draw()

    def _draw(self) -> None:
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """(n, width): the class token after the last layer norm, or what prompts make of the tokens."""
        tokens = self.embed(x)
        return self.class_token(tokens) if self.prompts is None else self.prompts(self, tokens)

    def converted(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """A weight file's tensors under this network's names. The epsilon of layer norms is that of the config;
        positions of another image size are interpolated."""
        config = config.get("vision_config", config)
        for layer in self.modules():
            if isinstance(layer, nn.LayerNorm):
                layer.eps = float(config.get("layer_norm_eps", layer.eps))
        wanted = str(config.get("hidden_act", self.activation)).replace("_", "-")
        if wanted != self.activation and wanted in ACTIVATIONS:
            raise ValueError(f"the file is of a network with activation = {wanted!r}; set model.activation to it")
        named = own_names(tensors)
        if "pos_embed" in named:
            named["pos_embed"] = resized_positions(named["pos_embed"], self.pos_embed.shape[1])
        return named

    def rebuilding(self) -> dict[str, Any]:
        """What a weight file's config changed."""
        return {} if self.norm.eps == EPS else {"layer_norm_eps": self.norm.eps}

    def class_token(self, tokens: Tensor, prefixes: Mapping[int, Prefix] | None = None) -> Tensor:
        """(n, width): after all blocks and the last layer norm."""
        return self.norm(self.run_blocks(tokens, prefixes))[:, 0]

    def embed(self, x: Tensor) -> Tensor:
        """(n, channels, side, side) -> (n, 1 + patches, width): class token and patches, with their positions."""
        if x.shape[-1] != self.image:
            x = functional.interpolate(x, size=(self.image, self.image), mode="bilinear")
        tokens = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), tokens], 1) + self.pos_embed
        return self.norm_pre(tokens)

    def run_blocks(self, tokens: Tensor, prefixes: Mapping[int, Prefix] | None = None) -> Tensor:
        """The tokens after all blocks; block i attends to prefixes[i], too."""
        for index, block in enumerate(self.blocks):
            tokens = block(tokens, (prefixes or {}).get(index))
        return tokens


def _side(input_shape: tuple[int, ...], patch: int, image: int) -> int:
    """Pixels a side that the network works on; raises ValueError where they do not divide into patches."""
    if len(input_shape) != 3 or input_shape[1] != input_shape[2]:
        raise ValueError(f"vit needs square images (channels, side, side); got {input_shape}")
    side = image or input_shape[1]
    if side % patch:
        raise ValueError(f"image must be a multiple of patch; got {side} pixels a side, patch = {patch}")
    return side


def resized_positions(positions: Tensor, count: int) -> Tensor:
    """(1, 1 + patches, width) -> (1, count, width): the class token's apart, the others bicubic, as timm does; as they
    are where either is no square of patches."""
    old, new = (math.isqrt(length - 1) for length in (positions.shape[1], count))
    if old == new or old**2 + 1 != positions.shape[1] or new**2 + 1 != count:
        return positions
    grid = positions[:, 1:].unflatten(1, (old, old)).permute(0, 3, 1, 2).float()
    grid = functional.interpolate(grid, size=(new, new), mode="bicubic", antialias=True)
    return torch.cat([positions[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2).to(positions.dtype)], 1)


# networks and weights of other sources ------------------------------------------------------------------------------
def as_vit(module: nn.Module, input_shape: tuple[int, ...], classes: int) -> ViT | None:
    """A network as a `ViT` with the same tensors: itself, or one of transformers, of timm, or with their names; None
    where it is none, or where its outputs are others."""
    if isinstance(module, ViT):
        return module
    base = getattr(module, "base", module)  # of `HuggingFace`
    named, heads = own_names(base.state_dict()), _first_number(base, ("num_attention_heads", "num_heads"))
    eps = {layer.eps for layer in base.modules() if isinstance(layer, nn.LayerNorm)}
    try:
        patch, width = named["patch_embed.proj.weight"].shape[-1], named["cls_token"].shape[-1]
        depth = len({name.split(".")[1] for name in named if name.startswith("blocks.")})
        made = ViT(input_shape, classes, patch, width, depth, heads)
        made.load_state_dict(made.converted(named, {"layer_norm_eps": eps.pop()} if eps else {}))
        x = torch.randn(2, *input_shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            ours, theirs = made.eval()(x), module.eval()(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))
    except (KeyError, ValueError, RuntimeError, ZeroDivisionError, AssertionError):
        return None
    made.train()
    describe: Any = getattr(module, "rebuilding", None)
    if describe is not None:  # a saved model is built from the same description
        made.__dict__["rebuilding"] = partial(dict, **describe())
    return made


def _first_number(module: nn.Module, names: Sequence[str]) -> int:
    """The first whole number that a configuration or a layer holds under one of these names; 0 where none does."""
    held = (getattr(module, "config", None), *module.modules())
    found = (getattr(layer, name, None) for layer in held for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


_HUGGING_FACE = {
    "embeddings.cls_token": "cls_token",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection": "patch_embed.proj",
    "layernorm": "norm",
    "classifier": "head",
    "layernorm_before": "norm1",
    "attention.output.dense": "attn.proj",
    "layernorm_after": "norm2",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
_CLIP = {
    "embeddings.patch_embedding.": "embeddings.patch_embeddings.projection.",
    "pre_layrnorm.": "norm_pre.",
    "post_layernorm.": "layernorm.",
    "encoder.layers.": "layers.",
    ".layer_norm1.": ".layernorm_before.",
    ".layer_norm2.": ".layernorm_after.",
    ".self_attn.out_proj.": ".attention.output.dense.",
    ".self_attn.q_proj.": ".attention.attention.query.",
    ".self_attn.k_proj.": ".attention.attention.key.",
    ".self_attn.v_proj.": ".attention.attention.value.",
}  # CLIP's names -> ViT's, of transformers
_SCALED = {
    "layer_scale1.lambda1": "attn.proj",
    "layer_scale2.lambda1": "mlp.fc2",
    "ls1.gamma": "attn.proj",
    "ls2.gamma": "mlp.fc2",
}  # DINOv2's factors of a branch, of transformers and of timm -> its last layer
# how transformers calls in memory what its files call otherwise
_IN_MEMORY = {
    "attention.q_proj.": "attention.attention.query.",
    "attention.k_proj.": "attention.attention.key.",
    "attention.v_proj.": "attention.attention.value.",
    "attention.o_proj.": "attention.output.dense.",
}
_UNUSED = ("pooler.", "embeddings.mask_token", "mask_token")
_QKV = tuple(f"attention.attention.{which}" for which in ("query", "key", "value"))


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a weight file of ViT, DINOv2 or CLIP's vision tower under the names of `ViT`; timm's names are the
    same. Of a Hugging Face file, queries, keys and values become one matrix in this order. What `ViT` has not is left
    out: the pooler, DINOv2's mask token, which is for training alone, and CLIP's text tower."""
    return _without_layer_scale(_renamed(_vision_tower(tensors)))


def _vision_tower(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Of CLIP, the vision tower under the names that transformers gives a ViT; other files as they are."""
    inside = {name.split("vision_model.", 1)[1]: tensor for name, tensor in tensors.items() if "vision_model." in name}
    inside = inside or dict(tensors)
    if "embeddings.class_embedding" not in inside:
        return tensors
    inside.pop("embeddings.position_ids", None)
    made = {"embeddings.cls_token": inside.pop("embeddings.class_embedding").view(1, 1, -1)}
    made["embeddings.position_embeddings"] = inside.pop("embeddings.position_embedding.weight").unsqueeze(0)
    patches = inside["embeddings.patch_embedding.weight"]
    made["embeddings.patch_embeddings.projection.bias"] = patches.new_zeros(len(patches))
    for name, tensor in inside.items():
        for theirs, ours in _CLIP.items():
            name = name.replace(theirs, ours)
        made[name] = tensor
    return made


def _without_layer_scale(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """DINOv2 scales what a block's branch gives, output by output: folded into the branch's last layer."""
    for name in [name for name in named if name.endswith(tuple(_SCALED))]:
        block, own = name.split(".", 2)[:2], name.split(".", 2)[2]
        scale, layer = named.pop(name), ".".join([*block, _SCALED[own]])
        named[f"{layer}.weight"] = named[f"{layer}.weight"] * scale.unsqueeze(1)
        named[f"{layer}.bias"] = named[f"{layer}.bias"] * scale
    return named


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    plain = {name.removeprefix("vit.").removeprefix("dinov2."): tensor for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in plain.items() if not name.startswith(_UNUSED)}
    if "embeddings.cls_token" not in plain:
        return plain
    for now, before in _IN_MEMORY.items():
        plain = {name.replace(now, before, 1): tensor for name, tensor in plain.items()}
    renamed = {}
    for name, tensor in plain.items():
        where, owner, leaf = _split_name(name)
        if owner == _QKV[0]:
            rows = [plain[name.replace(_QKV[0], which)] for which in _QKV]
            renamed[f"{where}attn.qkv.{leaf}"] = torch.cat(rows)
        elif owner not in _QKV:
            renamed[f"{where}{_HUGGING_FACE.get(owner, owner)}{leaf and '.'}{leaf}"] = tensor
    return renamed


def _split_name(name: str) -> tuple[str, str, str]:
    """(block, layer, "weight" or "bias") of a Hugging Face name; the last is empty for a tensor without a layer."""
    where = ""
    for above in ("encoder.layer.", "layers."):
        if name.startswith(above):
            index, _, name = name.removeprefix(above).partition(".")
            where = f"blocks.{index}."
    owner, _, leaf = name.rpartition(".")
    return (where, owner, leaf) if leaf in ("weight", "bias") else (where, name, "")

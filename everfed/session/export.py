"""A trained network in the formats of others, each read back and compared with the network itself."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from everfed.core.layout import head_name
from everfed.models import lora
from everfed.models.pretrained import HuggingFace
from everfed.session.saved_model import Description, ModelFileError, check_shared, normalised

SAMPLES = 4  # that the exported network is compared on
TOLERANCE = 1e-4  # of the largest output: other runtimes add up in another order
ABOUT = "everfed.json"  # input form, normalisation and class names, beside the network


class Deployed(nn.Module):
    """The network with the run's normalisation before it: samples as they are stored in, outputs out."""

    def __init__(self, network: nn.Module, description: Description) -> None:
        super().__init__()
        self.network = network
        self._description = description

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(normalised(self._description, x))
        return outputs


def export(module: nn.Module, description: Description, to: str, folder: Path) -> float:
    """Write the network into a new `folder`; returns the largest difference of outputs after reading it back. Raises
    ModelFileError, and leaves nothing, where the format does not fit or the outputs differ."""
    if to not in FORMATS:
        raise ModelFileError(f"--to {to}: allowed: {', '.join(FORMATS)}")
    check_shared(description)
    if folder.exists():
        raise ModelFileError(f"{folder} exists already; name a new folder with --out")
    folder.mkdir(parents=True)
    try:
        samples = example(description, module)
        inputs = normalised(description, samples) if description.mean is not None else samples.float()
        with torch.no_grad():
            expected = module.eval()(inputs)
            found = _written(module, description, to, folder, samples)
        difference = float((found - expected).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
            raise ModelFileError(
                f"the network exported to {to} gives other outputs (by up to {difference:g}); not kept"
            )
        (folder / ABOUT).write_text(json.dumps(asdict(description), indent=2, default=list) + "\n")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return difference


def _written(module: nn.Module, description: Description, to: str, folder: Path, samples: Tensor) -> Tensor:
    """The outputs of the network in its new format. Raises ModelFileError for whatever another library cannot do."""
    try:
        return FORMATS[to](module, description, folder, samples)
    except ModelFileError:
        raise
    except Exception as error:  # exporters of torch, ONNX, transformers and PEFT have errors of many kinds
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelFileError(f"--to {to}: {description.kind!r} cannot be written in this format: {reason}") from error


def example(description: Description, module: nn.Module) -> Tensor:
    """Random samples of the run's form, the same every time; token ids are below those of the first embedding."""
    generator, shape = torch.Generator().manual_seed(0), (SAMPLES, *description.input_shape)
    if description.dtype == "uint8":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if description.dtype == "int64":
        table = next((layer for layer in module.modules() if isinstance(layer, nn.Embedding)), None)
        return torch.randint(0, table.num_embeddings if table else 1, shape, generator=generator)
    return torch.randn(shape, generator=generator)


# the formats ----------------------------------------------------------------------------------------------------------
def _torch(module: nn.Module, description: Description, folder: Path, samples: Tensor) -> Tensor:
    """model.pt: the state_dict, read with torch.load(weights_only=True)."""
    torch.save(module.state_dict(), folder / "model.pt")
    module.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return _outputs(module, description, samples)


def _torch_export(module: nn.Module, description: Description, folder: Path, samples: Tensor) -> Tensor:
    """model.pt2: a program of torch.export for any number of samples; needs no code of the network."""
    program = torch.export.export(
        _deployed(module, description), (samples,), dynamic_shapes=({0: torch.export.Dim("n", min=1)},)
    )
    torch.export.save(program, folder / "model.pt2")
    outputs: Tensor = torch.export.load(folder / "model.pt2").module()(samples)
    return outputs


def _onnx(module: nn.Module, description: Description, folder: Path, samples: Tensor) -> Tensor:
    """model.onnx, for any number of samples."""
    try:
        import onnx
        import onnx.reference
        import onnxscript  # noqa: F401  torch.onnx writes with it
    except ImportError as missing:
        raise ModelFileError(
            f"--to onnx needs {missing.name}; install it with: pip install 'everfed[export]'"
        ) from missing
    torch.onnx.export(
        _deployed(module, description),
        (samples,),
        folder / "model.onnx",
        input_names=["samples"],
        output_names=["outputs"],
        dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
        dynamo=True,
        external_data=False,
        verbose=False,
    )
    onnx.checker.check_model(str(folder / "model.onnx"))
    found: Any = onnx.reference.ReferenceEvaluator(str(folder / "model.onnx")).run(None, {"samples": samples.numpy()})
    return torch.tensor(found[0])


def _hf(module: nn.Module, description: Description, folder: Path, samples: Tensor) -> Tensor:
    """A folder of transformers' own, with the names of the classes."""
    if not isinstance(module, HuggingFace):
        raise ModelFileError(
            f"--to hf is for networks of transformers (model.kind = 'hf:FOLDER'), not {description.kind!r}"
        )
    module = copy.deepcopy(module)
    lora.replace_layers(module, lambda layer: layer.eval().merged())  # transformers knows no LoRA of everfed's
    names = dict(enumerate(description.class_names))
    if names:
        module.base.config.id2label = names
        module.base.config.label2id = {name: number for number, name in names.items()}
    module.base.save_pretrained(folder)
    again = type(module.base).from_pretrained(folder, local_files_only=True, use_safetensors=True)
    return _outputs(HuggingFace(again).eval(), description, samples)


def _peft(module: nn.Module, description: Description, folder: Path, samples: Tensor) -> Tensor:
    """The adapter alone, as PEFT saves it."""
    try:
        import peft
    except ImportError as missing:
        raise ModelFileError("--to peft needs PEFT; install it with: pip install 'everfed[peft]'") from missing
    if lora.layers(module):
        module = _with_peft_layers(module, description)
    place, adapted = next(((n, m) for n, m in module.named_modules() if isinstance(m, peft.PeftModel)), ("", None))
    if adapted is None:
        raise ModelFileError(
            f"--to peft is for networks with an adapter, of PEFT or of model.lora; {description.kind!r} has none"
        )
    adapted.save_pretrained(str(folder))
    again = peft.PeftModel.from_pretrained(adapted.unload(), folder, local_files_only=True)
    if not place:
        return _outputs(again.eval(), description, samples)
    parent, _, leaf = place.rpartition(".")
    setattr(module.get_submodule(parent), leaf, again)
    return _outputs(module.eval(), description, samples)


def _with_peft_layers(module: nn.Module, description: Description) -> nn.Module:
    """A copy with PEFT's LoRA layers in the place of everfed's; the factors of several tasks become one larger pair."""
    import peft

    plain, own = copy.deepcopy(module), lora.layers(module)
    factors = {name: layer.eval().factors() for name, layer in own.items()}
    ranks, scales = {len(down) for down, _ in factors.values()}, {layer.scale for layer in own.values()}
    if {type(layer) for layer in own.values()} != {lora.LoRALinear} or len(ranks) > 1 or len(scales) > 1:
        raise ModelFileError(
            f"--to peft: the adapters of {description.kind!r} are no LoRA of whole layers and one rank"
        )
    lora.replace_layers(plain, lambda layer: layer.without_factors())
    rank, alpha = ranks.pop(), cast(Any, scales.pop())  # a float, too, whatever PEFT declares
    head = head_name(module).rpartition(".")[0].rpartition(".")[2]
    config = peft.LoraConfig(r=rank, lora_alpha=alpha * rank, target_modules=list(own), modules_to_save=[head])
    adapted = peft.get_peft_model(plain, config)
    for name, (down, up) in factors.items():
        layer: Any = adapted.get_base_model().get_submodule(name)
        layer.lora_A["default"].weight.data.copy_(down)
        layer.lora_B["default"].weight.data.copy_(up)
    return adapted.eval()


FORMATS: dict[str, Callable[[nn.Module, Description, Path, Tensor], Tensor]] = {
    "torch": _torch,
    "torch-export": _torch_export,
    "onnx": _onnx,
    "hf": _hf,
    "peft": _peft,
}


def _deployed(module: nn.Module, description: Description) -> nn.Module:
    return Deployed(module, description).eval() if description.mean is not None else module


def _outputs(module: nn.Module, description: Description, samples: Tensor) -> Tensor:
    outputs: Tensor = _deployed(module, description)(samples if description.mean is not None else samples.float())
    return outputs

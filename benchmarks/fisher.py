"""Squared gradients of single samples (EWC, FedCurv): layer by layer beside sample by sample, in turns.

ResNet-18 on CIFAR images; "samples" holds 256 MiB of gradients at once (five samples), "layers" MEMORY MiB of all.

python -m benchmarks.fisher [--device cuda] [--samples 500] [--memory 2048] [--rounds 3] [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.measure import Contender, Work, interleave, machine, ratios, summary, write
from everfed.methods.common.per_sample import Network
from everfed.methods.regularise.fisher import squared_gradients
from everfed.models.resnet import ResNet18

BEFORE = 256 << 20


def network(device: torch.device) -> Network:
    torch.manual_seed(0)
    module = ResNet18((3, 32, 32), 100).to(device).to(memory_format=torch.channels_last)
    params = {name: p.detach() for name, p in module.named_parameters()}
    return Network(module.eval(), params, dict(module.named_buffers()), functional.cross_entropy)


def ways(net: Network, samples: int, memory: int, device: torch.device) -> dict[str, Work]:
    x = torch.randn(samples, 3, 32, 32, device=device).contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 100, (samples,), device=device)
    together = BEFORE // sum(4 * p.numel() for p in net.params.values())

    def by_samples() -> dict[str, torch.Tensor]:
        total = {name: torch.zeros_like(p) for name, p in net.params.items()}
        for part in zip(x.split(together), y.split(together), strict=True):
            for name, value in net.gradients(*part).items():
                total[name] += value.square().sum(0)
        return total

    def by_layers() -> dict[str, torch.Tensor]:
        return squared_gradients(net, x, y, memory)

    return {"samples": by_samples, "layers": by_layers}


def finished(work: Work, device: torch.device) -> Contender:
    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return Contender(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--memory", type=int, default=2048, help="MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as in a run in bf16
    both = ways(network(device), args.samples, args.memory << 20, device)
    first, second = both["samples"](), both["layers"]()
    apart = max(float((first[name] - second[name]).abs().max() / first[name].abs().max()) for name in first)
    timings = interleave({name: finished(work, device) for name, work in both.items()}, args.rounds)
    result: dict[str, Any] = {
        "machine": machine() | ({"gpu": torch.cuda.get_device_name()} if device.type == "cuda" else {}),
        "samples": args.samples,
        "memory_mib": args.memory,
        "largest_difference": apart,
        "seconds": {name: summary(found) for name, found in timings.items()},
        "samples_over_layers": ratios(timings["samples"], timings["layers"]),
    }
    write(result, args.out)
    for name, found in timings.items():
        print(f"{name:8} {sorted(t.seconds for t in found)[len(found) // 2]:8.3f} s")
    print(f"ratio {result['samples_over_layers']['median']:.1f}, largest difference {apart:.1e} of the largest value")


if __name__ == "__main__":
    main()

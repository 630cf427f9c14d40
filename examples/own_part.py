"""A model, two arrays and a part of your own: `python examples/own_part.py`."""

from dataclasses import dataclass

from sklearn.datasets import load_digits
from torch import nn

import everfed.streams


class Net(nn.Sequential):  # your model, built from (input_shape, classes)
    def __init__(self, input_shape, classes):
        super().__init__(nn.Linear(input_shape[0], 64), nn.ReLU(), nn.Linear(64, classes))


@dataclass(frozen=True)
class Clip(everfed.method.Part):  # your part: no gradient is longer than `norm`
    norm: float = 1.0
    name = "clip"

    def gradient(self, step, gradient):
        return gradient.vector * (self.norm / gradient.vector.norm()).clamp(max=1.0)


x, y = load_digits(return_X_y=True)  # your arrays: 1797 samples of 64 features, and their labels
tasks = {"scenario": "domain-incremental", "transform": "permute", "tasks": 3, "clients": 5, "rounds_per_task": 10}
stream = everfed.streams.from_arrays(x[:1500] / 16, y[:1500], x[1500:] / 16, y[1500:], **tasks)
recipe = {"model": {"kind": Net}, "train": {"local_epochs": 2, "optimizer": {"lr": 0.2}}}
recipe["method"] = {"parts": ["fedavg", "memory", "er", Clip(norm=0.5)], "memory": {"size": 50}}
result = everfed.run(recipe, "runs/own", stream=stream)
print(f"accuracy {result.metrics['acc']:.3f}, forgetting {result.metrics['forgetting']:.3f}")

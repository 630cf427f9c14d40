"""FisherAvg: every parameter is averaged by its Fisher information (Matena and Raffel, "Merging Models with
Fisher-Weighted Averaging", NeurIPS 2022).

Each client's posterior is taken as a Gaussian around its trained parameters theta_i, with the diagonal Fisher
information F_i as precision. The joint mode is the shared model:

    F_i = mean over samples x of E_{y ~ p(y | x)} (d log p(y | x) / d theta)^2 at theta_i
    theta_j = sum_i lambda_i F_ij theta_ij / sum_i lambda_i F_ij                     for every parameter j

lambda_i is 1 or the number of samples. F is never below `floor`, so that parameters which no client informs are
averaged evenly; with a large one it is FedAvg. Clients send F_i and F_i (theta_i - theta), so that sums suffice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from everfed.method import CLASSES, SHARED, WHOLE, Aggregator, Client, Data, Mean, Model, Server, Tells, option
from everfed.methods.regularise.fisher import FISHER, diagonal_fisher


@dataclass(frozen=True)
class FisherAvg(Aggregator):
    weighting: str = option("uniform", one_of=("uniform", "samples"), about="lambda: 1, or a client's samples")
    labels: str = option(
        "drawn",
        one_of=("drawn", "true"),
        about="of the Fisher information: one for each sample from the model's own predictions, or those of the data",
    )
    fisher: str = option("sample", **FISHER)
    fisher_samples: int = option(500, at_least=1, about="samples that it is computed on, at most")
    floor: float = option(1e-6, above=0, about="the least Fisher information of a parameter")

    name = "fisheravg"

    def needs(self):
        return {SHARED, WHOLE, *([CLASSES] if self.labels == "drawn" else [])}

    def reply(self, client: Client):
        if not client.synchronises:
            return {}
        data = self._sample(client)
        u = diagonal_fisher(client, client.model, data, self.fisher).clamp_min(self.floor)
        return {"u": u, "v": u * client.update}

    def _sample(self, client: Client) -> Data:
        """Some samples, with the labels that the Fisher information is computed for."""
        chosen = client.rng("fisher").permutation(len(client.data))[: self.fisher_samples]
        data = client.data.take(chosen)
        if self.labels == "true":
            return data
        p = client.outputs(data.x).double().softmax(1).cpu()
        drawn = torch.from_numpy(client.rng("labels").random(len(data))).unsqueeze(1)
        y = (p.cumsum(1) < drawn).sum(1).clamp(max=p.shape[1] - 1)
        return replace(data, y=y.to(data.y))

    def upload(self, client: Client):
        """What has no Fisher information: BatchNorm's statistics."""
        return {key: value for key, value in super().upload(client).items() if key != "params"}

    def reducers(self):
        mean = Mean(weighted=self.weighting == "samples")
        squares = replace(mean, tells="squared gradients: of one sample its brightness, pixel by pixel")
        return {"u": squares, "v": replace(mean, tells=Tells.GRADIENTS), "stats": mean, "counters": mean}

    def aggregate(self, server: Server) -> Model:
        model, u = super().aggregate(server), server.reduced.get("u")
        return model if u is None else {**model, "params": model["params"].to(u.device) + server.reduced["v"] / u}

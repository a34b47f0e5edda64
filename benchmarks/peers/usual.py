"""NeuMF the usual way in PyTorch: the baseline that ratios are taken against.

Four `nn.Embedding`, a concatenation, `nn.Dropout`, `BCEWithLogitsLoss`, fused Adam over the whole batch: what one gets
by writing the paper's figure down. Same network, initial weights, hyper-parameters and number of samples as `ncf`.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class UsualNeuMF(nn.Module):
    """NeuMF on pairs: `users` [R] and `items` [R] give logits [R]."""

    def __init__(
        self,
        n_users: int,
        n_items: int,
        factors: int = 64,
        layers: Sequence[int] = (256, 256, 128, 64),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(n_users, factors), nn.Embedding(n_items, factors)
        self.mlp_user, self.mlp_item = nn.Embedding(n_users, layers[0] // 2), nn.Embedding(n_items, layers[0] // 2)
        hidden = [(nn.Linear(a, b), nn.ReLU(), nn.Dropout(dropout)) for a, b in itertools.pairwise(layers)]
        self.mlp = nn.Sequential(*itertools.chain.from_iterable(hidden))
        self.output = nn.Linear(factors + layers[-1], 1)
        for table in (self.gmf_user, self.gmf_item, self.mlp_user, self.mlp_item):
            nn.init.normal_(table.weight, 0, 0.01)
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        nn.init.kaiming_uniform_(self.output.weight, a=1)  # LeCun uniform: bound sqrt(3 / fan-in)
        nn.init.zeros_(self.output.bias)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Logits [R]."""
        gmf = self.gmf_user(users) * self.gmf_item(items)
        mlp = self.mlp(torch.cat([self.mlp_user(users), self.mlp_item(items)], -1))
        return self.output(torch.cat([gmf, mlp], -1)).squeeze(-1)


class UsualStep:
    """Forward, backward and Adam on a batch of samples; `dtype` below fp32 turns autocast on."""

    def __init__(self, model: UsualNeuMF, dtype: torch.dtype = torch.float32) -> None:
        self.model, self.dtype = model.train(), dtype
        self.loss = nn.BCEWithLogitsLoss()
        self.optimizer = torch.optim.Adam(model.parameters(), lr=0.0045, betas=(0.25, 0.5), eps=1e-8, fused=True)

    def __call__(self, users: Tensor, items: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of `users`, `items` and `labels` [R], on the device."""
        self.optimizer.zero_grad()
        with torch.autocast(users.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(users, items)
        loss = self.loss(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

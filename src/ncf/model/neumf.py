"""NeuMF, GMF and MLP (He et al., "Neural Collaborative Filtering", WWW 2017, section 3): parameters and scores.

Plain autograd, written for clarity of the algebra: the reference that the CPU's faster step and scores must equal, and
what computes on a GPU.

Shapes: B users, C candidates each, U users, I items, F factors, H the width of the first hidden layer.
"""

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ncf.errors import InputError
from ncf.model.dropout import drop
from ncf.model.products import product

ROWS_DRAWN = 4_096  # rows of a table that share a random stream, so that a table can be drawn from any row on


class NeuMF(nn.Module):
    """A GMF of width `factors` and an MLP of widths `layers`, joined by one output layer.

    `factors=0` is MLP alone and `layers=()` GMF alone. `layers[0]` is the width of the concatenated user and item
    embedding, so half of it belongs to each side. Each side has one table, GMF's columns first, MLP's after.

    Initial weights, as the NVIDIA recipe's: embeddings N(0, 0.01), hidden layers Glorot uniform, the output LeCun
    uniform, biases 0; all from `seed`. GMF alone starts as matrix factorization, its output weights 1 (section 3.2).
    The first hidden layer is factored: W [u; i] = Wu u + Wi i, so that each term is computed once per user or item. It
    is exact, and over half of the network's arithmetic goes.

    With `history` L the user side adds the last L items to the user's row, as Fossil does (He and McAuley, "Fusing
    similarity models with Markov chains", ICDM 2016): x = U[u] + sum over l of w_l E[item l]. `ordered=False` gives all
    of them one weight, for logs without a time. A user without a row (index -1) is the history alone.

    Of several processes each has the rows of its own users, from `user_offset` on, and all of the rest. Raises
    InputError for a width that cannot be built.
    """

    BY_USER = frozenset({"user_embedding"})  # parameters with a row per user; every other one is on all processes

    def __init__(
        self,
        n_users: int,
        n_items: int,
        *,
        factors: int = 64,
        layers: Sequence[int] = (256, 256, 128, 64),
        dropout: float = 0.5,
        history: int = 0,
        ordered: bool = True,
        item_bias: bool = False,
        seed: int = 0,
        user_offset: int = 0,
    ) -> None:
        super().__init__()
        check_widths(factors, layers)
        self.n_users, self.n_items = n_users, n_items
        self.factors, self.layers, self.dropout = factors, tuple(layers), dropout
        width = factors + (layers[0] // 2 if layers else 0)  # D
        self.user_embedding = nn.Parameter(torch.empty(n_users, width))
        self.item_embedding = nn.Parameter(torch.empty(n_items, width))
        self.history = history  # L
        if history:
            self.history_embedding = nn.Parameter(torch.empty(n_items, width))
            self.history_weights = nn.Parameter(torch.empty(history if ordered else 1))
        self.item_bias = nn.Parameter(torch.empty(n_items)) if item_bias else None
        hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(layers))
        self.mlp = cast(Sequence[nn.Linear], hidden)  # a ModuleList does not tell what it holds
        self.output = nn.Linear(factors + (layers[-1] if layers else 0), 1)
        self.reset_parameters(seed, user_offset)

    @torch.no_grad()
    def reset_parameters(self, seed: int, user_offset: int = 0) -> None:
        """Draw the initial weights."""
        draw_table(self.user_embedding, seed, "user", user_offset)
        draw_table(self.item_embedding, seed, "item", 0)
        if self.history:
            draw_table(self.history_embedding, seed, "history", 0)
            self.history_weights.copy_(1 / torch.arange(1, len(self.history_weights) + 1))
        if self.item_bias is not None:
            nn.init.zeros_(self.item_bias)
        generator = torch.Generator().manual_seed(seed)
        for layer in self.mlp:
            nn.init.xavier_uniform_(layer.weight, generator=generator)
            nn.init.zeros_(layer.bias)
        bound = math.sqrt(3 / self.output.in_features)
        self.output.weight.uniform_(-bound, bound, generator=generator)
        if not self.layers:
            nn.init.ones_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def gmf_part(self, x: Tensor) -> Tensor:
        """GMF's part [..., F] of a table [.., D], of projected rows [..., F + H] or of the output weights."""
        return x[..., : self.factors]

    def mlp_part(self, x: Tensor) -> Tensor:
        """The MLP's part of the same."""
        return x[..., self.factors :]

    def user_half(self, weight: Tensor) -> Tensor:
        """Wu [H, D - F] of the first hidden layer's `weight` or its gradient."""
        return weight[:, : self.layers[0] // 2]

    def item_half(self, weight: Tensor) -> Tensor:
        """Wi [H, D - F] of the same."""
        return weight[:, self.layers[0] // 2 :]

    def user_inputs(self, users: Tensor, history: Tensor | None = None) -> Tensor:
        """The user side's sum [B, D]: rows of `users` [B], none for -1, and of their `history` [B, L], none for -1."""
        if history is None:
            return functional.embedding(users, self.user_embedding)
        known = (users >= 0).unsqueeze(1)
        rows = functional.embedding(users.clamp(min=0), self.user_embedding) * known
        weights = self.history_weights * (history >= 0)
        return rows + functional.embedding_bag(
            history.clamp(min=0), self.history_embedding, per_sample_weights=weights, mode="sum"
        )

    def user_rows(self, users: Tensor, dtype: torch.dtype = torch.float32, history: Tensor | None = None) -> Tensor:
        """What `logits` needs of `users` [B]: [B, F + H], GMF's factors times the output weights, then Wu x + b."""
        rows = self.user_inputs(users, history)
        parts: list[Tensor] = [self.gmf_part(rows) * self.gmf_part(self.output.weight[0])]
        if self.layers:
            weight = self.user_half(self.mlp[0].weight)
            parts.append(product(self.mlp_part(rows), weight, self.mlp[0].bias, dtype))
        return torch.cat(parts, -1)

    def item_rows(self, items: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """What `logits` needs of `items`, any shape: [..., F + H], GMF's factors, then Wi i.

        Projects the whole catalogue where that is less work than projecting each of `items`.
        """
        if items.numel() < self.n_items:
            return self.project_items(functional.embedding(items, self.item_embedding), dtype)
        return functional.embedding(items, self.item_table(dtype))

    def item_table(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """`item_rows` of the whole catalogue: [I, F + H]."""
        return self.project_items(self.item_embedding, dtype)

    def project_items(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """`item_rows` of item embeddings [..., D] that are already at hand."""
        if not self.layers:
            return rows
        projection = product(self.mlp_part(rows), self.item_half(self.mlp[0].weight), None, dtype)
        return torch.cat([self.gmf_part(rows), projection], -1)

    def logits(
        self,
        user_rows: Tensor,
        item_rows: Tensor,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Scores, as logits in fp32: [B, C] of `user_rows` [B, F + H] and `item_rows` [B, C, F + H] or [C, F + H].

        `bias` is that of the items, [B, C] or [C]. `dtype` is the precision of the hidden layers' products. Dropout
        follows each hidden ReLU in training mode.
        """
        score: Tensor = self.output.bias if bias is None else self.output.bias + bias
        if self.factors:
            user, item = self.gmf_part(user_rows), self.gmf_part(item_rows)
            score = score + (user @ item.T if item.dim() == 2 else _dot(item, user.unsqueeze(1)))
        if self.layers:
            hidden = self.mlp_part(user_rows).unsqueeze(1) + self.mlp_part(item_rows)
            hidden = self._activate(hidden.to(dtype), generator)
            for layer in self.mlp[1:]:
                hidden = self._activate(product(hidden, layer.weight, layer.bias, dtype), generator)
            score = score + _dot(hidden.to(score.dtype), self.mlp_part(self.output.weight))  # 16 bits would make ties
        return score

    def bias_of(self, items: Tensor) -> Tensor | None:
        """The bias of `items`, any shape; None where items have none."""
        return None if self.item_bias is None else self.item_bias[items]

    def forward(
        self,
        users: Tensor,
        candidates: Tensor,
        dtype: torch.dtype = torch.float32,
        generator: torch.Generator | None = None,
        history: Tensor | None = None,
    ) -> Tensor:
        """Scores of `candidates` [B, C] or [C] for `users` [B] with `history` [B, L], as logits in fp32: [B, C]."""
        rows, items = self.user_rows(users, dtype, history), self.item_rows(candidates, dtype)
        return self.logits(rows, items, dtype, generator, self.bias_of(candidates))

    def _activate(self, hidden: Tensor, generator: torch.Generator | None) -> Tensor:
        hidden = functional.relu(hidden)
        return drop(hidden, self.dropout, generator) if self.training else hidden


def draw_table(table: Tensor, seed: int, name: str, first: int) -> None:
    """Fill `table` [R, D] with N(0, 0.01): the rows from `first` on of the endless table of that seed, name and width.

    Each block of rows has a stream of its own, from (seed, name, block), so no row depends on how many there are.
    """
    end = first + len(table)
    for block in range(first // ROWS_DRAWN, math.ceil(end / ROWS_DRAWN)):
        digest = hashlib.sha256(f"{seed} {name} {block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        start = block * ROWS_DRAWN
        low, high = max(first, start), min(end, start + ROWS_DRAWN)
        rows = torch.empty(ROWS_DRAWN, table.shape[1], dtype=table.dtype).normal_(0, 0.01, generator=generator)
        table[low - first : high - first] = rows[low - start : high - start]


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Inner products [B, C] of `x` [B, C, A] or [1, C, A] with `y`, [B, 1, A] or [1, A].

    Compiled it is a sum, which fuses with what makes `x`, and `x` is never written; a product cannot.
    """
    if torch.compiler.is_compiling():
        return (x * y).sum(-1)
    if y.dim() == 3:
        return torch.bmm(x, y.transpose(1, 2)).squeeze(2)
    return functional.linear(x, y).squeeze(-1)


def check_widths(factors: int, layers: Sequence[int]) -> None:
    """Raise InputError for widths of which no network can be built."""
    if not factors and not layers:
        raise InputError("--factors 0 with --layers none leaves no model: give one of them a width")
    if layers and (len(layers) < 2 or layers[0] % 2):
        raise InputError(
            f"--layers must be none, or at least two widths of which the first is even (half for users, half for "
            f"items): got {' '.join(map(str, layers))}"
        )

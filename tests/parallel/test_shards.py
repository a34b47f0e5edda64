"""How users, steps, initial weights and files are divided among processes; all in this process."""

import itertools
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from ncf.config import TrainConfig
from ncf.data.dataset import Dataset
from ncf.data.interactions import Sequence
from ncf.data.shard import load_dataset, shard_borders
from ncf.data.unseen import UnseenItems, evaluation_negatives
from ncf.errors import InputError
from ncf.model import neumf
from ncf.model.neumf import NeuMF
from ncf.parallel.environment import ProcessEnv
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.runs.weights import write_weights
from ncf.training.allreduce import AllReduce
from ncf.training.batches import Batches, steps_of
from ncf.training.trainer import needed_bytes


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 9))
def test_ranges_cover_every_user_once_and_are_about_equal(lengths: list[int], shards: int) -> None:
    rows = [user for user, length in enumerate(lengths) for _ in range(length)]
    borders = shard_borders(np.array(rows), len(lengths), shards)
    users = [user for first, end in itertools.pairwise(borders) for user in range(first, end)]
    assert users == list(range(len(lengths)))
    assert len(borders) == shards + 1
    for first, end in itertools.pairwise(borders):
        assert sum(lengths[first:end]) < len(rows) / shards + max(lengths)


@given(st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any), st.integers(5, 40))
def test_ranks_make_the_same_steps_and_never_more_than_a_batch(counts: list[int], rows: int) -> None:
    steps = steps_of(counts, rows)
    taken = []
    for count in counts:
        each = math.ceil(count / steps)
        sizes = [len(range(count)[step * each : (step + 1) * each]) for step in range(steps)]
        assert sum(sizes) == count
        taken.append(sizes)
    together = list(map(sum, zip(*taken, strict=True)))
    assert 0 < min(together) <= max(together) <= rows
    assert steps >= math.ceil(sum(counts) / rows)
    if len(counts) == 1:
        assert steps == math.ceil(counts[0] / rows)


def test_a_batch_that_cannot_hold_an_interaction_of_each_rank() -> None:
    with pytest.raises(InputError, match="--batch-size .* each of 3 processes.*holds 2"):
        steps_of([5, 0, 5, 5], 2)


def test_batches_of_a_rank_that_has_fewer_than_others_end_empty() -> None:
    users = torch.arange(5, dtype=torch.int32)
    batches = Batches(Sequence(users, users), 5, 9, TrainConfig(batch_size=20), counts=[9, 5])
    found = list(batches.epoch(torch.Generator().manual_seed(0)))
    assert len(found) == len(batches) == 5
    assert [len(batch.users) for batch in found] == [1] * 5
    none = Batches(Sequence(users[:0], users[:0]), 0, 9, TrainConfig(batch_size=20), counts=[9, 0], pad=True)
    assert [(len(batch.users), batch.samples) for batch in none.epoch(torch.Generator())] == [(0, 0)] * len(none)
    assert len(none) == 3


@given(st.integers(0, 24), st.integers(0, 24))
def test_initial_rows_are_the_same_on_any_rank(a: int, b: int) -> None:
    first, end = sorted((a, b))
    before, neumf.ROWS_DRAWN = neumf.ROWS_DRAWN, 7
    try:
        whole = NeuMF(24, 5, factors=2, layers=(4, 2), seed=3)
        part = NeuMF(end - first, 5, factors=2, layers=(4, 2), seed=3, user_offset=first)
    finally:
        neumf.ROWS_DRAWN = before
    assert torch.equal(part.user_embedding, whole.user_embedding[first:end])
    for name, value in part.state_dict().items():
        assert name == "user_embedding" or torch.equal(value, whole.state_dict()[name])


def test_rows_and_tables_differ() -> None:
    model = NeuMF(5000, 5000, factors=1, layers=())
    assert len(model.user_embedding.unique()) > 4900
    assert not torch.equal(model.user_embedding, model.item_embedding)


def test_evaluation_negatives_are_those_of_the_whole_datasets_user() -> None:
    whole = UnseenItems(torch.arange(6), torch.arange(6), 6, 40)
    part = UnseenItems(torch.arange(2), torch.arange(4, 6), 2, 40)
    expected = evaluation_negatives(whole, torch.arange(4, 6), 9, 5)
    assert torch.equal(evaluation_negatives(part, torch.arange(2), 9, 5, 4), expected)


def test_a_step_sends_at_most_a_fifth_of_all_tables_gradients(one_rank: ProcessGroup) -> None:
    """At ml-20m's size, counted as it is given to the collective; the recipe's data parallel version sends them all."""
    n_users, n_items, width = 138_493, 26_744, 192
    model = NeuMF(1, n_items)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    AllReduce(model, one_rank)(5, check_overflow=False)
    network = sum(parameter.numel() for parameter in model.parameters()) - (1 + n_items) * width
    assert one_rank.sent == 4 * (n_items * width + network + 3)
    assert one_rank.sent <= 4 * (n_users + n_items) * width / 5


def test_the_memory_of_several_ranks_counts_what_is_summed_in() -> None:
    sizes, device = (50, 3000, 400), torch.device("cpu")
    one, two = (needed_bytes(*sizes, TrainConfig(batch_size=100 * ranks), device, ranks) for ranks in (1, 2))
    assert two - one == 4 * (3000 * 192 + 256 * 256 + 256 * 128 + 128 * 64)


def test_weights_are_a_safetensors_file_as_the_library_writes_it(tmp_path: Path) -> None:
    tensors = {
        "model.user_embedding": torch.rand(3, 4),
        "model.output.bias": torch.rand(1),
        "adam.mean.user_embedding": torch.rand(3, 4),
    }
    write_weights(tmp_path / "ours", tensors, {"state": "{}"}, SINGLE, 3)
    save_file(tensors, tmp_path / "theirs")
    with safe_open(tmp_path / "ours", "pt") as ours, safe_open(tmp_path / "theirs", "pt") as theirs:
        assert set(ours.keys()) == set(theirs.keys())
        for name, tensor in tensors.items():
            assert torch.equal(ours.get_tensor(name), tensor)
    assert (tmp_path / "ours").stat().st_size % 4 == 0


@pytest.mark.parametrize("table", ["users", "items", "train"])
def test_several_processes_refuse_files_of_another_dataset(
    tiny: Dataset, planted: Dataset, tmp_path: Path, table: str
) -> None:
    tiny.save(tmp_path / "data")
    planted.save(tmp_path / "other")
    group = ProcessGroup(ProcessEnv(0, 2, 0, 2))  # not connected, so it asks no other rank
    assert load_dataset(tmp_path / "data", group).n_users == tiny.n_users
    shutil.copy(tmp_path / "other" / f"{table}.parquet", tmp_path / "data")
    with pytest.raises(InputError, match=rf"{table}.parquet (belongs to another|is damaged)"):
        load_dataset(tmp_path / "data", group)
    (tmp_path / "data" / f"{table}.parquet").unlink()
    with pytest.raises(InputError, match=rf"{table}.parquet is missing"):
        load_dataset(tmp_path / "data", group)

import pytest
import torch
from torch.nn import functional

from ncf.errors import InputError
from ncf.model.neumf import NeuMF
from ncf.model.products import product

SHAPES = [{}, {"factors": 0}, {"layers": ()}, {"factors": 3, "layers": (6, 4)}]


def plain_scores(model: NeuMF, users: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
    """He et al.'s equations word for word: concatenate, then layer by layer, for each pair."""
    users = users.unsqueeze(1).expand_as(candidates)
    user, item = model.user_embedding[users], model.item_embedding[candidates]
    parts = [user[..., : model.factors] * item[..., : model.factors]]
    if model.layers:
        hidden = torch.cat([user[..., model.factors :], item[..., model.factors :]], -1)
        for layer in model.mlp:
            hidden = functional.relu(layer(hidden))
        parts.append(hidden)
    return model.output(torch.cat(parts, -1)).squeeze(-1)


def spread(model: NeuMF) -> NeuMF:
    """Weights large enough that every part of the network shows in the score."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.double().eval()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n_items", [9, 1000])  # fewer and more than the candidates of a batch
def test_factored_scores_equal_the_plain_network(shape, n_items):
    model = spread(NeuMF(20, n_items, **shape))
    users, candidates = torch.randint(20, (7,)), torch.randint(n_items, (7, 5))
    expected = plain_scores(model, users, candidates)
    torch.testing.assert_close(model(users, candidates, torch.float64), expected, rtol=0, atol=1e-10)


def test_the_whole_catalogue_scores_like_single_items():
    model = spread(NeuMF(20, 30))
    users = torch.tensor([3, 3, 11])
    everything = model.logits(model.user_rows(users, torch.float64), model.item_table(torch.float64), torch.float64)
    expected = plain_scores(model, users, torch.arange(30).expand(3, 30))
    torch.testing.assert_close(everything, expected, rtol=0, atol=1e-10)


def test_parameter_count_is_the_recipes_on_ml_20m():
    """Counted in the recipe's own code (README of DeepLearningExamples, NCF for TensorFlow)."""
    assert sum(parameter.numel() for parameter in NeuMF(138_493, 26_744).parameters()) == 31_832_577


def test_initial_weights_are_the_recipes_and_come_from_the_seed():
    model = NeuMF(3000, 2000, seed=5)
    assert model.user_embedding.std().item() == pytest.approx(0.01, rel=0.02)
    bound = (6 / (256 + 256)) ** 0.5
    assert model.mlp[0].weight.abs().max().item() == pytest.approx(bound, rel=0.01)
    assert model.output.weight.abs().max().item() <= (3 / 128) ** 0.5
    assert all(not layer.bias.any() for layer in [*model.mlp, model.output])
    assert torch.equal(model.item_embedding, NeuMF(3000, 2000, seed=5).item_embedding)
    assert not torch.equal(model.item_embedding, NeuMF(3000, 2000, seed=6).item_embedding)


def test_bf16_products_are_close_to_fp32s_and_scores_stay_fp32():
    model = spread(NeuMF(20, 30)).float()
    users, candidates = torch.arange(20), torch.randint(30, (20, 5))
    exact, rounded = model(users, candidates), model(users, candidates, torch.bfloat16)
    assert rounded.dtype == torch.float32
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).abs().max() < 0.02 * exact.abs().max()


def test_product_rounds_its_operands():
    x, weight = torch.tensor([[1.001, 2.0]]), torch.tensor([[1.0, 3.0]])
    expected = (x.bfloat16().float() @ weight.T).bfloat16()
    assert torch.equal(product(x, weight, None, torch.bfloat16), expected)


def test_dropout_works_in_training_and_not_in_evaluation():
    model = spread(NeuMF(20, 30)).float()
    users, candidates = torch.arange(20), torch.randint(30, (20, 5))
    generator = torch.Generator().manual_seed(0)
    assert torch.equal(model(users, candidates), model(users, candidates))
    model.train()
    first, second = (model(users, candidates, generator=generator) for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("factors", "layers"), [(0, ()), (8, (16,)), (8, (15, 8))])
def test_widths_that_cannot_be_built_are_refused(factors, layers):
    with pytest.raises(InputError, match="--layers|--factors"):
        NeuMF(5, 5, factors=factors, layers=layers)


@pytest.mark.parametrize("ordered", [True, False])
def test_the_history_is_a_weighted_sum_of_its_items_rows(ordered):
    model = spread(NeuMF(5, 12, factors=3, layers=(6, 4), history=3, ordered=ordered))
    history = torch.tensor([[4, 9, -1], [-1, -1, -1], [7, 7, 2]])
    found = model.user_inputs(torch.tensor([1, 3, -1]), history)
    weights = model.history_weights.expand(3)
    table, users = model.history_embedding, model.user_embedding
    expected = torch.stack(
        [
            users[1] + weights[0] * table[4] + weights[1] * table[9],
            users[3],
            weights[0] * table[7] + weights[1] * table[7] + weights[2] * table[2],
        ]
    )
    torch.testing.assert_close(found, expected)
    assert len(model.history_weights) == (3 if ordered else 1)


def test_recent_items_begin_with_the_larger_weight():
    assert NeuMF(2, 3, history=4).history_weights.tolist() == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])


def test_an_items_bias_is_added_to_its_score():
    model = spread(NeuMF(5, 12, item_bias=True))
    users, candidates = torch.tensor([0, 4]), torch.tensor([[1, 2], [3, 3]])
    assert model.item_bias is not None
    expected = plain_scores(model, users, candidates) + model.item_bias[candidates]
    torch.testing.assert_close(model(users, candidates, torch.float64), expected, rtol=0, atol=1e-10)


def test_gmf_alone_begins_as_matrix_factorization():
    model = NeuMF(4, 6, factors=8, layers=()).eval()
    users, candidates = torch.arange(4), torch.arange(6).expand(4, 6)
    torch.testing.assert_close(model(users, candidates), model.user_embedding @ model.item_embedding.T)

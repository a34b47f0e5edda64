import dataclasses
import json
import re

import pytest
import torch

from ncf.config import RunConfig, TrainConfig
from ncf.errors import InputError, NcfWarning, RunError
from ncf.ranking.eval_set import make_eval_set
from ncf.recommender import Recommender
from ncf.runs.run import RunDirectory
from ncf.training.train import train
from ncf.training.trainer import Trainer, stream

SMALL = TrainConfig(factors=8, layers=(16, 8), epochs=4, batch_size=320, valid_negative=20)


def train_into(path, dataset, config=SMALL, **run):
    lines: list[str] = []
    result = train(dataset, config, RunConfig(checkpoint_dir=str(path), device="cpu", **run), log=lines.append)
    return result, lines


def records(path):
    """metrics.jsonl without what the clock decides."""
    kept = []
    for line in (path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        kept.append({k: v for k, v in values.items() if k not in ("train_time", "eval_time", "samples_per_s")})
    return kept


def weights_of(path, name="last"):
    return RunDirectory.open(path).load(name)[0]


def test_planted_clusters_are_learned(tmp_path, planted):
    config = TrainConfig(factors=8, layers=(32, 16), epochs=30, batch_size=1000, valid_negative=60)
    result, lines = train_into(tmp_path, planted, config)
    assert result.test["hr@10"] > 0.95
    assert result.history[-1].loss < result.history[0].loss / 2
    popularity = next(line for line in lines if line.startswith("Popularity on the same test"))
    assert float(popularity.split("HR@10 = ")[1].split(",")[0]) < 0.5


def test_people_of_different_clusters_get_different_lists(tmp_path, planted):
    config = TrainConfig(factors=8, layers=(32, 16), epochs=30, batch_size=1000, valid_negative=60)
    train_into(tmp_path, planted, config)
    items, _ = Recommender.load(tmp_path, device="cpu").recommend([1, 2], k=4)
    for user, row in enumerate(items):
        assert all((item - 100) // 20 == user % 4 for item in row.tolist())


@pytest.mark.parametrize("shape", [{}, {"layers": ()}, {"factors": 0}])
def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(tmp_path, tiny, shape):
    config = dataclasses.replace(SMALL, epochs=2, **shape)
    for name, seed in (("a", 0), ("b", 0), ("c", 2)):
        train_into(tmp_path / name, tiny, dataclasses.replace(config, seed=seed))
    assert records(tmp_path / "a") == records(tmp_path / "b") != records(tmp_path / "c")
    for key, value in weights_of(tmp_path / "a").items():
        assert torch.equal(value, weights_of(tmp_path / "b")[key])


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(tmp_path, tiny):
    train_into(tmp_path / "whole", tiny)
    for epochs in (1, 3, 4):
        train_into(tmp_path / "parts", tiny, dataclasses.replace(SMALL, epochs=epochs), resume=epochs > 1)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    for name in ("best", "last"):
        for key, value in weights_of(tmp_path / "whole", name).items():
            assert torch.equal(value, weights_of(tmp_path / "parts", name)[key])


def test_lines_of_a_killed_epoch_are_cut_back(tmp_path, tiny):
    train_into(tmp_path, tiny, dataclasses.replace(SMALL, epochs=2))
    before = records(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "loss": 0.5}\n{"half')
    train_into(tmp_path, tiny, SMALL, resume=True)
    assert records(tmp_path)[:2] == before
    assert [record["epoch"] for record in records(tmp_path)] == [1, 2, 3, 4]


def test_resume_without_options_takes_the_runs(tmp_path, tiny):
    train_into(tmp_path, tiny, dataclasses.replace(SMALL, epochs=2))
    result, _ = train_into(tmp_path, tiny, None, resume=True)
    assert len(result.history) == 2
    assert RunDirectory.open(tmp_path).config == dataclasses.replace(SMALL, epochs=2)


def test_resuming_a_finished_run_prints_the_closing_block_again(tmp_path, tiny):
    _, lines = train_into(tmp_path, tiny)
    before = (tmp_path / "last.safetensors").read_bytes()
    _, again = train_into(tmp_path, tiny, resume=True)
    assert again == lines[lines.index("") :]
    assert (tmp_path / "last.safetensors").read_bytes() == before


def test_resume_without_a_last_starts_afresh(tmp_path, tiny):
    train_into(tmp_path / "a", tiny)
    train_into(tmp_path / "b", tiny, resume=True)
    (tmp_path / "b" / "last.safetensors").unlink()
    train_into(tmp_path / "b", tiny, resume=True)
    assert records(tmp_path / "a") == records(tmp_path / "b")


@pytest.mark.parametrize("earlier", [True, False])
def test_best_weights_that_a_kill_kept_from_the_disk_are_made_from_last(tmp_path, tiny, monkeypatch, earlier):
    def killed_at_best(self, name, tensors, state):
        if name == "best" and not (earlier and state["epoch"] == 1):
            raise KeyboardInterrupt
        save(self, name, tensors, state)

    save = RunDirectory.save
    with monkeypatch.context() as patched:
        patched.setattr(RunDirectory, "save", killed_at_best)
        with pytest.raises(KeyboardInterrupt):
            train_into(tmp_path, tiny)
    done = len(records(tmp_path))
    result, _ = train_into(tmp_path, tiny, dataclasses.replace(SMALL, epochs=done), resume=True)
    assert result.best_epoch == done == RunDirectory.open(tmp_path).load("best")[1]["epoch"]
    last = weights_of(tmp_path, "last")
    for name, value in weights_of(tmp_path, "best").items():
        assert torch.equal(value, last[f"model.{name}"])


def test_the_best_epoch_is_kept_not_the_last(tmp_path, tiny):
    result, _ = train_into(tmp_path, tiny, dataclasses.replace(SMALL, epochs=12))
    best = max(result.history, key=lambda record: (record.hr, record.ndcg))
    assert result.best_epoch == best.epoch
    found = Recommender.load(tmp_path, device="cpu").evaluate("validation")
    assert (found.hr, found.ndcg) == (best.hr, best.ndcg)


def test_evaluation_of_the_saved_best_reproduces_the_test_score(tmp_path, tiny):
    result, _ = train_into(tmp_path, tiny)
    assert Recommender.load(tmp_path, device="cpu").evaluate().to_dict() == result.test


def test_the_lines_are_the_recipes(tmp_path, tiny):
    _, lines = train_into(tmp_path, tiny, dataclasses.replace(SMALL, epochs=2), verbose=True)
    number = r"\d+\.\d{4}"
    metrics = rf"Train Time: {number}, Eval Time: {number}, HR: {number}, NDCG: {number}"
    assert re.fullmatch(rf"Epoch: 01, {metrics}", lines[1])
    assert re.fullmatch(rf"New Best Epoch: 01, {metrics}", lines[2])
    block = "\n".join(lines)
    names = "Minimum Train Time per Epoch: |Average Train Time per Epoch: |Average Train Throughput:     |"
    names += "Minimum Eval Time per Epoch:  |Average Eval Time per Epoch:  |Average Eval Throughput:      |"
    names += "Time to Train:                |Best HR:                      "
    for name in names.split("|"):
        assert re.search(rf"^{name}{number}$", block, re.MULTILINE), name
    assert "First Epoch to hit:           -" in lines
    assert re.search(r"^Best Epoch:                   \d$", block, re.MULTILINE)
    assert re.search(rf"^Eval Time = {number}, HR@10 = {number}, NDCG@10 = {number}$", block, re.MULTILINE)
    assert "Epoch selected on:            the validation split" in lines
    assert any(line.startswith("Protocol: the test item of 40 users ranked with 20 unseen items") for line in lines)


def test_without_verbose_only_new_bests_speak(tmp_path, tiny):
    _, lines = train_into(tmp_path, tiny, dataclasses.replace(SMALL, epochs=8))
    assert lines[0].startswith("Recipe: nvidia (factors 8, layers 16 8")
    assert lines[1].startswith("New Best Epoch: 01")
    assert not any(line.startswith("Epoch: ") for line in lines)


def test_target_stops_the_run(tmp_path, tiny):
    result, lines = train_into(tmp_path, tiny, dataclasses.replace(SMALL, target=0.01))
    assert len(result.history) == 1
    assert "First Epoch to hit:           1" in lines


def test_patience_stops_the_run(tmp_path, tiny):
    config = dataclasses.replace(SMALL, epochs=200, patience=3, learning_rate=1e-12)
    result, _ = train_into(tmp_path, tiny, config)
    assert len(result.history) == result.best_epoch + 3


def test_eval_after_skips_early_evaluations(tmp_path, tiny):
    result, _ = train_into(tmp_path, tiny, dataclasses.replace(SMALL, eval_after=3))
    assert [record.hr is None for record in result.history] == [True, True, True, False]
    assert result.best_epoch == 4
    with pytest.raises(InputError, match="--eval-after must be below --epochs"):
        train_into(tmp_path / "b", tiny, dataclasses.replace(SMALL, eval_after=4))


def test_the_test_split_is_looked_at_once(tmp_path, tiny, monkeypatch):
    looks = []
    from ncf.training import train as module

    def watched(data, split, *rest, **options):
        looks.append(split)
        return make_eval_set(data, split, *rest, **options)

    monkeypatch.setattr(module, "make_eval_set", watched)
    train_into(tmp_path, tiny)
    assert looks == ["validation", "test"]


def test_selection_on_the_test_split_says_so(tmp_path, tiny):
    _, lines = train_into(tmp_path, tiny, dataclasses.replace(SMALL, select_on="test"))
    assert "Epoch selected on:            the test split" in lines
    assert lines[-2].endswith("selected on the test split itself")


def test_the_last_epoch_can_be_kept_without_looking(tmp_path, tiny):
    result, lines = train_into(tmp_path, tiny, dataclasses.replace(SMALL, select_on="last"), verbose=True)
    assert result.best_epoch == 4
    assert "Loss: " in lines[1]
    assert RunDirectory.open(tmp_path).load("best")[1]["epoch"] == 4


@pytest.mark.filterwarnings("ignore:3 of 3 users have seen every item")
def test_nothing_to_test_on_loses_nothing(tmp_path, make_dataset):
    dataset = make_dataset([[0, 1, 2, 3]] * 3, 4)
    result, lines = train_into(tmp_path, dataset, dataclasses.replace(SMALL, select_on="last"))
    assert result.test is None
    assert "Best Epoch:                   4" in lines
    assert any(line.startswith("No test score: 0 of 3 users can be evaluated") for line in lines)


def test_the_test_is_warned_of_too(tmp_path, tiny):
    with pytest.warns(NcfWarning, match="k = 30 is not below the 21 candidates"):
        train_into(tmp_path, tiny, dataclasses.replace(SMALL, select_on="last", topk=30))


def test_a_dataset_without_validation_names_the_ways_out(tmp_path, make_dataset):
    dataset = make_dataset([[0, 1], [1, 2]], 9)
    with pytest.raises(InputError, match="--select-on test or --select-on last"):
        train_into(tmp_path / "run", dataset)
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_best(tmp_path, tiny):
    path = tmp_path / "good"
    train_into(path, tiny, dataclasses.replace(SMALL, epochs=1))
    with pytest.raises(RunError, match="epoch 1, step [1-9].*lower --learning-rate"):
        train_into(tmp_path / "bad", tiny, dataclasses.replace(SMALL, learning_rate=1e30))
    assert not (tmp_path / "bad" / "best.safetensors").exists()
    best = (path / "best.safetensors").read_bytes()
    tensors, state = RunDirectory.open(path).load("last")
    tensors["model.output.bias"] = torch.tensor([float("nan")])
    RunDirectory.open(path).save("last", tensors, state)
    with pytest.raises(RunError, match="epoch 2, step 1 of 4"):
        train_into(path, tiny, SMALL, resume=True)
    assert (path / "best.safetensors").read_bytes() == best


def test_two_trainers_on_one_directory(tmp_path, tiny):
    from ncf.files import locked

    with locked(tmp_path / ".lock", "somebody"), pytest.raises(InputError, match="in use by another `ncf train`"):
        train_into(tmp_path, tiny)


def test_nothing_is_left_in_a_directory_that_is_something_elses(tmp_path, tiny):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="thesis.tex.*no run"):
        train_into(tmp_path, tiny)
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_fit_all_trains_on_everything_for_the_chosen_epochs(tmp_path, tiny):
    result, _ = train_into(tmp_path, tiny, dataclasses.replace(SMALL, fit_all=True))
    recommender = Recommender.load(tmp_path, device="cpu")
    assert recommender.weights == "deploy"
    assert recommender._state == {"epoch": result.best_epoch}
    with pytest.raises(InputError, match="held-out items too"):
        recommender.evaluate()
    assert Recommender.load(tmp_path, device="cpu", weights="best").evaluate().to_dict() == result.test
    assert not (tmp_path / "deploy-last.safetensors").exists()
    sequence = tiny.interactions.sequence("validation", "test")
    trainer = Trainer(RunDirectory.open(tmp_path).new_model(), sequence, SMALL, torch.device("cpu"), "deploy")
    for number in range(1, result.best_epoch + 1):
        trainer.epoch(number)
    for key, value in weights_of(tmp_path, "deploy").items():
        assert torch.equal(value, trainer.model.state_dict()[key])


def test_streams_differ_by_epoch_rank_and_purpose():
    seeds = {
        stream(seed, epoch, rank, purpose)
        for seed in range(3)
        for epoch in range(3)
        for rank in range(3)
        for purpose in ("train", "deploy")
    }
    assert len(seeds) == 54


def test_a_user_with_every_item_does_not_hang_training(tmp_path, make_dataset):
    dataset = make_dataset([[0, 1, 2, 3, 4], [0, 1, 2], [3, 1, 2]], 5, validation_items=torch.tensor([-1, 1, 1]).int())
    interactions = dataclasses.replace(
        dataset.interactions,
        train_users=torch.tensor([0, 0, 0, 0, 0, 1, 2], dtype=torch.int32),
        train_items=torch.tensor([0, 1, 2, 3, 4, 0, 3], dtype=torch.int32),
        test_items=torch.tensor([-1, 2, 2], dtype=torch.int32),
    )
    full = dataclasses.replace(dataset, interactions=interactions)
    with pytest.warns(UserWarning, match="fewer than 20 unseen|not below"):
        result, _ = train_into(tmp_path, full, dataclasses.replace(SMALL, topk=1))
    assert result.test["users"] == 2


def test_bf16_learns_as_fp32_does(tmp_path, planted, recwarn):
    config = TrainConfig(factors=8, layers=(32, 16), epochs=20, batch_size=1000, valid_negative=60)
    losses = {}
    for precision in ("fp32", "bf16"):
        result, _ = train_into(tmp_path / precision, planted, dataclasses.replace(config, precision=precision))
        losses[precision] = result.history[-1].loss
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.1)
    recwarn.clear()


def test_more_memory_than_the_device_has_states_both_sizes(tiny, monkeypatch):
    monkeypatch.setattr("ncf.device.memory_of", lambda _: 2**10)
    model = Recommender(SMALL)
    with pytest.raises(InputError, match=r"needs about .* GiB and cpu has 0.0 GiB"):
        model.fit(dataclasses.replace(tiny, name="big"), device="cpu")

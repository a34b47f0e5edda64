"""RecBole's NeuMF and RecBole's training loop, on one batch at a time.

Its network differs in one place, which is left as it is: dropout lies before each hidden layer, not after.
"""

import logging
import tempfile
from types import SimpleNamespace
from typing import Any

import recbole
import torch
from arm import BETAS, DROPOUT, EPS, FACTORS, LAYERS, LEARNING_RATE, Arm, Job, draw_pairs, serve
from recbole.config import Config
from recbole.data.interaction import Interaction
from recbole.model.general_recommender import NeuMF
from recbole.trainer import Trainer


def build(job: Job) -> Arm:
    """Steps with `Trainer._train_epoch` over an epoch of one batch; Adam is the trainer's, its betas set."""
    logging.disable(logging.WARNING)
    settings = {
        "mf_embedding_size": FACTORS,
        "mlp_embedding_size": LAYERS[0] // 2,
        "mlp_hidden_size": list(LAYERS[1:]),
        "dropout_prob": DROPOUT,
        "learning_rate": LEARNING_RATE,
        "use_gpu": False,
        "checkpoint_dir": tempfile.gettempdir(),
    }
    config = Config(model="NeuMF", dataset="pairs", config_dict=settings)
    torch.manual_seed(0)
    counts = {config["USER_ID_FIELD"]: job.users, config["ITEM_ID_FIELD"]: job.items}
    model = NeuMF(config, SimpleNamespace(num=counts.__getitem__))
    trainer = Trainer(config, model)
    for group in trainer.optimizer.param_groups:
        group["betas"], group["eps"] = BETAS, EPS
    fields = config["USER_ID_FIELD"], config["ITEM_ID_FIELD"], config["LABEL_FIELD"]

    def load(number: int) -> list[Interaction]:
        columns = (torch.from_numpy(x) for x in draw_pairs(job, number))
        return [Interaction(dict(zip(fields, columns, strict=True)))]

    def take(batches: Any) -> float:
        return float(trainer._train_epoch(batches, 0))

    return load, take


if __name__ == "__main__":
    serve(build, lambda: f"recbole {recbole.__version__}, torch {torch.__version__}, {torch.get_num_threads()} threads")

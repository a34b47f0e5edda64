"""A run's directory: all that evaluating, recommending and resuming need, and nothing that runs code when loaded.

    config.json           options, version and fingerprint; where it is, there is a run
    dataset/              the dataset, as `ncf prepare` writes it
    best.safetensors      the weights of the best epoch
    last.safetensors      weights, Adam's state and the epoch, to resume from
    deploy.safetensors    weights trained on every interaction (--fit-all)
    metrics.jsonl         an object per epoch
    result.json           how a finished run ended: the closing block and the test score

Each file is written beside its place, synced and renamed, so it is whole or absent. Weights carry the run's
fingerprint, so that those of two runs do not mix. Of several processes rank 0 writes; the files do not depend on how
many processes there are.
"""

import hashlib
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.interactions import Interactions
from ncf.data.shard import AnyDataset, load_dataset, save_dataset
from ncf.data.storage import read_manifest
from ncf.errors import InputError
from ncf.files import atomic_file
from ncf.model.neumf import NeuMF
from ncf.parallel.group import SINGLE, ProcessGroup
from ncf.runs.weights import digest_of, read_metadata, read_weights, write_weights
from ncf.version import VERSION

FORMAT_VERSION = 2
CONFIG, DATASET, METRICS, RESULT, LOCK = "config.json", "dataset", "metrics.jsonl", "result.json", ".lock"
BEST, LAST, DEPLOY, DEPLOY_LAST = "best", "last", "deploy", "deploy-last"
WEIGHTS = tuple(f"{name}.safetensors" for name in (BEST, LAST, DEPLOY, DEPLOY_LAST))


class RunDirectory:
    """A run's directory, opened by `create`, `open` or `start_run`. All processes make the same calls."""

    def __init__(self, path: Path, config: TrainConfig, dataset: AnyDataset, group: ProcessGroup = SINGLE) -> None:
        self.path, self.config, self.dataset, self.group = path, config, dataset, group
        self.fingerprint = run_fingerprint(config, dataset)

    @classmethod
    def create(
        cls, path: Path, config: TrainConfig, dataset: AnyDataset, group: ProcessGroup = SINGLE
    ) -> "RunDirectory":
        """Write the parts of a new run that never change; `config.json` last, as it makes a run of the directory."""
        run = cls(path, config, dataset, group)
        if group.is_main and not is_inside(dataset, path):
            save_dataset(dataset, path / DATASET)
        run.write_config()
        group.barrier()
        return run

    @classmethod
    def open(cls, path: Path, group: ProcessGroup = SINGLE, *, dataset: AnyDataset | None = None) -> "RunDirectory":
        """Read a run; of several processes each reads its own users. `dataset` spares reading it where it is the run's.

        Raises InputError where there is none, or it is damaged, of another version or a mix.
        """
        config, fingerprint = _read_config(path)
        try:
            if dataset is None or read_manifest(path / DATASET)["fingerprint"] != dataset.fingerprint:
                dataset = load_dataset(path / DATASET, group)
        except InputError as error:
            raise InputError(str(error).replace("prepare it again", "train the run again")) from None
        run = cls(path, config, dataset, group)
        if run.fingerprint != fingerprint:
            raise InputError(f"{path}: {CONFIG} and {DATASET}/ are of two runs, or were changed; train the run again")
        return run

    def write_config(self) -> None:
        """Write `config.json`."""
        if self.group.is_main:
            content = {"format": FORMAT_VERSION, "ncf": VERSION, "run": self.fingerprint}
            _write_json(self.path / CONFIG, content | {"options": self.config.to_dict()})

    def new_model(self) -> NeuMF:
        """A network of this run's sizes, with its initial weights; users are those of this process."""
        return make_model(self.dataset.interactions, self.config)

    def has(self, name: str) -> bool:
        """Whether the weights `name` (best, last, deploy) are there."""
        return bool(self.group.broadcast(self._file(name).exists))

    def save(self, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write tensors, with rank 0's `state` (JSON) in their header, in one piece. Raises RunError where it cannot.

        Those with a row per user hold this process's users, and in the file are whole.
        """
        metadata = {"run": self.fingerprint, "state": json.dumps(state)}
        if not self.group.is_main:
            write_weights(self._file(name), tensors, metadata, self.group, self.dataset.n_users)
            return
        with atomic_file(self._file(name)) as temporary:
            write_weights(temporary, tensors, metadata, self.group, self.dataset.n_users)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors, user tables cut to this process's users, and state. Raises InputError where absent or damaged."""
        path, mine = self._file(name), self.dataset.interactions
        digest = self.group.broadcast(lambda: self._check_weights(path)["sha256"])
        try:
            tensors, metadata, n_users = read_weights(path, slice(mine.user_offset, mine.user_offset + mine.n_users))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged: {error}; train the run again") from None
        if metadata.get("sha256") != digest:  # a file system over a network may show an earlier one
            raise InputError(f"{path} is not the file that rank 0 finds there: all processes must share the directory")
        if n_users != self.dataset.n_users:
            raise InputError(f"{path} has {n_users} users and the run {self.dataset.n_users}; train the run again")
        return tensors, json.loads(metadata["state"])

    def epoch_of(self, name: str) -> int | None:
        """The epoch of the weights `name`; None where they are absent. Raises InputError as `load` does."""
        if not self.has(name):
            return None
        return int(self.group.broadcast(lambda: json.loads(self._check_weights(self._file(name))["state"])["epoch"]))

    def load_model(self, name: str) -> tuple[NeuMF, dict[str, Any]]:
        """The network with the weights `name`, and the state saved with them."""
        tensors, state = self.load(name)
        model = self.new_model()
        expected = {name: parameter.shape for name, parameter in model.named_parameters()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
        if odd := sorted(name for name in expected | found if expected.get(name) != found.get(name)):
            raise InputError(f"{self._file(name)} does not fit the run's network: {', '.join(odd)} differ")
        model.load_state_dict(tensors)
        return model, state

    def remove(self, name: str) -> None:
        """Delete the weights `name` where they exist."""
        if self.group.is_main:
            self._file(name).unlink(missing_ok=True)

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`: the run has ended."""
        if self.group.is_main:
            _write_json(self.path / RESULT, {"run": self.fingerprint, **result})

    def load_result(self, about: dict[str, Any]) -> dict[str, Any] | None:
        """`result.json` of this run where it agrees with `about`; None where there is none, or none that is whole."""
        found: dict[str, Any] | None = self.group.broadcast(lambda: self._read_result(about))
        return found

    def _read_result(self, about: dict[str, Any]) -> dict[str, Any] | None:
        try:
            result = dict(json.loads((self.path / RESULT).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        expected = {"run": self.fingerprint, **about}
        return result if all(result.get(key) == value for key, value in expected.items()) else None

    def forget_result(self) -> None:
        """Remove `result.json`: the run goes on."""
        if self.group.is_main:
            (self.path / RESULT).unlink(missing_ok=True)

    def _check_weights(self, path: Path) -> dict[str, str]:
        """The metadata of a file that is whole and of this run."""
        if not path.exists():
            raise InputError(
                f"{path} is missing: the run was stopped before its first epoch was saved, or these weights were not "
                "saved; train it again, or go on with --resume"
            )
        try:
            metadata = read_metadata(path)
            if metadata.get("run") != self.fingerprint:
                raise InputError(f"{path} belongs to another run than {self.path / CONFIG}: do not mix two runs' files")
            if metadata.get("sha256") != digest_of(path, metadata.get("sha256", "")):
                raise InputError(f"{path} is damaged: its checksum does not match; train the run again")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged: {error}; train the run again") from None
        return metadata

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"


def make_model(interactions: Interactions, config: TrainConfig) -> NeuMF:
    """The network of `config` for some interactions, with its initial weights."""
    return NeuMF(
        interactions.n_users,
        interactions.n_items,
        factors=config.factors,
        layers=config.layers,
        dropout=config.dropout,
        history=config.history,
        ordered=interactions.ordered,
        item_bias=config.item_bias,
        seed=config.seed,
        user_offset=interactions.user_offset,
    )


def run_fingerprint(config: TrainConfig, dataset: AnyDataset) -> str:
    """What identifies a run: the dataset and the options that a resumed run may not change.

    Only what differs from an option's neutral value counts, so that a new option leaves earlier runs as they are.
    """
    values = config.to_dict()
    changed = {
        item.name: values[item.name]
        for item in fields(config)
        if not item.metadata["resumable"] and getattr(config, item.name) != item.default
    }
    text = json.dumps(["ncf run", changed, dataset.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_inside(dataset: AnyDataset, path: Path) -> bool:
    """Whether the dataset was read from the very run in the directory `path`."""
    return dataset.directory is not None and dataset.directory.resolve() == (path / DATASET).resolve()


def options_of(path: Path) -> TrainConfig | None:
    """The options of the run in the directory `path`, None where there is none. Raises InputError where damaged."""
    return _read_config(path)[0] if (path / CONFIG).exists() else None


def _read_config(path: Path) -> tuple[TrainConfig, str]:
    """The options and the fingerprint in `config.json`; an option that it lacks has its neutral value."""
    file = path / CONFIG
    if not path.is_dir() or not file.exists():
        what = "is not a directory" if path.exists() and not path.is_dir() else f"holds no run (no {CONFIG})"
        raise InputError(
            f"{path} {what if path.exists() else 'does not exist'}: name the --checkpoint-dir of `ncf train`"
        )
    try:
        content = dict(json.loads(file.read_text()))
        if content.get("format") != FORMAT_VERSION:
            raise InputError(f"{file} has format {content.get('format')}, and ncf {VERSION} reads {FORMAT_VERSION}")
        options = dict(content["options"])
        if unknown := sorted(set(options) - {item.name for item in fields(TrainConfig)}):
            raise InputError(
                f"{file} has options that ncf {VERSION} does not know ({', '.join(unknown)}): it was written by ncf "
                f"{content.get('ncf')}, so open it with that version"
            )
        return TrainConfig(**options), str(content["run"])
    except InputError as error:
        raise InputError(f"{error}; or train the run again") from None
    except (OSError, KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{file} is damaged: {reason}; train the run again") from None


def _write_json(file: Path, content: dict[str, Any]) -> None:
    with atomic_file(file) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")

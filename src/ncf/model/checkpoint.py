"""A run's directory: all that evaluating, recommending and resuming need, and nothing that runs code when loaded.

    config.json           options, sizes, fingerprints, format version; where it is, there is a run
    users.parquet  items.parquet  seen.parquet  [negatives.parquet]    the dataset, held-out items included
    best.safetensors      the weights of the best epoch
    last.safetensors      weights, Adam's state and the epoch, to resume from
    deploy.safetensors    weights trained on every interaction (--fit-all)
    metrics.jsonl         an object an epoch
    result.json           how a finished run ended: the closing block and the test score

Each file is written beside its place, synced and renamed, so it is whole or absent, and each carries the run's
fingerprint, so that a mix of two runs is an error. Of several ranks the first writes; what is written does not depend
on how many there are.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ncf.config import TrainConfig
from ncf.data.dataset import Dataset
from ncf.distributed import ALONE, Ranks
from ncf.errors import InputError, RunError
from ncf.files import atomic_file
from ncf.model.neumf import NeuMF
from ncf.model.run_tables import read_dataset, table_names, write_dataset
from ncf.model.weights import digest_of, read_metadata, read_weights, write_weights

FORMAT_VERSION = 1
CONFIG = "config.json"
METRICS = "metrics.jsonl"
LOCK = ".lock"
RESULT = "result.json"
ABOUT: dict[str, Callable[[Any], Any]] = {
    "name": str,
    "seed": int,
    "users": int,
    "items": int,
    "interactions": int,
    "summary": dict,
    "fingerprint": str,
}
BEST, LAST, DEPLOY, DEPLOY_LAST = "best", "last", "deploy", "deploy-last"


class Run:
    """A run's directory, opened; use `Run.create` or `Run.open`. All ranks make the same calls."""

    def __init__(self, path: Path, config: TrainConfig, dataset: Dataset, ranks: Ranks = ALONE) -> None:
        self.path, self.config, self.dataset, self.ranks = path, config, dataset, ranks
        self.fingerprint = run_fingerprint(config, dataset)

    @classmethod
    def create(cls, path: Path, config: TrainConfig, dataset: Dataset, ranks: Ranks = ALONE) -> "Run":
        """Write the parts of a new run that never change; `config.json` last, as it makes a run of the directory."""
        run = cls(path, config, dataset, ranks)
        if ranks.first:
            try:
                write_dataset(path, dataset, run.fingerprint)
                run.write_config()
            except RunError:
                for name in (*table_names(), CONFIG):
                    (path / name).unlink(missing_ok=True)
                raise
        ranks.wait()
        return run

    def write_config(self) -> None:
        """Write `config.json`."""
        if not self.ranks.first:
            return
        dataset = self.dataset
        content = {
            "format": FORMAT_VERSION,
            "run": self.fingerprint,
            "options": self.config.to_dict(),
            "dataset": {
                "name": dataset.name,
                "fingerprint": dataset.fingerprint,
                "seed": dataset.seed,
                "users": dataset.whole_users,
                "items": dataset.n_items,
                "interactions": dataset.whole_train,
                "summary": dataset.summary,
            },
        }
        with atomic_file(self.path / CONFIG) as temporary:
            temporary.write_text(json.dumps(content, indent=2) + "\n")

    @classmethod
    def open(cls, path: Path, ranks: Ranks = ALONE) -> "Run":
        """Read a run; of several ranks each reads its own users.

        Raises InputError where there is none, or it is damaged, of another version or a mix.
        """
        about, config, mark = _read_config(path)
        dataset = read_dataset(path, about, mark, ranks)
        if dataset.fingerprint != about["fingerprint"]:
            raise InputError(f"{path}: its tables or {CONFIG} were changed since training; train the run again")
        run = cls(path, config, dataset, ranks)
        if run.fingerprint != mark:
            raise InputError(f"{path / CONFIG} was changed since training, or is of another run; train the run again")
        return run

    def new_model(self) -> NeuMF:
        """A network of this run's sizes, with its initial weights; users are those of this rank."""
        config, dataset = self.config, self.dataset
        return NeuMF(
            dataset.n_users,
            dataset.n_items,
            factors=config.factors,
            layers=config.layers,
            dropout=config.dropout,
            seed=config.seed,
            first_user=dataset.first_user,
        )

    def has(self, name: str) -> bool:
        """Whether the weights `name` (best, last, deploy) are there."""
        return bool(self.ranks.from_first(self._file(name).exists))

    def save(self, name: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write tensors, with rank 0's `state` (JSON) in their header, in one piece. Raises RunError where it cannot.

        Those with a row a user hold this rank's users, and in the file are whole.
        """
        metadata = {"format": str(FORMAT_VERSION), "run": self.fingerprint, "state": json.dumps(state)}
        n_users = self.dataset.whole_users
        if not self.ranks.first:
            write_weights(self._file(name), tensors, metadata, self.ranks, n_users)
            return
        with atomic_file(self._file(name)) as temporary:
            write_weights(temporary, tensors, metadata, self.ranks, n_users)

    def load(self, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Read tensors, user tables cut to this rank's users, and state back; the first rank checks the whole file.

        Raises InputError where they are absent, damaged or of another run.
        """
        path, dataset = self._file(name), self.dataset
        checked = self.ranks.from_first(lambda: self._check_weights(path))
        rows = slice(dataset.first_user, dataset.first_user + dataset.n_users)
        try:
            tensors, metadata, n_users = read_weights(path, rows)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged: {error}; train the run again") from None
        if metadata.get("sha256") != checked:  # a file system over a network may show an earlier one
            raise InputError(f"{path} is not the file that rank 0 finds there: all processes must share the directory")
        if n_users != dataset.whole_users:
            raise InputError(f"{path} is of {n_users} users and the run has {dataset.whole_users}; train the run again")
        return tensors, json.loads(metadata["state"])

    def _check_weights(self, path: Path) -> str:
        """The digest of a file that is whole and of this run."""
        if not path.exists():
            raise InputError(
                f"{path} is missing: the run was stopped before its first epoch was saved, or these weights were not "
                "saved; train it again, or go on with --resume"
            )
        try:
            metadata = read_metadata(path)
            _check_version(path, metadata.get("format"))
            if metadata.get("run") != self.fingerprint:
                raise InputError(
                    f"{path} belongs to another run than {self.path / CONFIG}: do not mix the files of two runs"
                )
            digest = digest_of(path, metadata)
            if metadata.get("sha256") != digest:
                raise InputError(f"{path} is damaged: its checksum does not match; train the run again")
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is damaged: {error}; train the run again") from None
        return digest

    def epoch_of(self, name: str) -> int | None:
        """The epoch of the weights `name`; None where they are absent. Raises InputError as `load` does."""
        if not self.has(name):
            return None

        def read() -> int:
            self._check_weights(self._file(name))
            return int(json.loads(read_metadata(self._file(name))["state"])["epoch"])

        return int(self.ranks.from_first(read))

    def load_model(self, name: str) -> tuple[NeuMF, dict[str, Any]]:
        """The network with the weights `name`, and the state saved with them."""
        tensors, state = self.load(name)
        model = self.new_model()
        load_weights(model, tensors, self._file(name))
        return model, state

    def remove(self, name: str) -> None:
        """Delete the weights `name` where they exist."""
        if self.ranks.first:
            self._file(name).unlink(missing_ok=True)

    def save_result(self, result: dict[str, Any]) -> None:
        """Write `result.json`: the run has ended."""
        if not self.ranks.first:
            return
        result = {"run": self.fingerprint, **result}
        result["checksum"] = _checksum(result)
        with atomic_file(self.path / RESULT) as temporary:
            temporary.write_text(json.dumps(result, indent=2) + "\n")

    def load_result(self, about: dict[str, Any]) -> dict[str, Any] | None:
        """`result.json` of this run where it agrees with `about`; None where there is none, or none that is whole."""
        found: dict[str, Any] | None = self.ranks.from_first(
            lambda: self._read_result({"run": self.fingerprint, **about})
        )
        return found

    def _read_result(self, expected: dict[str, Any]) -> dict[str, Any] | None:
        try:
            result = json.loads((self.path / RESULT).read_text())
        except (OSError, ValueError):
            return None
        if not isinstance(result, dict) or any(result.get(key) != value for key, value in expected.items()):
            return None
        return result if result.get("checksum") == _checksum(result) else None

    def forget_result(self) -> None:
        """Remove `result.json`: the run goes on."""
        if self.ranks.first:
            (self.path / RESULT).unlink(missing_ok=True)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.safetensors"


def run_fingerprint(config: TrainConfig, dataset: Dataset) -> str:
    """What identifies a run: the dataset and the options that a resumed run may not change."""
    fixed = {item.name: config.to_dict()[item.name] for item in fields(config) if not item.metadata["live"]}
    text = json.dumps([FORMAT_VERSION, fixed, dataset.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def load_weights(model: NeuMF, tensors: dict[str, Tensor], source: Path) -> None:
    """Copy `tensors` into the model. Raises InputError where a name or a shape differs."""
    expected = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if expected != found:
        odd = sorted(name for name in expected | found if expected.get(name) != found.get(name))
        raise InputError(f"{source} does not fit the run's network: {', '.join(odd)} differ; train the run again")
    model.load_state_dict(tensors)


def options_of(path: Path) -> TrainConfig | None:
    """The options of the run in the directory `path`, None where there is none. Raises InputError where damaged."""
    return _read_config(path)[1] if (path / CONFIG).exists() else None


def _read_config(path: Path) -> tuple[dict[str, Any], TrainConfig, str]:
    """What `config.json` says of the dataset, the options and the run's fingerprint."""
    content = _read_json(path)
    file = path / CONFIG
    try:
        about = {name: kind(content["dataset"][name]) for name, kind in ABOUT.items()}
        return about, TrainConfig.from_dict(content["options"]), str(content["run"])
    except InputError as error:
        raise InputError(f"{file}: {error}; train the run again") from None
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(f"{file} is damaged: {reason}; train the run again") from None


def _read_json(path: Path) -> dict[str, Any]:
    file = path / CONFIG
    if not path.is_dir() or not file.exists():
        what = "is not a directory" if path.exists() and not path.is_dir() else "holds no run (no config.json)"
        raise InputError(
            f"{path} {what if path.exists() else 'does not exist'}: name the --checkpoint-dir of `ncf train`"
        )
    try:
        content = json.loads(file.read_text())
    except (ValueError, OSError) as error:
        raise InputError(f"{file} is damaged: {error}; train the run again") from None
    if not isinstance(content, dict):
        raise InputError(f"{file} is damaged: not a JSON object; train the run again")
    _check_version(file, content.get("format"))
    return content


def _check_version(path: Path, version: object) -> None:
    if str(version) != str(FORMAT_VERSION):
        raise InputError(f"{path} has format {version}, and this version of ncf reads {FORMAT_VERSION}: train it again")


def _checksum(result: dict[str, Any]) -> str:
    text = json.dumps({key: value for key, value in result.items() if key != "checksum"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]

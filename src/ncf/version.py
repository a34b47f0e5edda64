"""The version, where every module may read it; `pyproject.toml` has it too."""

VERSION = "0.1.0"

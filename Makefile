# make setup | demo | test | lint. PYTHON picks the interpreter, VENV the environment's folder.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= demo

.PHONY: setup demo test test-slow lint format clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tensorboard,dev]'
	touch $@

demo: setup
	$(BIN)/ncf prepare synthetic -o $(DEMO)/data --overwrite
	$(BIN)/ncf train --data $(DEMO)/data --checkpoint-dir $(DEMO)/run --overwrite --epochs 8 --verbose
	$(BIN)/ncf recommend --checkpoint-dir $(DEMO)/run --user 7 --user 8 -k 5
	@echo "The model and all that it needs lie in $(DEMO)/run; its epochs in $(DEMO)/run/metrics.jsonl"

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(DEMO) build dist src/*.egg-info

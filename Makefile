# Everything a developer runs. Each target makes its own virtual environment (.venv) when there is none;
# VENV=/path uses another one, ARGS="…" is handed on, JOBS=n runs that many tests side by side.

VENV ?= .venv
ARGS ?=
JOBS ?= 4
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
READY := $(VENV)/.pgtruth-ready

.PHONY: help test unit lint types format demo up bench conformance matrix compose clean

help: ## what there is
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

test: $(READY) ## all tests, against servers that it starts itself
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

unit: $(READY) ## only the quick tests
	$(BIN)/python -m pytest tests/unit $(ARGS)

lint: $(READY) ## style, and the arrows between modules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(READY) ## mypy, strict
	$(BIN)/mypy

format: $(READY) ## what a machine can put right
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

demo: $(READY) ## the main job, judged; SIGNAL=redis|notify
	$(BIN)/python -m celery_app.demo

up: $(READY) ## keep everything running and print Flower's address
	$(BIN)/python -m celery_app.demo up

bench: $(READY) ## this project beside Celery + Redis
	$(BIN)/python tests/bench/bench.py short $(ARGS)

conformance: $(READY) ## Celery's and kombu's own suites, with our URLs
	$(BIN)/python -m tests.conformance $(ARGS)

matrix: $(READY) ## the suite's core on the oldest and newest versions
	$(BIN)/python -m tests.matrix $(ARGS)

compose: ## the same with real images
	docker compose up --build

clean: ## remove what the targets made
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist

$(READY): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $(READY)

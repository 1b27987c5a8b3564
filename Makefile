# Everything runs from ./.venv, built once from requirements.lock. Needs Python >= 3.11, make and a package registry.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
JOBS ?= 4  # tests wait more than they compute
# Set in many containers, and then every process compiles its imports again: SQLAlchemy in 1.2 s instead of 0.3.
unexport PYTHONDONTWRITEBYTECODE
.DEFAULT_GOAL := help
.PHONY: help install demo test test-all faults full lint format sync lock bench bench-full guide new-pattern release clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Build ./.venv (done by every other target when needed)

$(STAMP): requirements.lock bootstrap.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else f"Queuesmith needs Python 3.11 to 3.13, this is {v.major}.{v.minor}. Try: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	@echo "installing into ./.venv (once, about 20 s)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || { echo "python venv is missing; on Debian/Ubuntu: apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r bootstrap.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --require-hashes -r requirements.lock
	@$(BIN)/uv pip install -q --python $(BIN)/python --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Run StudyHall and its guided tour: a worker is killed, nothing is lost
	@$(BIN)/studyhall demo $(ARGS)

test: $(STAMP) ## Run the tests, the quick fault suite included (minutes); ARGS=tests/prove for one folder, all of it
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(STAMP) ## Those of whole services, stacks and browsers too, as CI does (half an hour)
	@QUEUESMITH_SLOW=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

faults: $(STAMP) ## Run the full fault suite and rewrite the figures in reference/figures
	@QUEUESMITH_FULL=1 QUEUESMITH_FIGURES=reference/figures $(BIN)/python -m pytest -n 2 --dist worksteal --timeout 900 -m "fault or measured" $(ARGS)

full: $(STAMP) ## Run what is too long for every day: each pattern in each layout, each template (an hour)
	@QUEUESMITH_FULL=1 $(BIN)/python -m pytest -n 2 --dist worksteal --timeout 900 -m "full and not fault and not measured" $(ARGS)

lint: $(STAMP) ## ruff and strict types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(STAMP) ## Format and fix what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

sync: $(STAMP) ## Regenerate what is derived from the pages, the modules and the figures
	@$(BIN)/python -m guide.sync

bench: $(STAMP) ## Quick benchmark beside Celery, RQ, arq, … (minutes); ARGS="--section latency --peers queuesmith,huey"
	@$(BIN)/python -m bench $(ARGS)

bench-full: $(STAMP) ## The whole benchmark, three rounds, and rewrite bench/results.json
	@$(BIN)/python -m bench --full --publish $(ARGS)

new-pattern: $(STAMP) ## Lay out a new pattern: NAME=slow-start SKILL=background-jobs
	@$(BIN)/python -m guide.new_pattern $(NAME) $(SKILL)

guide: $(STAMP) ## Build the pattern guide into build/guide; ARGS=--serve to read it
	@$(BIN)/python -m guide.build $(ARGS)

lock: $(STAMP) ## Resolve requirements.lock and bootstrap.lock again from pyproject.toml
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --all-extras pyproject.toml -o requirements.lock $(ARGS)
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-header --all-extras pyproject.toml -c requirements.lock --format pylock.toml -o build/pylock.toml
	@$(BIN)/python .ci/lean_lock.py requirements.lock build/pylock.toml
	@echo "uv==0.13.7" | $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header - -o bootstrap.lock

release: $(STAMP) ## Build dist/: the plugin as a zip, sdist, wheel and checksums; VERSION=0.2.0 must be the version
	@test "$(VERSION)" = "$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')" || { echo "VERSION=$(VERSION) is not the version in pyproject.toml"; exit 1; }
	@rm -rf dist && $(BIN)/python -m hatchling build -d dist
	@git archive --prefix=queuesmith/ -o dist/queuesmith-plugin-$(VERSION).zip HEAD
	@cd dist && sha256sum * > SHA256SUMS && ls -l

clean: ## Remove ./.venv and everything built
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

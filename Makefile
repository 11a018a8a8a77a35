# `make demo` and `make test` each do the whole set-up from nothing: Python 3.11 and make are enough.

PYTHON ?= python3.11
VENV := .venv
STAMP := $(VENV)/.omnicache-setup
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Engines in several processes, which take minutes on two cores: make test-pipeline has them.
SLOW := tests/engine/test_monitor.py tests/engine/test_profile.py
BROWSER_VENV := .venv-browser
BROWSER_STAMP := $(BROWSER_VENV)/.omnicache-setup
BROWSER_PYTHON := $(BROWSER_VENV)/bin/python

.PHONY: help setup demo test test-unit test-fuzz test-engine test-pipeline test-browser lint format bench docs gallery lock clean

help:
	@echo "make setup        .venv with the CPU engine and the tools, from requirements/cpu.txt"
	@echo "make demo         a tiny model, traced: what the prefix cache does, in under 3 minutes"
	@echo "make test         lint, unit tests, tests with a real engine"
	@echo "make test-unit    without an engine, seconds"
	@echo "make test-fuzz    the reader against ten thousand damaged files, a minute"
	@echo "make test-engine  with a real engine on the CPU"
	@echo "make test-pipeline with stages of vLLM-Omni, a whole pipeline, a server, a profiled engine"
	@echo "make test-browser HTML reports and timelines in a real browser, in an environment of its own: .venv-browser"
	@echo "make lint         ruff and mypy; make format mends the layout"
	@echo "make bench        benchmarks/*.py, one JSON object each as the last line"
	@echo "make docs         the generated parts of the documentation"
	@echo "make gallery      docs/gallery: reports of real runs, and pictures of their pages"
	@echo "make lock         requirements/cpu.txt and browser.txt again; UPGRADE=--upgrade for newer versions"
	@echo "make clean        everything that make made"

setup: $(STAMP)

$(STAMP): requirements/cpu.txt requirements/install.sh pyproject.toml
	@requirements/install.sh "$(PYTHON)" "$(VENV)"
	@touch $@

demo: setup
	$(BIN)/omnicache demo

test: lint test-unit test-fuzz test-engine

test-unit: setup
	$(PYTEST) -q tests/unit

test-fuzz: setup
	$(PYTEST) -q tests/fuzz

test-engine: setup
	$(PYTEST) -q tests/engine --ignore tests/engine/test_kv_size_exact.py $(SLOW:%=--ignore %)
	$(PYTEST) -q tests/engine/test_kv_size_exact.py
	VLLM_PLUGINS=omnicache_cli,vllm_omni_register_models $(PYTEST) -q -k "not lost and not probe" \
		tests/engine/test_trace.py tests/engine/test_engine_process.py

test-pipeline: setup
	$(PYTEST) -q tests/pipeline
	$(PYTEST) -q $(SLOW)

# Without an engine, and so without .venv. OMNICACHE_BROWSER names a browser; otherwise one on the
# path is taken, or fetched into .venv-browser.
test-browser: $(BROWSER_STAMP)
	@browser=$$($(BROWSER_PYTHON) -m tests.browser.browser) && \
		OMNICACHE_BROWSER="$$browser" $(BROWSER_PYTHON) -m pytest -q tests/browser

$(BROWSER_STAMP): requirements/browser.txt requirements/install.sh pyproject.toml
	@requirements/install.sh "$(PYTHON)" "$(BROWSER_VENV)" requirements/browser.txt
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	@set -e; for script in benchmarks/*.py; do echo "$$script"; $(BIN)/python "$$script"; done

docs: setup
	$(BIN)/python docs/generate.py

gallery: setup $(BROWSER_STAMP)
	$(BIN)/python docs/gallery.py record
	@browser=$$($(BROWSER_PYTHON) -m tests.browser.browser) && \
		OMNICACHE_BROWSER="$$browser" $(BROWSER_PYTHON) docs/gallery.py draw

# Pins that are in cpu.txt already stay, unless UPGRADE=--upgrade. uv writes "==" where the override
# says "===": put it back (requirements/cpu-overrides.txt has the reason).
lock: setup
	$(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-header $(UPGRADE) \
		--override requirements/cpu-overrides.txt requirements/cpu.in --output-file requirements/cpu.txt
	sed -i -E \
		-e '1i # Pinned by `make lock` from cpu.in and cpu-overrides.txt. Linux, x86-64, Python 3.11.' \
		-e 's/^(torch|torchvision)==([0-9])/\1===\2/' requirements/cpu.txt
	$(BIN)/uv pip compile --quiet --python-version 3.11 --no-emit-index-url --no-header $(UPGRADE) \
		--constraint requirements/cpu.txt requirements/browser.in --output-file requirements/browser.txt
	sed -i '1i # Pinned by `make lock` from browser.in. Linux, x86-64, Python 3.11.' requirements/browser.txt
	@! grep -nE '[a-z]+://' requirements/cpu.txt requirements/browser.txt

clean:
	rm -rf $(VENV) $(BROWSER_VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

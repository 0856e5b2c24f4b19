# `make demo` shows the whole pipeline, `make test` runs every check; both install what they need.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install test lint demo clean

install: $(STAMP)

# torch first: it is the large one, and a pip option for its index need not touch the others
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "autobatch needs Python 3.11+"'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(TORCH) -c constraints.txt $(TORCH_PIP_FLAGS)
	$(BIN)/python -m pip install --quiet -e '.[train,test]' -c constraints.txt
	touch $(STAMP)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest -q -n 2

demo: install
	$(BIN)/autobatch demo --out demo-out

clean:
	rm -rf .venv demo-out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis

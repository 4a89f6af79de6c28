# make serve   start a server on the bundled model        make test   run the tests
# make check   ruff, mypy, import-linter                  make bench  measure against other servers, and write docs/benchmarks.md
# make bench-engine   measure the engine against other runtimes on one core, and what workers cost
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Passed on to `vecd serve`:  make serve ARGS="--port 9000 --workers 1"
ARGS ?=

.PHONY: serve test check format bench bench-engine constraints clean

serve: $(VENV)/.serve
	$(BIN)/vecd serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(TESTS)

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.compare $(ARGS)

bench-engine: $(VENV)/.bench
	$(BIN)/python -m benchmarks.engine $(ARGS)

# A stamp per set of extras: each is installed once, and again when what it is made from has changed.
$(VENV)/.serve: EXTRAS = minilm
$(VENV)/.test: EXTRAS = test
$(VENV)/.check: EXTRAS = test,check,bench
$(VENV)/.bench: EXTRAS = minilm,bench
$(VENV)/.serve $(VENV)/.test $(VENV)/.check $(VENV)/.bench: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# Pin again what is installed, after trying newer versions.
constraints: $(VENV)/.check $(VENV)/.bench
	(sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//') > $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt

clean:
	rm -rf $(VENV) .bench build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

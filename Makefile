# make setup | run | test | lint: each makes what it needs first, and takes no time where nothing changed.
PORT ?= 8501
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3.14 python3 python; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv/bin/python
export PORT

.PHONY: setup run test lint clean

setup: .venv/lab.stamp

run: setup
	@$(VENV) -m storage serve

test: lint
	$(VENV) -m pytest --timeout=300

lint: .venv/tests.stamp
	$(VENV) -m ruff check .
	$(VENV) -m mypy

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

.venv/lab.stamp: requirements.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "COMET Lab needs Python 3.11 or newer and found none. Install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(VENV) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || "$(PYTHON)" -m venv --clear .venv || { \
		echo "$(PYTHON) could not make .venv (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@echo "Installing the libraries into .venv; PyTorch takes a few minutes the first time"
	$(VENV) -m pip install --quiet --disable-pip-version-check --requirement requirements.txt
	@touch $@

.venv/tests.stamp: .venv/lab.stamp requirements-dev.txt
	$(VENV) -m pip install --quiet --disable-pip-version-check --requirement requirements-dev.txt
	@touch $@

# `make train` and `make test` work on a fresh Debian or Ubuntu; afterwards the plain commands work in .venv.
PYTHON ?= python3
EXTRAS ?= test,dev
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONFIG ?= configs/mlebench.py:local
DATA ?= data/mlebench

.PHONY: help install train test lint
help:
	@echo 'make train   install, prepare the built-in data, train the tiny policy (CONFIG=..., ARGS=...)'
	@echo 'make test    install, run the tests (ARGS=...)'
	@echo 'make lint    ruff and pyright'
	@echo 'make install only make $(VENV)  (EXTRAS=cuda,test,dev for a GPU)'

install: $(STAMP)

# Made again only when setup.py has changed.
$(STAMP): setup.py
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, $(PYTHON) is $$($(PYTHON) -V): make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) can't make virtual environments: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --root-user-action=ignore --upgrade 'pip>=24'
	$(BIN)/python -m pip install --root-user-action=ignore -e '.[$(EXTRAS)]'
	@touch $@

train: $(STAMP)
	$(BIN)/python launch/prepare.py --root=$(DATA)
	$(BIN)/python launch/train.py --config=$(CONFIG) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/pyright

# Every command of the project. `make` alone lists them; what each needs beyond Python and pip, it sets up first.

VENV   ?= .venv
# The first interpreter that starts and is new enough; name another with make PYTHON=/path/to/python3.11 ...
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

BIN := $(abspath $(VENV))/bin
RUN := $(BIN)/python

# With the default spin-wait, one busy neighbour makes torch several times slower.
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
# dagster.yaml switches it off for an installation; tools that read none obey this.
export DAGSTER_DISABLE_TELEMETRY ?= yes
export PATH := $(BIN):$(PATH)

BASE  := $(VENV)/.installed
TOOLS := $(VENV)/.installed-dev
NEEDS := constraints.txt pyproject.toml tools/install.py

define SET_UP
$(or $(PYTHON),false) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
echo "Python 3.11 or newer is needed; $(if $(PYTHON),$(PYTHON) is not that,none was found on PATH). Install one (Debian," \
"Ubuntu: apt install python3.11 python3.11-venv) or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }; \
$(PYTHON) tools/install.py --venv $(VENV)
endef

.DEFAULT_GOAL := help
.PHONY: help venv demo dev test chaos lint format bench examples lock clean
.DELETE_ON_ERROR:

help: ## list these commands
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(BASE) ## set up the environment in .venv (about 2.5 GB; safe to interrupt and run again)

demo: $(BASE) ## a made-up company's conversations become a live version v1, in a few minutes
	@$(BIN)/loop demo

dev: $(BASE) ## Dagster's UI, the daemon, the intake folder and serving, together, until Ctrl-C
	@$(BIN)/loop dev

test: lint ## every check and every test
	$(RUN) -m pytest $(PYTEST_ARGS)

chaos: $(TOOLS) ## 50 rounds of SIGKILL to every kind of process (hours; CHAOS="--rounds 2 import drain" for a short look)
	$(RUN) tests/chaos $(CHAOS)

lint: $(TOOLS) ## formatting, types, import directions, Dagster's definitions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples tools
	$(BIN)/lint-imports
	$(BIN)/dg check defs

format: $(TOOLS) ## put every file into the one format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(TOOLS) ## same-run ratios against the plain tools, as one table
	$(RUN) -m bench

examples: $(BASE) ## write examples/*.jsonl again; the same bytes every time
	$(RUN) examples/make_company.py --out examples/company.jsonl --unseen examples/company_unseen.jsonl

lock: $(TOOLS) ## write constraints.txt again after a change of pyproject.toml
	$(RUN) tools/lock.py

clean: ## remove the environment and caches; the loop's own data (LOOP_HOME) stays
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info build

# The stamps are dated after everything that they depend on, so a second run does nothing.
$(BASE): $(NEEDS)
	@$(SET_UP)
	@touch $@

$(TOOLS): $(NEEDS)
	@$(SET_UP) --dev
	@touch $(BASE) $@

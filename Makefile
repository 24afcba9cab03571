# make demo    see it work            make test    lint and the test suite
# make docs    build the site           make test-slow    more shapes, and the slow tests
# make test-today    before a release: all of it with the newest packages, in an environment of its own
# Choose another interpreter with PYTHON=python3.12, and another environment with VENV=.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
SLOW ?= (slow or property) and not soak
PROFILE ?= long

PY := $(VENV)/bin/python
READY := $(VENV)/.ready-$(notdir $(PYTHON))
FOLDERS := dispatch combine grouped_gemm
export PYTHON VENV TORCH

.PHONY: setup demo docs test test-slow test-today lint typecheck typed clean

setup: $(READY)

$(READY): pyproject.toml tools/setup_venv.sh
	bash tools/setup_venv.sh
	touch $@

demo: setup
	$(PY) -m moe_engine demo

test: lint
	$(PY) -m pytest -n auto --dist worksteal

test-slow: setup
	$(PY) -m pytest -n auto --dist worksteal -m "$(SLOW)" --hypothesis-profile=$(PROFILE)

test-today:
	bash tools/test_today.sh

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@$(MAKE) --no-print-directory typecheck

typecheck: setup typed
	$(PY) -m mypy

# Type checkers and mkdocstrings do not follow package-dir: a tree of links with the installed layout.
typed:
	@rm -rf build/typed && mkdir -p build/typed/moe_engine
	@ln -s $(CURDIR)/moe_engine/* $(FOLDERS:%=$(CURDIR)/%) build/typed/moe_engine/

# The site of docs/, in build/site. Any warning fails the build.
docs: $(READY)-docs typed
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict
	@echo "The site is in build/site; open build/site/index.html"

$(READY)-docs: $(READY)
	$(PY) -m pip install --quiet -e ".[docs]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(wildcard moe_engine $(FOLDERS) tests bench examples) -name __pycache__ -prune -exec rm -rf {} +

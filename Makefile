# kt_ray: `make demo` sets up and trains the demo, `make test` passes the tests.
# The environment lives in .venv; VENV=/path/to/env uses another one and leaves its torch alone.

VENV   ?= .venv
PYTHON ?= python3
PY      = $(VENV)/bin/python
STAMP   = $(VENV)/.kt_ray-installed
TOOLS   = $(VENV)/.kt_ray-tools
NATIVE  = $(shell find kt_ray/native/src -type f 2>/dev/null)
CPP     = $(shell find kt_ray/native/src tests -name '*.cpp' -o -name '*.h' -o -name '*.inl' 2>/dev/null)
TESTS  ?= tests
PYTEST ?= -q

SUPPORTED = import sys; v = sys.version_info[:2]; (3, 11) <= v < (3, 14) or sys.exit(f"error: {sys.executable} is \
 Python {v[0]}.{v[1]}; required 3.11, 3.12 or 3.13. To fix: make PYTHON=python3.12 VENV=<new directory> ...")

.PHONY: help demo test exhaustive quick check format bench chaos fuzz docs clean

help:  ## what can be made
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

# One line before anything is made: pip's own words about another Python fill the screen. A .venv that was begun
# and cannot be finished (no python3-venv, another Python) would stay in the way.
$(PY):
	@$(PYTHON) -c '$(SUPPORTED)'
	@[ ! -e $(VENV) ] && made=yes; $(PYTHON) -m venv $(VENV) || { [ -z "$$made" ] || rm -rf $(VENV); \
	 echo 'error: $(PYTHON) cannot make an environment. To fix: apt install python3-venv' >&2; exit 1; }

# torch first, alone: the resolver then keeps whichever build is there (the constraints' or the user's own).
$(STAMP): pyproject.toml constraints.txt CMakeLists.txt $(NATIVE) | $(PY)
	@$(PY) -c '$(SUPPORTED)'
	@if $(PY) -c 'import torch' 2>/dev/null; then grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	 else cp constraints.txt $(VENV)/constraints.txt; $(PY) -m pip install -q -c constraints.txt torch; fi
	$(PY) -m pip install -q -c $(VENV)/constraints.txt -e .
	@touch $@

# What the tests and checks need beside: named by pyproject.toml, installed without building the engine again.
$(TOOLS): $(STAMP)
	@$(PY) -c 'import tomllib as t; e = t.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
	           print(*e["dev"], *e["deepspeed"], *e["tinker"], sep="\n")' > $(VENV)/tools.txt
	$(PY) -m pip install -q -c $(VENV)/constraints.txt -r $(VENV)/tools.txt
	@touch $@

demo: $(STAMP)  ## set up, build, plan, fine-tune the demo model to the end, and compare answers before and after
	$(PY) launch.py mode=plan
	$(PY) launch.py

test: $(TOOLS)  ## the tests; PYTEST="-q -n 2" in two processes
	$(PY) -m pytest $(PYTEST) -m "not exhaustive" $(TESTS)

exhaustive: $(TOOLS)  ## all tests, every variation: before a release, and after a change of what many families share
	$(PY) -m pytest $(PYTEST) $(TESTS)

quick: $(TOOLS)  ## the tests that take seconds, in two processes: what to run before each commit
	$(PY) -m pytest -q -n 2 --dist worksteal -m "not slow and not ray and not bench and not exhaustive" $(TESTS)

check: $(TOOLS)  ## formatting, lint, types
	$(PY) -m ruff format --check kt_ray tests benchmarks docs examples launch.py
	$(PY) -m ruff check kt_ray tests benchmarks docs examples launch.py
	$(PY) -m mypy kt_ray examples launch.py
	cd benchmarks && $(abspath $(PY)) -m mypy --config-file ../pyproject.toml .
	@if [ -n "$(CPP)" ]; then $(VENV)/bin/clang-format --dry-run --Werror $(CPP); fi

format: $(TOOLS)  ## write the formatting that `make check` wants
	$(PY) -m ruff format kt_ray tests benchmarks docs examples launch.py
	$(PY) -m ruff check --fix kt_ray tests benchmarks docs examples launch.py
	@if [ -n "$(CPP)" ]; then $(VENV)/bin/clang-format -i $(CPP); fi

bench: $(TOOLS)  ## the short benchmarks, JSON into benchmarks/results/
	$(PY) benchmarks/moe_layer.py --shape deepseek_v2_lite --tokens 512 --rank 8 --threads 2 --json benchmarks/results/moe_layer.json
	$(PY) benchmarks/train_step.py --against hf,peft --json benchmarks/results/train_step.json

chaos: $(TOOLS)  ## hours: 200 faults under Ray, 200 in one process, 100 of a server, 1,000 deaths of actors
	$(PY) benchmarks/chaos.py --faults 200 --minutes 240 --cluster ray --json benchmarks/results/chaos_ray.json
	$(PY) benchmarks/chaos.py --faults 200 --minutes 120 --cluster local --json benchmarks/results/chaos_local.json
	$(PY) benchmarks/chaos.py --faults 1000 --inside --json benchmarks/results/chaos_inside.json
	$(PY) benchmarks/chaos.py --faults 100 --minutes 120 --serve --json benchmarks/results/chaos_serve.json

fuzz: $(TOOLS)  ## ten thousand damaged files: each is read or refused by name
	$(PY) benchmarks/fuzz.py --mutations 10000 --json benchmarks/results/fuzz.json

docs: $(TOOLS)  ## regenerate the references of options and recipes and the predicted figures
	$(PY) -m docs.options_page > docs/configuration.md
	$(PY) -m docs.recipes_page > docs/recipes.md
	$(PY) -m tests.test_doc_plans

clean:  ## remove what the targets made, except runs/
	rm -rf $(VENV) build dist

# Everything there is to do with Tidegate. `make` alone lists it.
#
# Needs Python 3.11 or later and Java 17 or later; everything else goes into .venv, at the versions in constraints.txt.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

# `make PYTHON=/path/to/python …` works in an environment of that version: in `.venv` if that has it or isn't there yet,
# or else in one beside it, such as .venv-3.12. (`VENV=` overrides it.) Without `PYTHON=` it is `.venv`.
MINOR := import sys; print("%d.%d" % sys.version_info[:2])
ifeq ($(origin PYTHON),undefined)
VENV := .venv
else
VENV := $(shell wanted=$$("$(PYTHON)" -c '$(MINOR)' 2>/dev/null); here=$$(.venv/bin/python -c '$(MINOR)' 2>/dev/null); \
	test -z "$$wanted" -o -z "$$here" -o "$$wanted" = "$$here" && echo .venv || echo ".venv-$$wanted")
endif

BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
CLASSES := build/spark-classes.jsa
EXTRAS := dev,plot,bench

# The first of these that is new enough; `make PYTHON=/path/to/python` decides otherwise.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$python" && exit; done; echo python3)

VERSIONS := 3.11 3.12 3.13
MATRIX ?= quick
SEEDS ?= 2000
KILLS ?= 200

# Spark's Python processes are this environment's, and the Spark is the one that is installed in it.
export PYSPARK_PYTHON := $(abspath $(BIN)/python)
unexport SPARK_HOME
unexport PYSPARK_DRIVER_PYTHON
# Or each process would compile every file that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:  ## Lists the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(READY) java  ## Live game analytics that kills one of its own slots and proves that nothing was lost
	$(BIN)/python examples/game_analytics/demo.py

# What needs no Spark. `test` begins with the rest, whose tests wait more than they compute and so run beside these.
QUICK := tests/test_tidy.py tests/test_links.py tests/typing tests/unit tests/contract tests/simulation

# The first tests wait for Spark more than they compute, so lint runs beside them.
.PHONY: test
test: $(READY) java jars  ## Lint, and every test: unit, contract, simulation, Spark, faults
	@$(MAKE) --no-print-directory -j 2 lint tests-beside-lint

.PHONY: tests-beside-lint
tests-beside-lint: $(CLASSES)
	$(BIN)/python -m pytest tests/faults tests/spark $(QUICK) -n 3 --dist loadgroup -m "not long"

.PHONY: quick
quick: $(READY)  ## The tests that need no Spark: unit, contract, simulation
	$(BIN)/python -m pytest $(QUICK) -n 3 --dist worksteal -m "not long"

.PHONY: lint
lint: $(READY)  ## ruff, mypy (strict), the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: matrix
matrix:  ## `make quick` (or MATRIX=test) on each of Python 3.11, 3.12 and 3.13 that this machine has
	@for version in $(VERSIONS); do \
		found=; \
		for python in "python$$version" "$${PYENV_ROOT:-$$HOME/.pyenv}/versions/$$version".*/bin/python; do \
			if "$$python" -c '' 2>/dev/null; then found="$$python"; break; fi; \
		done; \
		if [ -z "$$found" ]; then result="not found"; \
		elif $(MAKE) --no-print-directory PYTHON="$$found" $(MATRIX); then result=passed; \
		else result=failed; failed=1; fi; \
		report="$$report  Python $$version: $$result\n"; \
	done; \
	printf "make $(MATRIX)\n$$report"; test -z "$$failed"

# Measured code is several times slower, so a test that counts on its time may fail here. The figure is the same.
.PHONY: coverage
coverage: $(READY)  ## The share of src/ that `make quick` runs, in all its processes
	$(BIN)/python -m coverage erase
	-$(BIN)/python -m coverage run -m pytest $(QUICK) -n 3 --dist worksteal -m "not long"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered

.PHONY: long
long: $(READY) java jars $(CLASSES)  ## The tests that `make test` leaves out because they take long, and properties with more examples
	$(BIN)/python -m pytest tests -n 3 --dist loadgroup -m long --timeout 900
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest $(QUICK) -n 3 --dist worksteal -m "hypothesis and not long"

.PHONY: bench
bench: $(READY) java  ## Every benchmark, as JSON lines, and its picture in docs/img where it has one
	$(BIN)/python -m benchmarks all --json --pictures docs/img

.PHONY: simulate
simulate: $(READY)  ## The simulation over SEEDS=2000 seeds; a failing one is printed and can be replayed
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)
	TIDEGATE_MUTANTS=all $(BIN)/python -m pytest -n 2 --dist worksteal tests/simulation/test_mutants.py

.PHONY: faults
faults: $(READY) java  ## Kills KILLS=200 real processes and compares the output with the fault-free one
	TIDEGATE_FAULT_KILLS=$(KILLS) $(BIN)/python -m pytest tests/faults

.PHONY: dist
dist: $(READY)  ## The wheel, and the same as a zip for `spark-submit --py-files`, in dist/
	rm -f dist/tidegate*
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	cp dist/tidegate-*.whl dist/tidegate.zip

.PHONY: clean
clean:  ## Removes what running left behind, but not .venv
	rm -rf artifacts build dist demo-out out spark-warehouse metastore_db derby.log
	rm -rf .coverage .coverage.* .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks examples -type d -name __pycache__ -prune -exec rm -rf {} +

# --------------------------------------------------------------------------------------------------------- set-up

$(READY): pyproject.toml constraints.txt
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { \
		echo 'Tidegate needs Python 3.11 or later; $(PYTHON) is '"$$("$(PYTHON)" --version 2>&1)."; \
		echo 'Where a newer one is installed:  make PYTHON=/path/to/python3.11'; exit 1; } >&2
	@test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV) || { \
		echo 'No virtual environment could be made. On Debian and Ubuntu:  apt-get install python3-venv'; exit 1; } >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

# Kafka, and Spark's connector to it, for the tests; from Maven Central into ~/.ivy2, once. Without them those tests are skipped.
.PHONY: jars
jars: $(READY) java
	@PYTHONPATH=. $(BIN)/python -m tests.servers.jars

# What Spark's JVMs need half of their start for, made once: tests/servers/class_archive.py. Without it they take longer.
$(CLASSES): $(READY)
	-@PYTHONPATH=. $(BIN)/python -m tests.servers.class_archive

# The Java that PySpark will start: JAVA_HOME's, or else the first in PATH. `java_is_new_enough` is silent.
define JAVA_CHECK
java_version() { \
	"$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version 2>&1 | sed -n 's/.* version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p'; }; \
java_is_new_enough() { test "$$(java_version)" -ge 17 2>/dev/null; }
endef

.PHONY: java
java:
	@$(JAVA_CHECK); \
	if java_is_new_enough; then exit 0; fi; \
	if [ -z "$$JAVA_HOME" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo 'No Java 17 or later was found: installing one from the distribution.'; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get update -qq; \
		apt-get install -y -qq --no-install-recommends openjdk-17-jre-headless \
			|| apt-get install -y -qq --no-install-recommends openjdk-21-jre-headless; \
		if java_is_new_enough; then exit 0; fi; \
	fi >&2; \
	{ \
		where="$${JAVA_HOME:+JAVA_HOME=$$JAVA_HOME}"; found="$$(java_version)"; \
		echo "Spark needs Java 17 or later; $${where:-PATH} has $${found:-none}."; \
		echo '  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless'; \
		echo '  Fedora, RHEL:    sudo dnf install java-17-openjdk-headless'; \
		echo '  macOS:           brew install openjdk@17'; \
		echo '  elsewhere:       https://adoptium.net'; \
		echo 'Where it is installed already:  JAVA_HOME=/path/to/java make ...'; \
		exit 1; \
	} >&2

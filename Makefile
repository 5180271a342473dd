# Every target sets up what it needs. `make` alone prints this help.
#
# The environment is .venv, made once from the pins in pyproject.toml. To use an environment of your own, such
# as the one of environment.yml, name its Python: `make lab PY=python`.

# Other versions than the pins, as test-all takes them, go into an environment of their own.
VERSIONS ?=
VENV  := .venv$(if $(VERSIONS),-versions)
STAMP := $(VENV)/.installed
# The first Python in the supported range.
FIND_PYTHON = for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null && echo $$p && break; done
HAS_GPU = command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1
# With no GPU, pip's options for a torch without CUDA: 2 GB instead of 6. None where pip is told of an index.
CPU_BUILDS = import runpy, sys; print(*runpy.run_path('lib/hosted.py')['cpu_builds']([sys.executable, '-m', 'pip']))

ifdef PY
# Said here, and not by a shell or by Python in the middle of a target.
HAS_PACKAGES = $(shell $(PY) -c "import importlib.util as u; print(all(map(u.find_spec, ('torch', 'nbformat'))))" 2>/dev/null)
READY = $(if $(filter True,$(HAS_PACKAGES)),,$(error PY=$(PY) is no Python with this course's packages; make one from environment.yml, or leave PY out))
else
PY    := $(VENV)/bin/python
READY := $(STAMP)
endif

export PYTHONUNBUFFERED := 1
# Notebooks of the reader's own choice: make run NB=03
NB ?=
OP ?=
TO ?=
LEAN ?=
FORCE ?=
REF ?= HEAD
LAB ?=
DIR ?=
OUT ?=
ONLY ?=
TIMEOUT ?=
MEMORY ?=
# Two workers suit two cores; more need memory for the C++ compiler.
JOBS ?= 2
# One thread each: two workers with two threads each on two cores wait for one another.
PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal
NO_SOLUTIONS = Pages link to solutions in this folder, and to tests in lib/tests. Your teacher has them; a handout does not.
NOTEBOOKS = $(sort $(wildcard notebooks/[0-9]*.ipynb))
SANITIZED = $(or $(OP),$(notdir $(basename $(wildcard lib/ops/[a-z]*.py))))
TESTS_OF_OP = $(if $(OP),$(if $(wildcard lib/ops/$(OP).py),-k $(OP) lib/tests/ops,$(error there is no lib/ops/$(OP).py)))

.PHONY: help lab copy test test-all test-gpu sanitize launch-diff run record bench sweep widths model text notebooks progress grade term handout clean
.DEFAULT_GOAL := help

help:  ## print this help
	@awk 'BEGIN { FS = ":.*## " } /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@python=$$($(FIND_PYTHON)); \
	if [ -n "$$python" ]; then echo "making $(VENV) with $$($$python --version)"; $$python -m venv $(VENV); \
	elif command -v uv >/dev/null; then echo "uv fetches Python 3.12"; uv venv --seed --python 3.12 $(VENV); \
	else echo "Python 3.11 to 3.14 is needed: install one, as by 'sudo apt install python3-venv'; or install uv" \
		"(https://docs.astral.sh/uv), which fetches one; or use environment.yml"; exit 1; fi
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	@# A CUDA compiler comes along where there is a GPU and no toolkit. Not --quiet, because it takes minutes.
	@# The one warning that Python ignores here takes ten lines to say that an editable install is editable.
	@extras=course; builds=; \
	if ! { $(HAS_GPU); }; then builds=$$($(VENV)/bin/python -c "$(CPU_BUILDS)") || builds=; \
	elif ! command -v nvcc >/dev/null; then extras=course,nvcc; fi; \
	echo "installing the packages of pyproject.toml [$$extras] $$builds: some minutes, and some GB on disk"; \
	PYTHONWARNINGS=ignore $(VENV)/bin/python -m pip install $$builds -e ".[$$extras]" $(if $(VERSIONS),&& \
	$(VENV)/bin/python -m pip install $$builds $(VERSIONS))
	@touch $@

lab: $(READY)  ## open the course in JupyterLab; extra options in LAB="--no-browser --port 8889"
	@# The root is the project, so that links from notebooks into lib work.
	@# Containers run as root, and Jupyter asks to be told so.
	$(PY) -m jupyter lab --ServerApp.root_dir="$(CURDIR)" $(if $(filter 0,$(shell id -u)),--allow-root) \
		--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb $(LAB)

copy:  ## an op to take along, in one file: make copy OP=gelu TO=folder [LEAN=1] [FORCE=1]
	@python3 -m lib.standalone $(OP) $(if $(TO),--to "$(TO)") $(if $(filter-out 0,$(LEAN)),--lean) $(if $(filter-out 0,$(FORCE)),--force)

test: $(READY)  ## lint, the quick tests, every notebook executed; or those of one op: make test [OP=gelu]; no GPU needed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	CUDA_VISIBLE_DEVICES= $(PYTEST) -m "not nightly" $(if $(OP),$(TESTS_OF_OP),--nbmake --nbmake-timeout=300 $(NOTEBOOKS) lib/tests)

test-all: $(READY)  ## every test, all mutants, every notebook: before a change to lib/ops is done; no GPU needed
	$(PY) -m ruff check .
	CUDA_VISIBLE_DEVICES= FUSED_KERNELS_EXAMPLES=400 $(PYTEST) --nbmake --nbmake-timeout=600 $(NOTEBOOKS) lib/tests

test-gpu: $(READY)  ## the tests on this machine's GPU, big sizes included: make test-gpu [OP=gelu] [JOBS=12]
	$(PYTEST) -m "not alone" $(or $(TESTS_OF_OP),lib/tests)
	$(PY) -m pytest -m alone $(or $(TESTS_OF_OP),lib/tests) || [ $$? = 5 ]  # 5: this op has none

sanitize: $(READY)  ## all kernels under compute-sanitizer, memcheck and racecheck: make sanitize [OP=gelu] [JOBS=12]
	@# Without torch's caching allocator each tensor is an allocation of its own, and its end is seen.
	printf '%s\n' $(SANITIZED) | PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -P $(JOBS) -I{} \
		compute-sanitizer --tool memcheck --error-exitcode 1 $(PY) -m lib.measure.sanitize --op {}
	@# Racecheck misses the barrier between the byte that tells Gluon's warps their role and those who read it.
	printf '%s\n' $(SANITIZED) | PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -P $(JOBS) -I{} \
		compute-sanitizer --tool racecheck --error-exitcode 1 --kernel-name-exclude kns=_gluon_kernel \
		$(PY) -m lib.measure.sanitize --without-cublas --op {}

launch-diff: $(READY)  ## do the ops launch the same as at a commit, kernels and PTX: make launch-diff REF=main [OP=gelu]
	$(PY) -m lib.measure.launch_diff $(REF) $(if $(OP),--op $(OP))

run: $(READY)  ## execute notebooks in a scratch copy: make run NB=03
	$(PY) -m lib.recorded.notebooks run $(NB)

record: $(READY)  ## execute on this GPU, keep outputs and results: make record [NB=03]
	$(PY) -m lib.recorded.notebooks record $(NB)

bench: $(READY)  ## time every version on this GPU, save to data/results: make bench [OP=add_relu]
	$(PY) -m lib.measure.bench $(if $(OP),--op $(OP))

sweep: $(READY)  ## bias_gelu_dropout_add over sizes, shares dropped and dtypes, as CSV, JSON and a plot; needs a GPU
	$(PY) -m lib.measure.dropout_sweep

widths: $(READY)  ## ops on rows at widths drawn at random, beside eager, compile and Liger: make widths [OP=softmax]; needs a GPU
	$(PY) -m lib.measure.widths $(if $(OP),--op $(OP))

model: $(READY)  ## whole models in training: tokens a second and peak memory, op by op; needs a GPU
	$(PY) -m lib.models.train

text: $(READY)  ## a notebook as a Python file to edit, in notebooks/text: make text NB=03
	@mkdir -p notebooks/text
	$(PY) -m jupytext --to py:percent $(foreach n,$(wildcard notebooks/$(NB)*.ipynb),--output notebooks/text/$(notdir $(n:.ipynb=.py)) $(n))

notebooks: $(READY)  ## bring edits in notebooks/text back into the notebooks, outputs and cell ids kept
	@for t in notebooks/text/[0-9]*.py; do [ -e "$$t" ] || { echo "nothing in notebooks/text; start with: make text NB=03"; exit 1; }; \
	n=notebooks/$$(basename $$t .py).ipynb; update=; [ ! -e $$n ] || update=--update; \
	$(PY) -m jupytext --to ipynb $$update --output $$n $$t || exit 1; done
	$(PY) -m ruff format --quiet notebooks
	$(PY) -m ruff check --fix notebooks

progress: $(READY)  ## which exercises you have solved
	@$(PY) -m lib.exercises

grade: $(READY)  ## grade submitted notebooks: make grade DIR=submissions [ONLY="00.3 01.3"] [OUT=grades/week1] [JOBS=2] [TIMEOUT=120] [MEMORY=8]
	@$(if $(DIR),,$(error name the folder: make grade DIR=submissions))
	@$(PY) -m lib.exercises.grade "$(DIR)" --out "$(or $(OUT),grades)" --only "$(ONLY)" --jobs $(JOBS) $(if $(TIMEOUT),--timeout $(TIMEOUT)) $(if $(MEMORY),--memory $(MEMORY))

term: $(READY)  ## the totals of all weeks in one CSV, grades/term.csv: make term [DIR=grades]
	@$(PY) -m lib.exercises.grade.term "$(or $(DIR),grades)"

handout:  ## the course to hand out, without solutions, tests and history: make handout [REF=HEAD] [OUT=handout.zip]
	@why=$$(git rev-parse --verify "$(REF)^{commit}" 2>&1) || { echo "make handout takes the course from git:" \
		"run it in a clone, in which REF=$(REF) is a commit ($$why)"; exit 1; }
	@note=$$(mktemp -d) && trap 'rm -r "$$note"' EXIT && echo "$(NO_SOLUTIONS)" > "$$note/README.md" && \
	git archive --format zip --prefix fused-kernels/notebooks/solutions/ --add-file "$$note/README.md" \
		--prefix fused-kernels/ --output "$(or $(OUT),handout.zip)" $(REF) -- . ':!notebooks/solutions' ':!lib/tests'

clean:  ## remove the environment, caches and throw-away files; your progress stays
	rm -rf .venv .venv-versions notebooks/text .pytest_cache .ruff_cache .hypothesis build *.egg-info
	find . \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +

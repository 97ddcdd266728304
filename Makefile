# A short front for meson and the scripts in tools/: `make` builds, `make help` lists the rest.
MESON  := $(or $(wildcard /usr/bin/meson),meson)
NINJA  := ninja
PYTHON := .venv/bin/python
MODEL  := .cache/models/smollm2
# numpy and torch are timed and compared as they come, whatever the shell sets for other programs
CLEAN_ENV := env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE -u OMP_NUM_THREADS -u MKL_NUM_THREADS
# Where torch shares its cores with an engine its threads must not spin; on a busy machine that is a factor of ten.
SHARED_ENV := $(CLEAN_ENV) OMP_WAIT_POLICY=passive
# The Python package from the checkout, with the library that was just built; users have it by `pip install .`.
PACKAGE_ENV := PYTHONPATH=python HEADRACE_LIBRARY=$(CURDIR)/build/libheadrace.so

.PHONY: all help system python model build demo test test-c test-python parity bench bench-serve bench-push nightly check-kernels format clean
.DEFAULT_GOAL := all

all: build

help:
	@echo "make                build/src/cli/headrace (installs missing system packages first)"
	@echo "make demo           serve SmolLM2 and train a LoRA beside it, pushed while it runs"
	@echo "make test           every test: gcc, clang, sanitizers, end to end, quick parity"
	@echo "make parity         the whole comparison with transformers and PEFT"
	@echo "make bench          speed, start-up time and memory against transformers"
	@echo "make bench-serve    the server under 512 requests against the engine alone"
	@echo "make bench-push      pushing adapters and base weights, against the same in Python"
	@echo "make check-kernels  kernel tests under gcc and clang, -O0 and -O3"
	@echo "make nightly        parity, bench, check-kernels and ten minutes of fuzzing"
	@echo "make format, make clean"

system:
	@tools/setup-system

python: system
	@tools/setup-python

model: python
	@$(PYTHON) tools/make_smollm2.py $(MODEL)

build: system
	@tools/build build

demo: build model
	@$(SHARED_ENV) $(PACKAGE_ENV) $(PYTHON) examples/demo.py --model $(MODEL)

test: test-c test-python

test-c: system
	tools/build build
	$(MESON) test -C build --print-errorlogs
	CC=clang tools/build build-clang
	$(MESON) test -C build-clang --print-errorlogs
	tools/build build-asan -Db_sanitize=address,undefined
	$(MESON) test -C build-asan --print-errorlogs --timeout-multiplier 10
	tools/build build-tsan -Db_sanitize=thread
	$(MESON) test -C build-tsan --print-errorlogs --timeout-multiplier 10 --suite threads

test-python: build model
	$(SHARED_ENV) $(PYTHON) -m pytest tests/e2e tests/parity -q

parity: build model
	$(SHARED_ENV) $(PYTHON) -m tests.parity

bench: build model
	$(CLEAN_ENV) $(PYTHON) bench/startup.py --model $(MODEL)
	$(CLEAN_ENV) $(PYTHON) bench/memory.py --model $(MODEL)
	$(CLEAN_ENV) $(PYTHON) bench/decode.py --model $(MODEL)
	$(CLEAN_ENV) $(PYTHON) bench/prefill.py --model $(MODEL)
	$(CLEAN_ENV) $(PYTHON) bench/matmul.py
	$(CLEAN_ENV) $(PYTHON) bench/lora.py --model $(MODEL)

bench-serve: build model
	$(CLEAN_ENV) $(PYTHON) bench/serve.py --model $(MODEL)

bench-push: build python
	$(CLEAN_ENV) $(PYTHON) bench/push.py

check-kernels: system
	@tools/check-kernels

nightly: parity bench check-kernels
	HEADRACE_LATE_SECONDS=8 $(SHARED_ENV) $(PYTHON) -m pytest tests/e2e/test_payload_probe.py -q
	build/tests/sim/test_scheduler_sim 1000
	build/tests/sim/test_session_sim 10000
	tools/fuzz 600

format:
	@git ls-files '*.c' '*.h' | xargs clang-format -i

clean:
	rm -rf build build-clang build-asan build-tsan build-fuzz build-check

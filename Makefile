PYTHON ?= .venv/bin/python
.PHONY: build
build:
	.venv/bin/cmake -S . -B build/dev -G Ninja
	.venv/bin/ninja -C build/dev

# build   build the release binary, guest included         test   run all tests, as CI does: about 20 minutes
# run     build, prepare the languages, serve over HTTP    quick  run tests without root, network and sandboxes: under a minute
# check   check format, lints, licences and documentation  docs   write docs/settings.md and docs/environment.md
# hostile run all hostile tests, write docs/hostile.md     bench  install the alternatives, measure, write docs/benchmarks
# neighbours  measure how attacks of one tenant affect another, write docs/neighbours.md
# load    call as twenty tenants for ten minutes while tenants are reloaded, tokens replaced and one tenant is throttled
# browser install Chromium for the sandboxes               clean  remove the build
# test-vm test the program on other kernels, with cgroup v2 and systemd, under emulation (docs/lab.md)
# measure count lines, function lengths, repeated names; AGAINST=REV compares with a revision, LIST=1 lists what was counted

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.PHONY: build run browser quick test test-vm hostile neighbours load bench check docs measure clean needs

CARGO ?= cargo
TARGET := $(shell uname -m)-unknown-linux-gnu
OUT := $(or $(CARGO_TARGET_DIR),target)
GUEST := $(abspath $(OUT))/$(TARGET)/release/sandpool-guest
ZYGOTE := $(abspath $(OUT))/release/libsandpool_zygote.so
SANDPOOL := $(abspath $(OUT))/release/sandpool

build:
	RUSTFLAGS='-C target-feature=+crt-static' $(CARGO) build --locked --release --package sandpool-guest --bin sandpool-guest --target $(TARGET)
	$(CARGO) build --locked --release --package sandpool-zygote
	SANDPOOL_GUEST_EMBED='$(GUEST)' SANDPOOL_ZYGOTE_EMBED='$(ZYGOTE)' $(CARGO) build --locked --release --package sandpool --bin sandpool

run: build
	@$(SANDPOOL) setup >&2
	@scripts/client-config '$(SANDPOOL)'
	@exec $(SANDPOOL) serve

# The browser is optional. A tool that needs one says how to install it.
browser:
	@scripts/install chromium-headless-shell fonts-liberation libnss3-tools

needs:
	@scripts/test-needs

# These tests need neither root nor a sandbox. Only the first build needs a network, to fetch its dependencies.
quick:
	@scripts/test quick

test:
	@scripts/test

# After `make test` the build is up to date. docs/lab.md explains KERNELS="bookworm bookworm-backports:plain" and ARCH=aarch64.
test-vm: needs
ifeq ($(ARCH),aarch64)
	@scripts/test-vm-arm64
else
	$(CARGO) build --locked --workspace --all-targets
	@scripts/test-vm $(KERNELS)
endif

hostile:
	@scripts/test hostile

# Measures with the release build how the attacks of one tenant affect the calls of another. Writes docs/neighbours.md.
neighbours: build
	SANDPOOL_NEIGHBOURS='$(abspath docs/neighbours.md)' SANDPOOL_NEIGHBOURS_BINARY='$(SANDPOOL)' scripts/test neighbours

# `make test` runs the same for one minute.
load:
	@scripts/test load

# AGAINST=BINARY compares this build only with an older one, in alternating rounds. BENCH passes arguments, such as `--only warm`.
bench: build
	$(CARGO) build --locked --release --package sandpool-bench
	@SANDPOOL='$(SANDPOOL)' AGAINST='$(AGAINST)' scripts/bench $(BENCH)

check:
	$(CARGO) fmt --all -- --check
	$(CARGO) clippy --locked --workspace --all-targets -- --deny warnings
	@deny="$$(scripts/cargo-tool cargo-deny 0.20.2)"; export PATH="$$deny:$$PATH"; \
	$(CARGO) deny --locked check licenses bans sources; \
	if $(CARGO) deny --locked fetch db; then $(CARGO) deny --locked check advisories; else echo 'SKIP advisories: the database is out of reach' >&2; fi
	RUSTDOCFLAGS='--deny warnings' $(CARGO) doc --locked --workspace --no-deps --quiet

docs:
	SANDPOOL_WRITE_DOCS=1 $(CARGO) test --locked --quiet --package sandpool --test documents settings

measure:
	@scripts/measure $(if $(AGAINST),--against '$(AGAINST)') $(if $(LIST),--list)

clean:
	$(CARGO) clean

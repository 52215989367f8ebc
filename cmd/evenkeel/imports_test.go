package main

import (
	"errors"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// mayImport is the house (ARCHITECTURE.md): which of our packages a package may
// import. A folder stands for what is below it unless that has a row of its
// own. Arrows never turn back.
var mayImport = map[string][]string{
	"internal/rawjson":    {},
	"internal/socket":     {},
	"internal/namedargs":  {"internal/spelling"},
	"internal/spelling":   {},
	"internal/stats":      {},
	"internal/words":      {"internal/stats"},
	"internal/race":       {},
	"internal/logfile":    {},
	"internal/smallfile":  {},
	"sse":                 {"internal/rawjson"},
	"mooncake":            {"internal/rawjson", "internal/spelling"},
	"predictor":           {},
	"dispatcher/subset":   {},
	"dispatcher/policy":   {"dispatcher/rounds", "dispatcher/subset", "internal/namedargs"},
	"dispatcher/fakes":    {"dispatcher/policy"},
	"dispatcher/step":     {"internal/stats"},
	"dispatcher/forecast": {"predictor", "dispatcher/policy"},
	"pool":                {"mooncake"},
	"dispatcher/delivery": {"engine/circuit"},
	"dispatcher/board": {"pool", "predictor", "dispatcher/delivery", "dispatcher/forecast", "dispatcher/kept",
		"dispatcher/policy", "dispatcher/step", "engine/circuit"},
	"dispatcher/kept":     {},
	"dispatcher/rounds":   {},
	"dispatcher/virtual":  {"dispatcher/board", "dispatcher/kept", "dispatcher/step"},
	"dispatcher":          {"dispatcher/board", "dispatcher/delivery", "internal/logfile", "dispatcher/forecast", "pool", "predictor", "dispatcher/policy"},
	"engine":              {"engine/circuit", "mooncake", "internal/socket", "internal/words", "sse"},
	"engine/circuit":      {},
	"engine/discover":     {"engine/discover"}, // its sources are below it
	"prefill":             {"prefill/queue", "prefill/ledger", "prefill/cache", "prefill/fit", "prefill/steer", "prefill/policy", "prefill/index", "prefill/kvevents", "mooncake", "engine", "engine/circuit"},
	"prefill/queue":       {},
	"prefill/ledger":      {"prefill/policy"},
	"prefill/cache":       {"prefill/index", "prefill/kvevents"},
	"prefill/fit":         {"prefill/policy"},
	"prefill/steer":       {"prefill/policy"},
	"prefill/policy":      {"internal/namedargs", "internal/spelling"},
	"prefill/index":       {"internal/rawjson"},
	"prefill/local":       {"prefill", "prefill/cache", "prefill/fit", "prefill/index", "prefill/policy"},
	"prefill/kvevents":    {"prefill/index"},
	"lease":               {},
	"lease/kube":          {"lease"},
	"lease/etcd":          {"lease"},
	"geo":                 {"lease", "geo/policy", "internal/words", "prefill", "prefill/fit", "prefill/index", "prefill/policy", "engine", "engine/circuit", "sse"},
	"geo/policy":          {"internal/namedargs", "prefill/policy"},
	"gateway/advice":      {},
	"gateway/peerserver":  {"gateway/certs", "gateway/detect", "gateway/edge", "gateway/fleet", "gateway/fleet/roster", "gateway/openai", "gateway/owner", "gateway/reload", "gateway/service", "geo", "prefill", "dispatcher", "dispatcher/board", "engine", "mooncake"},
	"gateway/adviser":     {"gateway/advice", "gateway/config", "gateway/fleet", "gateway/fleet/roster", "dispatcher", "dispatcher/board", "pool", "prefill"},
	"gateway/certs":       {"gateway/certs"}, // certtest is below it
	"gateway/cluster":     {},
	"gateway/admission":   {"gateway/edge", "gateway/failure", "gateway/fleet", "gateway/fleet/roster", "gateway/journal", "gateway/keys", "gateway/openai", "gateway/owner", "gateway/prompt", "gateway/reload", "gateway/request", "gateway/service", "gateway/passthrough", "geo", "mooncake", "prefill"},
	"gateway/passthrough": {"gateway/edge", "gateway/failure", "gateway/fleet", "gateway/fleet/roster", "gateway/lifecycle", "gateway/openai", "gateway/request", "mooncake"},
	"gateway/discovery":   {"internal/smallfile", "gateway/cluster", "gateway/config", "gateway/detect", "gateway/fleet", "gateway/fleet/roster", "gateway/metaserver", "gateway/selftest", "engine/discover", "engine/discover/dns", "engine/discover/kube", "dispatcher/board"},
	"gateway/draft":       {"engine", "gateway/config", "mooncake"},
	"gateway/edge":        {"internal/socket"},
	"gateway/loop":        {"internal/socket"},
	"gateway/pump":        {"gateway/edge", "gateway/loop", "engine", "sse"},
	"gateway/files":       {},
	"gateway/fleet":       {"gateway/config", "gateway/fleet/roster", "gateway/recording", "gateway/upstream", "gateway/owner", "engine", "geo", "prefill", "prefill/kvevents", "prefill/local", "dispatcher/board", "mooncake"},
	"gateway/fleetcall":   {"gateway/config", "gateway/fleet/roster", "engine", "internal/spelling"},
	"gateway/journal":     {"internal/logfile", "internal/words", "gateway/config", "gateway/openai", "gateway/detect", "gateway/receipt", "gateway/tracing", "geo", "prefill", "prefill/policy", "dispatcher", "dispatcher/board", "engine", "mooncake"},
	"gateway/keys":        {"internal/smallfile", "internal/words"},
	"gateway/reload":      {"internal/smallfile", "gateway/certs", "gateway/config", "gateway/files", "gateway/fleet", "gateway/keys", "gateway/openai", "geo", "dispatcher/board", "predictor"},
	"gateway/service":     {},
	"gateway/openai":      {"mooncake", "internal/rawjson"},
	"gateway/prompt":      {"gateway/fleet", "gateway/fleet/roster", "gateway/openai", "engine", "engine/circuit", "prefill", "prefill/index", "internal/rawjson", "mooncake"},
	"gateway/receipt":     {"internal/words"},
	"gateway/tracing":     {},
	"gateway/config":      {"gateway/certs", "gateway/keys", "gateway/tracing", "geo", "mooncake", "engine", "prefill", "prefill/policy", "dispatcher", "dispatcher/board", "internal/spelling", "internal/smallfile", "internal/words"},
	"gateway/owner":       {"gateway/certs", "gateway/cluster", "gateway/config", "gateway/detect", "gateway/owner", "geo", "engine", "lease", "lease/kube", "lease/etcd"}, // ownertest is below it
	"gateway":             {"dispatcher", "dispatcher/board", "engine", "engine/discover", "gateway/abort", "gateway/peerserver", "gateway/advice", "gateway/adviser", "gateway/config", "gateway/admission", "gateway/detect", "gateway/discovery", "gateway/edge", "gateway/fleet", "gateway/fleet/roster", "gateway/fleetcall", "gateway/journal", "gateway/loop", "gateway/metaserver", "gateway/openai", "gateway/owner", "gateway/receipt", "gateway/reload", "gateway/request", "gateway/selftest", "gateway/service", "gateway/passthrough", "gateway/watch", "geo", "mooncake", "pool", "predictor", "prefill", "prefill/local"},
	"gateway/lifecycle":   {"mooncake", "sse"},
	"gateway/recording":   {"gateway/config", "gateway/fleet/roster", "gateway/lifecycle", "engine", "mooncake"},
	"gateway/upstream":    {"gateway/failure", "gateway/lifecycle", "gateway/owner", "engine", "mooncake", "sse"},
	"gateway/handoff":     {"gateway/failure", "gateway/fleet", "gateway/fleet/roster", "gateway/upstream", "gateway/lifecycle", "gateway/service", "dispatcher", "dispatcher/board", "pool", "prefill", "engine", "mooncake"},
	"gateway/failure":     {"gateway/journal", "gateway/lifecycle", "gateway/openai", "geo", "prefill", "dispatcher/board", "pool", "engine", "sse", "mooncake"},
	"gateway/abort":       {},
	"gateway/request":     {"gateway/abort", "gateway/edge", "gateway/failure", "gateway/fleet", "gateway/fleet/roster", "gateway/handoff", "gateway/journal", "gateway/upstream", "gateway/lifecycle", "gateway/loop", "gateway/metaserver", "gateway/openai", "gateway/owner", "gateway/prompt", "gateway/pump", "gateway/recording", "gateway/service", "geo", "prefill", "prefill/local", "dispatcher", "dispatcher/board", "dispatcher/delivery", "pool", "engine", "sse", "mooncake"},
	"gateway/selftest":    {"gateway/config", "gateway/failure", "gateway/upstream", "gateway/lifecycle", "gateway/metaserver", "gateway/owner", "engine", "sse", "mooncake"},
	"gateway/live":        {"gateway/advice", "gateway/detect", "gateway/fleet/roster", "gateway/live", "gateway/openai", "gateway/receipt", "gateway/watch", "dispatcher/board", "dispatcher/policy", "docs", "internal/stats", "internal/words"}, // livetest is below it
	"gateway/watch":       {"gateway/detect"},
	"gateway/detect":      {"gateway/advice", "dispatcher/board", "internal/stats", "internal/words"},
	"gateway/top":         {},
	"gateway/admin":       {"gateway", "gateway/fleetcall", "gateway/owner", "geo", "gateway/config", "gateway/live", "gateway/openai", "gateway/receipt", "prefill"},
	"bench":               {"bench", "geo", "geo/policy", "prefill", "prefill/policy", "prefill/index", "dispatcher", "dispatcher/board", "dispatcher/policy", "dispatcher/step", "dispatcher/subset", "pool", "predictor", "engine", "sse", "mooncake", "internal/rawjson", "internal/namedargs", "internal/spelling", "internal/stats"},
	"bench/sim/mixed":     {"bench", "dispatcher/board", "dispatcher/policy", "dispatcher/step", "dispatcher/virtual", "internal/stats"},
	"bench/claims/rounds": {"bench", "dispatcher/rounds", "internal/stats"},
	"bench/lab/laws":      {"dispatcher/step", "internal/spelling"},
	"bench/lab/survey":    {"bench", "dispatcher/step", "engine", "internal/stats"},
	"bench/sim/decode":    {"bench", "dispatcher/board", "dispatcher/step", "dispatcher/virtual", "internal/stats"}, // what it simulates is what ships
	"docs":                {},
	"bench/outside/book":  {},
	"cmd":                 {"*"},

	"gateway/metaserver": {"gateway/edge", "mooncake"},

	"gateway/fleet/roster": {"dispatcher/board", "engine", "gateway/config", "gateway/owner", "internal/words", "mooncake", "prefill", "prefill/kvevents", "prefill/local"},

	"bench/lab/refclient":       {"bench", "dispatcher/board", "engine/discover", "gateway/config", "internal/race", "mooncake", "prefill"},
	"bench/lab/refengine/group": {"bench", "dispatcher/step", "dispatcher/virtual"}, // it schedules as the simulator does
}

// pure packages are functions of their arguments: no clock, no I/O, no network.
var pure = []string{"internal/words", "internal/rawjson", "internal/namedargs", "internal/spelling", "internal/stats", "sse", "mooncake",
	"predictor", "geo/policy", "prefill/queue", "prefill/ledger", "prefill/cache", "prefill/fit", "prefill/steer", "prefill/policy",
	"prefill/index", "dispatcher/board", "dispatcher/delivery", "dispatcher/forecast", "dispatcher/kept",
	"dispatcher/policy", "dispatcher/rounds", "dispatcher/step", "dispatcher/subset",
	"dispatcher/virtual", "engine/circuit", "gateway/advice", "gateway/detect", "gateway/fleet/roster",
	"gateway/lifecycle"}

var impure = []string{"os", "net", "net/http", "log", "log/slog", "time/tzdata", "os/exec", "syscall", "sync",
	"github.com/valyala/fasthttp", "go.uber.org/zap"}

func TestImportsPointOneWay(t *testing.T) {
	root := filepath.Join("..", "..")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return err
		}
		if name := d.Name(); name != ".." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "out") {
			return fs.SkipDir
		}
		pkg, err := build.ImportDir(path, 0)
		if noGo := (*build.NoGoError)(nil); errors.As(err, &noGo) {
			return nil
		}
		require.NoError(t, err)
		rel, err := filepath.Rel(root, path)
		require.NoError(t, err)
		name := filepath.ToSlash(rel)
		row := rowOf(name)
		require.NotEmpty(t, row, "%s has no row: put it into this list and into ARCHITECTURE.md", name)
		for _, imp := range pkg.Imports {
			if slices.Contains(pure, row) && slices.Contains(impure, imp) {
				t.Errorf("%s imports %s: it is pure; take what you need as an argument", name, imp)
			}
			ours, ok := strings.CutPrefix(imp, "evenkeel/")
			if ok && !allowed(row, ours) {
				t.Errorf("%s imports %s: the arrow turns back (allowed: %v)", name, ours, mayImport[row])
			}
		}
		return nil
	})
	require.NoError(t, err)
}

// The table of pieces in ARCHITECTURE.md names each package, and imports lead down it.
func TestTheTableOfPiecesIsTheList(t *testing.T) {
	at, n := map[string]int{}, 0
	for _, row := range rowsOf(t, "| layer |") {
		n++
		for _, m := range inSpan.FindAllStringSubmatch(row, -1) {
			at[m[1]] = n
		}
	}
	require.Greater(t, n, 10)
	for pkg, imports := range mayImport {
		if strings.HasPrefix(pkg, "bench") || pkg == "cmd" {
			continue
		}
		require.Contains(t, at, pkg, "put it into the table of ARCHITECTURE.md")
		for _, imp := range imports {
			require.GreaterOrEqual(t, at[rowOf(imp)], at[pkg], "%s may import %s, which is further up in the table of ARCHITECTURE.md", pkg, imp)
		}
	}
}

// What only runs in a whole proxy is measured nowhere (ARCHITECTURE.md). So whoever starts one
// stands in PROXIES of the Makefile.
func TestFewPackagesStartAProxy(t *testing.T) {
	race.Alone(t)
	root, start := filepath.Join("..", ".."), map[string]bool{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		require.NoError(t, err)
		if !slices.ContainsFunc(file.Imports, func(i *ast.ImportSpec) bool { return i.Path.Value == `"evenkeel/gateway"` }) {
			return nil
		}
		rel, err := filepath.Rel(root, filepath.Dir(path))
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok && s.Sel.Name == "New" {
				if of, ok := s.X.(*ast.Ident); ok && of.Name == "gateway" {
					start[filepath.ToSlash(rel)] = true
				}
			}
			return true
		})
		return nil
	})
	require.NoError(t, err)
	require.Equal(t, map[string]bool{"bench/outside/api": true, "cmd/evenkeel": true, "gateway": true, "gateway/admin": true}, start)
	makefile, err := os.ReadFile(filepath.Join(root, "Makefile"))
	require.NoError(t, err)
	for pkg := range start {
		if strings.HasPrefix(pkg, "bench/") {
			pkg = "bench/..."
		}
		require.Regexp(t, `(?m)^PROXIES .* \./`+regexp.QuoteMeta(pkg)+`( |$)`, string(makefile))
	}
}

// rowOf is the longest row of the table that a package stands under.
func rowOf(name string) (row string) {
	for r := range mayImport {
		if (name == r || strings.HasPrefix(name, r+"/")) && len(r) > len(row) {
			row = r
		}
	}
	return row
}

func allowed(row, imported string) bool {
	for _, may := range mayImport[row] {
		if may == "*" || may == imported || may == "bench" && strings.HasPrefix(imported, "bench/") {
			return true
		}
	}
	return false
}

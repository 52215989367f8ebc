package regions

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	geopolicy "evenkeel/geo/policy"
	prefillpolicy "evenkeel/prefill/policy"
)

// mayName is what the simulator may name of the server's packages: how a queue and the
// peers are configured and told of events, and how policies are written. A view that a
// policy decides on is none of it. A prefill.Candidate is an engine of the config.
var mayName = map[string][]string{
	"evenkeel/geo": {
		"Ask", "Central", "Config", "Default", "Forward", "Hop", "Link", "New", "OutcomeGone", "OutcomeLost", "OutcomeOK",
		"PeerConfig", "Peers", "ProbeOutcome", "RoutingQuery",
		"RejectBusy", "RejectDraining", "RejectModel", "RejectVersion", "RejectedError", "RingKeyOf",
	},
	"evenkeel/geo/policy":         {"Blind", "Defaults", "Names", "Push", "SPE", "SPP"},
	"evenkeel/prefill":            {"Candidate", "Config", "Default", "ErrElsewhere", "Lease", "New", "Prompt", "Request", "Sample", "Scheduler", "Usage"},
	"evenkeel/prefill/policy":     {"Definition"},
	"evenkeel/prefill/index":      {"Config", "Index", "Key", "New", "Slot", "UsableHit"}, // the replicas' own caches
	"evenkeel/engine":             {"ErrAborted", "Error", "PhaseConnect", "PhaseHead", "Target"},
	"evenkeel/bench/lab/report":   nil, // all of it, as of the next four
	"evenkeel/bench/lab/reftext":  nil,
	"evenkeel/internal/namedargs": nil,
	"evenkeel/internal/spelling":  nil,
	"evenkeel/internal/stats":     nil,
}

// A simulator that has a queue, an account or a view of its own drifts from the
// server, and then its tables judge what does not ship.
func TestNothingIsDecidedHere(t *testing.T) {
	asks := []string{}
	for _, of := range []reflect.Type{reflect.TypeFor[*geopolicy.Policy](), reflect.TypeFor[*prefillpolicy.Policy]()} {
		for m := range of.Methods() {
			if !slices.Contains([]string{"Name", "String", "Settings"}, m.Name) {
				asks = append(asks, m.Name)
			}
		}
	}
	require.Subset(t, asks, []string{"Begin", "Next", "Judge", "PeerCandidate", "Choose"})
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	for _, f := range files {
		if !strings.HasSuffix(f.Name(), ".go") || strings.HasSuffix(f.Name(), "_test.go") {
			continue
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, f.Name(), nil, 0)
		require.NoError(t, err)
		named := map[string]string{} // packages by the name that the file has for them
		for _, imp := range file.Imports {
			of, err := strconv.Unquote(imp.Path.Value)
			require.NoError(t, err)
			if !strings.HasPrefix(of, "evenkeel/") {
				continue
			}
			_, may := mayName[of]
			require.True(t, may, "%s imports %s", f.Name(), of)
			name := path.Base(of)
			if imp.Name != nil {
				name = imp.Name.Name
			}
			require.NotEqual(t, ".", name, "%s: %s", f.Name(), of)
			named[name] = of
		}
		ast.Inspect(file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			at := fset.Position(sel.Pos())
			if x, ok := sel.X.(*ast.Ident); ok && named[x.Name] != "" {
				if all := mayName[named[x.Name]]; all != nil && !slices.Contains(all, sel.Sel.Name) {
					t.Errorf("%s: it uses %s.%s: have the server's peers or scheduler do it", at, named[x.Name], sel.Sel.Name)
				}
			} else if slices.Contains(asks, sel.Sel.Name) {
				t.Errorf("%s: it calls %s, which is a policy's: have the server's peers or scheduler ask", at, sel.Sel.Name)
			}
			return true
		})
	}
}

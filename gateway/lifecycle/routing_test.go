package lifecycle

import (
	"go/ast"
	"go/parser"
	gotoken "go/token"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var routings = []routing{arrived, servedHere, stranded, triedHere, unowned, returned, strandedLast}

// The table in the comment is what the code does: each row and column of it is walked.
func TestTheHistoryOfARequestMovesAsItsTableSays(t *testing.T) {
	names := map[string]routing{"arrived": arrived, "servedHere": servedHere, "stranded": stranded, "triedHere": triedHere, "unowned": unowned,
		"returned": returned, "strandedLast": strandedLast}
	by := map[string]move{"gotTurn": gotTurn, "gaveBack": gaveBack, "askAgain": askAgain, "lostRanks": lostRanks, "lostGroup": lostGroup,
		"failed": failed}
	file, err := parser.ParseFile(gotoken.NewFileSet(), "routing.go", nil, parser.ParseComments)
	require.NoError(t, err)
	var columns []string
	rows := 0
	for line := range strings.Lines(docOf(file, "routing")) {
		words := strings.Fields(line)
		switch {
		case len(words) > 3 && words[0] == "from":
			columns = words[3:]
			require.Len(t, columns, len(by))
		case len(words) == len(by)+1 && columns != nil:
			from, ok := names[words[0]]
			require.True(t, ok, words[0])
			rows++
			for i, to := range words[1:] {
				m, ok := by[columns[i]]
				require.True(t, ok, columns[i])
				got := from
				if to == "-" {
					require.False(t, got.tryMove(m), "from %s by %s", words[0], columns[i])
					require.Equal(t, from, got, "a move that is not legal changes nothing")
					continue
				}
				require.True(t, got.tryMove(m), "from %s by %s", words[0], columns[i])
				require.Equal(t, names[to], got, "from %s by %s", words[0], columns[i])
			}
		}
	}
	require.Equal(t, len(routings), rows, "a row for each state")
}

func docOf(file *ast.File, name string) string {
	for _, d := range file.Decls {
		if g, ok := d.(*ast.GenDecl); ok && g.Tok == gotoken.TYPE && g.Specs[0].(*ast.TypeSpec).Name.Name == name {
			return g.Doc.Text()
		}
	}
	return ""
}

// Whatever happens, only another owner of its decode group moves a request for ever:
// without that, every walk ends.
func TestEveryWalkOfARequestEnds(t *testing.T) {
	var walk func(r routing, behind []routing)
	walk = func(r routing, behind []routing) {
		require.NotContains(t, behind, r, "it comes back to where it was: %v", behind)
		for _, m := range []move{gaveBack, lostRanks, failed} {
			if next := r; next.tryMove(m) {
				walk(next, append(slices.Clone(behind), r))
			}
		}
		if r.MayAsk() { // else a turn here changes nothing
			next := r
			require.True(t, next.tryMove(gotTurn))
			require.False(t, next.MayAsk(), "a retry stays")
			walk(next, append(slices.Clone(behind), r))
		}
	}
	for _, r := range routings {
		walk(r, nil)
	}
}

func TestARequestIsFirstInItsQueueOnceItHasWaited(t *testing.T) {
	for _, r := range routings {
		require.Equal(t, r != arrived && r != servedHere, r.HasWaited())
		next := r
		require.True(t, next.tryMove(gotTurn), "every request may have its turn here")
		require.Equal(t, r.HasWaited(), next.HasWaited(), "a turn does not change it")
	}
}

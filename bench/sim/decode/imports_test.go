package decode

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// What is simulated is what ships: the board decides, books and learns. Policies and predictors go
// in as text, so nothing here can be a second board.
func TestTheServersBoardDecides(t *testing.T) {
	files, err := os.ReadDir(".")
	require.NoError(t, err)
	drives := false
	for _, f := range files {
		name := f.Name()
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		require.NoError(t, err)
		for _, i := range file.Imports {
			path := strings.Trim(i.Path.Value, `"`)
			drives = drives || path == "evenkeel/dispatcher/board"
			require.NotContains(t, []string{"evenkeel/dispatcher", "evenkeel/dispatcher/policy", "evenkeel/dispatcher/subset", "evenkeel/pool",
				"evenkeel/predictor"}, path, name)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				built := s.Sel.Name == "Snapshot"
				if x, named := s.X.(*ast.Ident); named && x.Name == "board" && s.Sel.Name == "Decide" {
					return true // the event that has the board decide
				}
				require.False(t, built || s.Sel.Name == "Decide" || s.Sel.Name == "Predict", "%s names %s: that is the board's", name, s.Sel.Name)
			}
			return true
		})
	}
	require.True(t, drives)
}

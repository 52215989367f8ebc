package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// rowsOf are the lines of the table in ARCHITECTURE.md whose head begins so.
func rowsOf(t *testing.T, head string) (rows []string) {
	t.Helper()
	page, err := os.ReadFile(filepath.Join("..", "..", "ARCHITECTURE.md"))
	require.NoError(t, err)
	_, table, found := strings.Cut(string(page), "\n"+head)
	require.True(t, found, head)
	for line := range strings.Lines(table) {
		if line == "\n" {
			break
		}
		rows = append(rows, line)
	}
	return rows[2:]
}

var inSpan = regexp.MustCompile("`([^`]+)`")

// Each row of these tables names files, and what one of them declares: a function, a method as
// Type.method, a type, a variable.
func TestTheFilesOfTheArchitectureDeclareWhatItNames(t *testing.T) {
	rows := append(rowsOf(t, "| question |"), rowsOf(t, "| rule |")...)
	require.Greater(t, len(rows), 30)
	for _, row := range rows {
		declared, named := map[string]bool{}, []string{}
		for _, m := range inSpan.FindAllStringSubmatch(row, -1) {
			if !strings.HasSuffix(m[1], ".go") {
				named = append(named, m[1])
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), filepath.Join("..", "..", m[1]), nil, parser.SkipObjectResolution)
			require.NoError(t, err, row)
			for _, decl := range file.Decls {
				switch decl := decl.(type) {
				case *ast.FuncDecl:
					of := ""
					if decl.Recv != nil {
						of = receiver(decl.Recv.List[0].Type) + "."
					}
					declared[of+decl.Name.Name] = true
				case *ast.GenDecl:
					for _, spec := range decl.Specs {
						switch spec := spec.(type) {
						case *ast.TypeSpec:
							declared[spec.Name.Name] = true
						case *ast.ValueSpec:
							declared[spec.Names[0].Name] = true
						}
					}
				}
			}
		}
		assert.NotEmpty(t, named, row)
		for _, name := range named {
			assert.True(t, declared[name], "no file of this row declares %s: %s", name, row)
		}
	}
}

// The page of words has at most 60 rows, and each says in which package its word is.
func TestTheWordsOfARequestsWay(t *testing.T) {
	rows := rowsOf(t, "| word |")
	assert.LessOrEqual(t, len(rows), 60)
	for _, row := range rows {
		folders := inSpan.FindAllStringSubmatch(row[strings.LastIndex(row[:strings.LastIndex(row, "|")], "|"):], -1)
		require.Len(t, folders, 1, row)
		assert.DirExists(t, filepath.Join("..", "..", folders[0][1]), row)
	}
}

// receiver is the name of a method's type, without pointer and type parameters.
func receiver(of ast.Expr) string {
	switch of := of.(type) {
	case *ast.StarExpr:
		return receiver(of.X)
	case *ast.IndexExpr:
		return receiver(of.X)
	case *ast.IndexListExpr:
		return receiver(of.X)
	case *ast.Ident:
		return of.Name
	}
	return ""
}

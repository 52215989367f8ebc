package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// What can be held in the head: so many fields and methods of a type.
const (
	mostFields  = 35
	mostMethods = 50
)

// large are the types beyond that. Each stands in ARCHITECTURE.md with its reason.
var large = []string{"dispatcher/board.board", "mooncake.Profile"}

func TestTypesAreOfASize(t *testing.T) {
	race.Alone(t)
	root := filepath.Join("..", "..")
	fields, methods := map[string]int{}, map[string]int{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && name != ".." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "bin" || name == "out") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		rel, err := filepath.Rel(root, filepath.Dir(path))
		require.NoError(t, err)
		pkg := filepath.ToSlash(rel)
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		require.NoError(t, err)
		for _, decl := range file.Decls {
			switch decl := decl.(type) {
			case *ast.FuncDecl:
				if decl.Recv != nil {
					methods[pkg+"."+receiver(decl.Recv.List[0].Type)]++
				}
			case *ast.GenDecl:
				for _, spec := range decl.Specs {
					if s, ok := spec.(*ast.TypeSpec); ok {
						fields[pkg+"."+s.Name.Name] = fieldsOf(s.Type)
					}
				}
			}
		}
		return nil
	})
	require.NoError(t, err)
	described, err := os.ReadFile(filepath.Join(root, "ARCHITECTURE.md"))
	require.NoError(t, err)
	for name, n := range fields {
		if slices.Contains(large, name) {
			assert.True(t, bytes.Contains(described, []byte("`"+name+"`")), "%s has no reason in ARCHITECTURE.md", name)
			assert.True(t, n > mostFields || methods[name] > mostMethods, "%s is large no more: take it off the list", name)
			continue
		}
		assert.LessOrEqual(t, n, mostFields, "fields of %s", name)
		assert.LessOrEqual(t, methods[name], mostMethods, "methods of %s", name)
	}
}

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

// Each row of these tables names files, and what one of them declares: a function, a method as Type.method, a type, a variable.
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

// fieldsOf counts the fields of a struct; what is embedded is one.
func fieldsOf(of ast.Expr) (n int) {
	if s, ok := of.(*ast.StructType); ok {
		for _, f := range s.Fields.List {
			n += max(1, len(f.Names))
		}
	}
	return n
}

package main

import (
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// How many columns a line may have: two files of code fit side by side.
const (
	widest        = 120
	widestComment = 100
)

// longLines has the number of longer lines in each folder, which may only fall.
const longLines = "testdata/long_lines.txt"

var updateLongLines = flag.Bool("update-long-lines", false, "write the numbers of "+longLines+" that have fallen")

// tableRow is a line of a table. Its columns are read more easily one below the other, however wide
// they are.
var tableRow = regexp.MustCompile(`^\s*(\{.*\},?|"[^"]*":.*,)( //.*)?$`)

// No new line is long, but rows of tables, and what stands between backquotes, such as the help of
// flags.
func TestNoLineIsLong(t *testing.T) {
	race.Alone(t)
	long := map[string]int{} // by folder
	eachGoFile(t, func(path string, text []byte) {
		if strings.HasSuffix(path, "examples_test.go") { // what an example prints is one line
			return
		}
		quoted, folder := backquoted(text), strings.TrimPrefix(filepath.ToSlash(filepath.Dir(path)), "../../")
		for i, line := range strings.Split(string(text), "\n") {
			limit := widest
			if strings.HasPrefix(strings.TrimSpace(line), "//") {
				limit = widestComment
			}
			exempt := quoted[i+1] || tableRow.MatchString(line) || strings.HasPrefix(line, "//go:")
			if utf8.RuneCountInString(line) > limit && !exempt {
				long[folder]++
			}
		}
	})
	listed, err := os.ReadFile(longLines)
	require.NoError(t, err)
	allowed, fallen := map[string]int{}, ""
	for line := range strings.Lines(string(listed)) {
		var folder string
		var n int
		_, err := fmt.Sscan(line, &folder, &n)
		require.NoError(t, err, line)
		allowed[folder] = n
		if n = min(n, long[folder]); n > 0 {
			fallen += fmt.Sprintln(folder, n)
		}
	}
	for folder, n := range long {
		if n > allowed[folder] {
			t.Errorf("%s has %d long lines (code: more than %d columns, comments: more than %d), and may have %d; "+
				`git diff main... -- %[1]s | grep -E '^\+(.{121}|\s*//.{99})' shows the new ones`,
				folder, n, widest, widestComment, allowed[folder])
		}
	}
	if *updateLongLines {
		require.NoError(t, os.WriteFile(longLines, []byte(fallen), 0o644))
	}
}

// A struct of more than three values says which is which, but in a row of a table.
func TestManyValuesHaveTheirNames(t *testing.T) {
	race.Alone(t)
	lists := map[string]bool{} // the names of types that are lists, whose values have none
	files, parsed := token.NewFileSet(), map[string]*ast.File{}
	eachGoFile(t, func(path string, text []byte) {
		f, err := parser.ParseFile(files, path, text, parser.SkipObjectResolution)
		require.NoError(t, err)
		parsed[path] = f
		ast.Inspect(f, func(n ast.Node) bool {
			if d, ok := n.(*ast.TypeSpec); ok {
				_, list := d.Type.(*ast.ArrayType)
				lists[d.Name.Name] = lists[d.Name.Name] || list
			}
			return true
		})
	})
	for _, f := range parsed {
		ast.Inspect(f, func(n ast.Node) bool {
			all, ok := n.(*ast.CompositeLit)
			if !ok {
				return true
			}
			name := ""
			switch of := all.Type.(type) {
			case *ast.Ident:
				name = of.Name
			case *ast.SelectorExpr:
				name = of.Sel.Name
			default:
				return len(all.Elts) < 2 // else it is a table, all of whose rows are alike
			}
			if _, named := slices.Concat(all.Elts, []ast.Expr{nil})[0].(*ast.KeyValueExpr); len(all.Elts) > 3 && !named && !lists[name] {
				t.Errorf("%s: %d values of a %s have no names", files.Position(all.Pos()), len(all.Elts), name)
			}
			return true
		})
	}
}

// eachGoFile calls f with each file of Go, product, bench and tests.
func eachGoFile(t *testing.T, f func(path string, text []byte)) {
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && name != ".." && (strings.HasPrefix(name, ".") || name == "bin" || name == "out") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") {
			return nil
		}
		text, err := os.ReadFile(path)
		if err == nil {
			f(path, text)
		}
		return err
	}))
}

// backquoted are the lines with a part of a string between backquotes.
func backquoted(text []byte) map[int]bool {
	lines := map[int]bool{}
	file := token.NewFileSet().AddFile("", -1, len(text))
	var s scanner.Scanner
	s.Init(file, text, nil, 0)
	for {
		at, kind, literal := s.Scan()
		if kind == token.EOF {
			return lines
		}
		if kind == token.STRING && literal[0] == '`' {
			first := file.Line(at)
			for n := range strings.Count(literal, "\n") + 1 {
				lines[first+n] = true
			}
		}
	}
}

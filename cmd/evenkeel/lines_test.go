package main

import (
	"go/scanner"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// widest is how many columns a line of code has at most: two files fit side by side.
const widest = 140

// tableRow is a line of a table. Its columns are read more easily one below the other, however wide they are.
var tableRow = regexp.MustCompile(`^\s*(\{.*\},?|"[^"]*":.*,)( //.*)?$`)

// No line is long, but rows of tables, and what stands between backquotes, such as the help of flags.
func TestNoLineIsLong(t *testing.T) {
	root := filepath.Join("..", "..")
	require.NoError(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if name := d.Name(); d.IsDir() && name != ".." && (strings.HasPrefix(name, ".") || name == "bin" || name == "out") {
			return fs.SkipDir
		}
		if d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "examples_test.go") { // what an example prints is one line
			return nil
		}
		text, err := os.ReadFile(path)
		quoted := backquoted(text)
		for i, line := range strings.Split(string(text), "\n") {
			if n := utf8.RuneCountInString(line); n > widest && !tableRow.MatchString(line) && !quoted[i+1] && !strings.HasPrefix(line, "//go:") {
				t.Errorf("%s:%d has %d columns, which may be %d: break it where its outermost part ends", path, i+1, n, widest)
			}
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

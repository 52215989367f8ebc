package main

import (
	"go/scanner"
	"go/token"
	"os"
	"os/exec"
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
	out, err := exec.Command("git", "-C", root, "ls-files", "*.go").Output()
	require.NoError(t, err)
	for name := range strings.Lines(string(out)) {
		if strings.HasSuffix(strings.TrimSpace(name), "examples_test.go") {
			continue // what an example prints stands in one line
		}
		path := filepath.Join(root, strings.TrimSpace(name))
		text, err := os.ReadFile(path)
		if os.IsNotExist(err) {
			continue
		}
		require.NoError(t, err)
		quoted := backquoted(text)
		for i, line := range strings.Split(string(text), "\n") {
			if n := utf8.RuneCountInString(line); n > widest && !tableRow.MatchString(line) && !quoted[i+1] && !strings.HasPrefix(line, "//go:") {
				t.Errorf("%s:%d has %d columns, which may be %d: break it where its outermost part ends", path, i+1, n, widest)
			}
		}
	}
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

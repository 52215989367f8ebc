package main

import (
	"go/scanner"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

// massFile bounds what a reader of the product has to carry: its tokens, and the words of its
// comments per 1,000 tokens. The last line of each kind is in force. Who raises a bound adds a line
// with the reason.
const massFile = "testdata/mass.txt"

var massLine = regexp.MustCompile(`^(tokens|words) (\d+): \S.*\n$`)

// The product is all files of Go but tests and bench.
func TestTheProductStaysAsSmallAsItIs(t *testing.T) {
	race.Alone(t)
	tokens, words := 0, 0
	eachGoFile(t, func(path string, text []byte) {
		tests := strings.HasSuffix(path, "_test.go") || strings.Contains(path, "/testdata/")
		if !tests && !strings.Contains(path, "/bench/") {
			more, moreWords := massOf(text)
			tokens, words = tokens+more, words+moreWords
		}
	})
	listed, err := os.ReadFile(massFile)
	require.NoError(t, err)
	bounds := map[string]int{}
	for line := range strings.Lines(string(listed)) {
		m := massLine.FindStringSubmatch(line)
		require.NotNil(t, m, "%s: a line is a kind, a number and the reason: %q", massFile, line)
		bounds[m[1]], _ = strconv.Atoi(m[2])
	}
	for kind, now := range map[string]int{"tokens": tokens, "words": words * 1000 / tokens} {
		if now > bounds[kind] {
			t.Errorf("%s of the product: %d, and %s allows %d: delete as much as you add, or add a line %q there",
				kind, now, massFile, bounds[kind], kind+" "+strconv.Itoa(now)+": REASON")
		}
	}
}

// massOf counts the tokens of a file, and the words of its comments.
func massOf(text []byte) (tokens, words int) {
	var s scanner.Scanner
	s.Init(token.NewFileSet().AddFile("", -1, len(text)), text, nil, scanner.ScanComments)
	for {
		switch _, kind, literal := s.Scan(); {
		case kind == token.EOF:
			return tokens, words
		case kind == token.COMMENT:
			words += len(strings.Fields(strings.TrimLeft(literal, "/* ")))
		case kind != token.SEMICOLON || literal != "\n":
			tokens++
		}
	}
}

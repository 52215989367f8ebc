package main

import (
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
)

// commandLine is kong's model of all commands.
func commandLine(t testing.TB) *kong.Node {
	t.Helper()
	parser, err := kong.New(&commands{}, helpVariables())
	require.NoError(t, err)
	return parser.Model.Node
}

// A flag whose placeholder has no dots is repeated instead, as in `load --url A --url B`.
func TestListsAreTheFlagsWithDots(t *testing.T) {
	root := commandLine(t)
	require.Equal(t, map[string]bool{"--engines": true}, listFlags(root, []string{"survey"}))
	require.Subset(t, listFlags(root, []string{"init"}), map[string]bool{"--probe": true, "--decoder-host": true})
	for _, line := range []string{"", "load", "engine", "no-such-command", "--help"} {
		require.Empty(t, listFlags(root, strings.Fields(line)), line)
	}
}

func TestSpreadLists(t *testing.T) {
	lists := listFlags(commandLine(t), []string{"serve"})
	require.Equal(t, map[string]bool{
		"--prefiller-hosts": true, "--prefiller-ports": true, "--decoder-hosts": true, "--decoder-ports": true,
		"--aggregated-hosts": true, "--aggregated-ports": true, "--aggregated-host": true, "--aggregated-port": true,
		"--prefiller-host": true, "--prefiller-port": true, "--decoder-host": true, "--decoder-port": true,
	}, lists)
	for _, tc := range []struct{ name, in, want string }{
		{"a list becomes repeated flags", "serve --prefiller-ports 1 2 --port 9", "serve --prefiller-ports=1 --prefiller-ports=2 --port 9"},
		{"the last flag may be a list", "serve --decoder-hosts a b c", "serve --decoder-hosts=a --decoder-hosts=b --decoder-hosts=c"},
		{"a flag that is no list keeps its word", "serve --host h --prefiller-hosts a", "serve --host h --prefiller-hosts=a"},
		{"a list without words is left to the parser", "serve --decoder-ports --port 1", "serve --decoder-ports --port 1"},
		{"a list written with = is as it was", "serve --decoder-ports=1 --decoder-ports=2", "serve --decoder-ports=1 --decoder-ports=2"},
		{"nothing behind -- is touched", "x -- --decoder-ports 1 2", "x -- --decoder-ports 1 2"},
		{"a list given twice goes on", "--decoder-ports 1 --decoder-ports 2 3", "--decoder-ports=1 --decoder-ports=2 --decoder-ports=3"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			require.Equal(t, strings.Fields(tc.want), spreadLists(strings.Fields(tc.in), lists))
		})
	}
}

// FuzzSpreadLists: no word is lost and the order is kept.
func FuzzSpreadLists(f *testing.F) {
	f.Add("serve --prefiller-hosts a b --port 9 -- --decoder-ports 1")
	f.Add("--decoder-ports 1 2 -x")
	f.Add("--decoder-ports -- 1")
	lists := listFlags(commandLine(f), []string{"serve"})
	f.Fuzz(func(t *testing.T, line string) {
		in := strings.Fields(line)
		var back []string
		flag := ""
		for _, word := range spreadLists(in, lists) {
			name, value, ok := strings.Cut(word, "=")
			if !ok || !lists[name] || contains(in, word) {
				back, flag = append(back, word), ""
				continue
			}
			if flag != name {
				back = append(back, name)
			}
			back, flag = append(back, value), name
		}
		// A list given twice in a row reads as one: compare without the
		// repeated flag.
		require.Equal(t, dropRepeats(in, lists), back)
	})
}

// dropRepeats leaves out a list flag that goes on with the list before it.
func dropRepeats(words []string, lists map[string]bool) (out []string) {
	open := ""
	for i, w := range words {
		if w == "--" {
			return append(out, words[i:]...)
		}
		if strings.HasPrefix(w, "-") {
			takes := lists[w] && i+1 < len(words) && !strings.HasPrefix(words[i+1], "-")
			if takes && open == w {
				continue
			}
			open = ""
			if takes {
				open = w
			}
		}
		out = append(out, w)
	}
	return out
}

func contains(words []string, w string) bool {
	for _, x := range words {
		if x == w {
			return true
		}
	}
	return false
}

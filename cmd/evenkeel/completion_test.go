package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"evenkeel/internal/race"
)

func TestComplete(t *testing.T) {
	for _, tc := range []struct {
		name  string
		words []string
		gives []string // all of them, or with "…" last some of them
	}{
		{"nothing at all gives the commands", nil, []string{"serve", "check", "demo", "…"}},
		{"the beginning of a command", []string{"si"}, []string{"simulate"}},
		{"commands of a command", []string{"fit", ""}, []string{"predictor", "ttft", "step"}},
		{"what answers scripts is not offered", []string{"complete"}, nil},
		{"a flag", []string{"serve", "--prefiller-"}, []string{"--prefiller-hosts", "--prefiller-ports"}},
		{"the flags of aggregated engines", []string{"serve", "--aggregated-"}, []string{"--aggregated-hosts", "--aggregated-ports", "--aggregated-data-parallel-size"}},
		{"a flag that can be negated", []string{"serve", "--no"}, []string{"--no-self-test"}},
		{"a flag of a command's default", []string{"fit", "--ki"}, []string{"--kind"}},
		{"a value of a choice", []string{"fit", "--kind", "s"}, []string{"survival"}},
		{"a value behind =", []string{"simulate", "--format=a"}, []string{"--format=auto", "--format=azure"}},
		{"a policy with a preset", []string{"serve", "--policy", "br0:"}, []string{"br0:paper", "br0:bypass"}},
		{"the last of a list of policies", []string{"simulate", "--policies", "jsq,pjsq-"}, []string{"jsq,pjsq-kv"}},
		{"a file", []string{"serve", "-c", ""}, []string{completeFiles}},
		{"a file behind =", []string{"serve", "--config=con"}, []string{completeFiles}},
		{"an argument that is a file", []string{"vectors", ""}, []string{completeFiles}},
		{"a flag after a list", []string{"serve", "--decoder-hosts", "a", "b", "--slo"}, []string{"--slots"}},
		{"a word after a switch is no value", []string{"decide", "--json", ""}, nil},
		{"the example proxy's command line", []string{"--port", "9000", "--conn"}, []string{"--connector"}},
		{"a shell", []string{"completion", ""}, []string{"bash", "zsh", "fish"}},
		{"an unknown flag's value", []string{"serve", "--fast=x"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, out, errs := line(append([]string{"complete", "--"}, tc.words...)...)
			require.Zero(t, status, errs)
			got := strings.Fields(out)
			if n := len(tc.gives); n > 0 && tc.gives[n-1] == "…" {
				require.Subset(t, got, tc.gives[:n-1])
				return
			}
			require.Equal(t, tc.gives, append([]string(nil), got...))
		})
	}
}

// TestShellsComplete asks the shells themselves, those that are there.
func TestShellsComplete(t *testing.T) {
	race.Alone(t)
	dir := t.TempDir()
	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "evenkeel"), []byte("#!/bin/sh\n"+asEvenkeel+"=1 exec '"+os.Args[0]+"' \"$@\"\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "proxy.yaml"), nil, 0o644))
	ask := map[string]string{
		"bash": `compopt() { :; }; source <(evenkeel completion bash); COMP_LINE=$1 COMP_POINT=${#1}; _evenkeel; printf '%s\n' "${COMPREPLY[@]}"`,
		"fish": `evenkeel completion fish | source; complete -C $argv[1]`,
	}
	for _, tc := range []struct{ line, shell, gives string }{
		{"evenkeel ser", "bash", "serve"},
		{"evenkeel serve --polic", "bash", "--policy"},
		{"evenkeel serve --policy br0:p", "bash", "paper"}, // what follows the colon is a word of its own
		{"evenkeel serve --config=pro", "bash", "proxy.yaml"},
		{"evenkeel ser", "fish", "serve"},
		{"evenkeel serve --policy br0:p", "fish", "br0:paper"},
		{"evenkeel serve --config=pro", "fish", "--config=proxy.yaml"},
		{"evenkeel serve --config pro", "fish", "proxy.yaml"},
	} {
		t.Run(tc.shell+" "+tc.line, func(t *testing.T) {
			if _, err := exec.LookPath(tc.shell); err != nil {
				t.Skip("no " + tc.shell + " here")
			}
			args := []string{"-c", ask[tc.shell], tc.line}
			if tc.shell == "bash" {
				args = []string{"-c", ask["bash"], "bash", tc.line}
			}
			cmd := exec.Command(tc.shell, args...)
			cmd.Dir, cmd.Env = dir, append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "HOME="+dir)
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, string(out))
			require.Equal(t, tc.gives, strings.TrimSpace(string(out)))
		})
	}
}

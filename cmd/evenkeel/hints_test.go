package main

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A first hour's mistakes: what is said names the mistake, and nothing else.
func TestMistakesAreNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()
	dir := t.TempDir()
	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "evenkeel.yaml"), []byte("engines: {decode: [{url: \"http://d0:1\", slots: 4}]}\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "tab.yaml"), []byte("engines:\n\tdecode: []\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "url.yaml"), []byte("listen: \"http://0.0.0.0:8000\"\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "port.yaml"), []byte("listen: \":80800\"\n"), 0o600))
	require.NoError(t,
		os.WriteFile(filepath.Join(dir, "two.yaml"), []byte("engines: {decode: [{url: \"http://d0:1,http://d1:1\", slots: 4}]}\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "slot.yaml"), []byte("engines: {decode: [{url: \"http://d0:1\", slot: 4}]}\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "profile.yaml"),
		[]byte("profiles: {ascend: {}}\nengines: {decode: [{url: \"http://d0:1\", slots: 4, profile: asend}]}\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "connector.yaml"), []byte("profiles: {default: {connector: nixl_pull}}\n"), 0o600))
	const process = "another process"
	for _, tt := range []struct {
		name, line string
		status     int
		says, not  string
	}{
		{"a port that is none", "serve --port 80800", 2, "--port: 80800 is no port", process},
		{"a negative port", "serve --port -1", 2, "--port: -1 is no port", "short flag"},
		{"a port that is none, in a file", "check --config port.yaml", 1, `":80800" has port 80800, and ports are 0 to 65535`, process},
		{"an admin port that is none", "serve --admin 127.0.0.1:99999", 2, `"127.0.0.1:99999" has port 99999, and ports are 0 to 65535`, process},
		{"a host of another machine", "serve --host 192.0.2.1 --admin 127.0.0.1:0", 1, "no network interface of this machine has the address", process},
		{"a host that is no name", "serve --host no-such-host.invalid --admin 127.0.0.1:0", 1, "the host to listen on must be a name or an address of this machine", process},
		{"an address that is taken", "serve --host 127.0.0.1 --admin " + taken.Addr().String(), 1, "there is another process on " + taken.Addr().String(), ""},
		{"a URL as host", "serve --host http://127.0.0.1", 2, `--host: "http://127.0.0.1" is a URL; write a name or an address alone`, process},
		{"a URL to listen on, in a file", "check --config url.yaml", 1, `"http://0.0.0.0:8000" is a URL; write host:port`, ""},
		{"a URL as an engine's host", "serve --prefiller-hosts http://10.0.0.1", 2, `--prefiller-hosts: "http://10.0.0.1" is a URL`, "[http"},
		{"a port in an engine's host", "serve --decoder-hosts 10.0.0.1:9000", 2, `--decoder-hosts: "10.0.0.1:9000" has a port`, "[10"},
		{"hosts with commas", "serve --prefiller-hosts 10.0.0.1,10.0.0.2 --prefiller-ports 1 2", 2, `--prefiller-hosts: "10.0.0.1,10.0.0.2" is a list separated by commas; separate hosts by spaces`, ""},
		{"ports with commas", "serve --decoder-hosts a b --decoder-ports 8200,8201", 2, `--decoder-ports: "8200,8201" is a list separated by commas; separate ports by spaces`, "64 bit"},
		{"a port that is a word", "serve --decoder-ports http", 2, `--decoder-ports: "http" is no port; write a number from 1 to 65535`, "64 bit"},
		{"a negative port of an engine", "serve --decoder-ports -3", 2, `--decoder-ports: "-3" is no port`, "short flag"},
		{"engines with commas, in a file", "check --config two.yaml", 1, "names more than one engine; write an entry for each", ""},
		{"negative slots", "serve --slots -1", 2, "--slots: engines.decode[0].slots: -1 is no number of slots; write the engine's --max-num-seqs", "short flag"},
		{"no slots", "serve --slots 0", 2, "--slots: a rank with 0 slots runs nothing; write the engines' --max-num-seqs", ""},
		{"negative retries", "serve --max-retries -2", 2, "--max-retries: prefill.retry.attempts: -2; at least 1 is needed", "short flag"},
		{"a negative delay", "serve --retry-delay -0.5", 2, "--retry-delay: prefill.retry.base: -500ms; a time above 0 is needed", "short flag"},
		{"a file without its flag", "check evenkeel.yaml", 2, "a config file is given as --config evenkeel.yaml", ""},
		{"a file that is not in this folder", "serve --config nowhere.yaml", 1, "open nowhere.yaml: no such file or directory; the path is relative to the working directory, " + dir, ""},
		{"a long flag with one dash", "check -config evenkeel.yaml", 2, "a long flag has two dashes: --config", ""},
		{"a command that is misspelt", "sevre", 2, `did you mean "serve"?`, ""},
		{"a flag that is misspelt", "serve --polcy br0", 2, `did you mean "--policy"?`, ""},
		{"a policy that is misspelt", "serve --policy pjsqkv", 2, `unknown policy "pjsqkv" (did you mean "pjsq-kv"?)`, ""},
		{"a key of a policy that is misspelt", "serve --policy evenkeel:kapa=1", 2, `unknown key "kapa" (did you mean "kappa"?)`, ""},
		{"a policy of regions that is misspelt", "simulate --tier geo --policies gorgoo", 1, `unknown policy "gorgoo" (did you mean "gorgo"?)`, ""},
		{"a scenario that is misspelt", "simulate --tier geo --scenario skw", 1, `"skw" (did you mean "skew"?)`, ""},
		{"a law of a model that is misspelt", "simulate --law DeepSeekV3,vllm,H200,16", 2, `no model "DeepSeekV3" (did you mean "DeepSeek-V3"?)`, ""},
		{"a law of fewer ranks", "demo --law DeepSeek-V3,vllm,H200,4", 2, `there is no number of ranks "4" for DeepSeek-V3,vllm,H200, but 8, 16, 32, 64;`, "did you mean"},
		{"a drawn trace that is misspelt", "simulate --trace synth:lognorml", 1, `(did you mean "synth:lognormal"?)`, ""},
		{"a drawn trace that is misspelt, in lengths of prompts", "simulate --tier prefill --trace synth:mx", 1, `(did you mean "synth:mix"?)`, ""},
		{"a drawn trace without its prefix", "simulate --trace pareto", 1, `open pareto: no such file or directory (did you mean "synth:pareto"?)`, ""},
		{"a predictor that is misspelt", "simulate --predictor survivl", 1, `(did you mean "survival"?)`, ""},
		{"the engines themselves, misspelt", "simulate --tier aggregated --law gpt-oss-120b,vllm,H200,4 --policies enigne", 1, `engine and delayer (did you mean "engine"?)`, ""},
		{"the engines' delayer, misspelt", "demo --aggregated --policies delayr", 1, `delayer (did you mean "delayer"?)`, ""},
		{"a key that is misspelt, in a file", "check --config slot.yaml", 1, `engines.decode[0].slot: no such key (did you mean "slots"?)`, ""},
		{"a profile that is misspelt, in a file", "check --config profile.yaml", 1, `no profile is named "asend" (did you mean "ascend"?)`, ""},
		{"a connector that is misspelt, in a file", "check --config connector.yaml", 1, `connector is "nixl_pull" (did you mean "nixl-pull"?)`, ""},
		{"a word that is like none", "serve --policy fastest", 2, `unknown policy "fastest"; there are`, "did you mean"},
		{"tabs", "check --config tab.yaml", 1, "the line begins with a tab, and YAML is indented with spaces only", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, out, errs := evenkeel(t, dir, strings.Fields(tt.line)...)
			require.Equal(t, tt.status, status, out+errs)
			require.Contains(t, errs, tt.says)
			if tt.not != "" {
				require.NotContains(t, errs, tt.not)
			}
		})
	}
}

// A file that an editor of Windows began with a byte order mark is read.
func TestAByteOrderMarkIsNoMistake(t *testing.T) {
	status, out, errs := line("check", "--config",
		write(t, "\ufeffengines: {prefill: [{url: \"http://p:1\"}], decode: [{url: \"http://d0:1\", slots: 4}]}\n"))
	require.Equal(t, 0, status, errs)
	require.Contains(t, out, "ok, 1 prefill and 1 decode engines")
	listing := write(t, "\ufeffdecode: [{url: \"http://d0:1\", slots: 4}]\n")
	status, out, errs = line("check", "--config", write(t, "discovery: {files: ["+listing+"]}\n"))
	require.Equal(t, 0, status, errs)
	require.NotContains(t, out, "warn")
}

func TestHelpAndVersionAsOtherProgramsHaveThem(t *testing.T) {
	_, version, _ := line("version")
	for _, flag := range []string{"--version", "-V", "-v"} {
		status, out, errs := line(flag)
		require.Equal(t, 0, status, errs)
		require.Equal(t, version, out)
	}
	for words, usage := range map[string]string{"help": "Usage: evenkeel <command>", "help serve": "Usage: evenkeel serve",
		"help keys new": "Usage: evenkeel keys new"} {
		status, out, errs := line(strings.Fields(words)...)
		require.Equal(t, 0, status, errs)
		require.Contains(t, out, usage)
	}
}

// What a run could not use, or could not write, is said before the run: these
// end long before the work they ask for could.
func TestWhatCannotWorkIsSaidFirst(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	vector, err := os.ReadFile(snapshot(t))
	require.NoError(t, err)
	log := filepath.Join(dir, "log.jsonl")
	require.NoError(t, os.WriteFile(log, []byte(string(vector)+"\n"+string(vector)+"\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "words"), []byte("hello\n"), 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "evenkeel.test"), []byte("\x7fELF\x02\x01\x00\xff\n"), 0o600))
	for _, tt := range []struct {
		name, line string
		status     int
		says       string
	}{
		{"twice what can be served", "simulate --load 2 --seeds 500", 1, "--load 2 is 2 times what the ranks can serve, so the pool would only grow"},
		{"per cent", "simulate --load 90 --seeds 500", 1, "write a share up to 1, like 0.9, or closed"},
		{"too few requests", "simulate --requests 5 --seeds 500", 1, "5 requests are too few: nothing is measured before 160 of them are in the system"},
		{"a drawn trace that is none", "simulate --trace synth:none --seeds 500", 1, "--trace: there is no synthetic trace \"synth:none\" (did you mean \"synth:code\"?); there are synth:lognormal,"},
		{"a trace that is no text", "simulate --trace evenkeel.test --seeds 500", 1, "evenkeel.test:1: the file is no text"},
		{"a snapshot that is none", "decide --policy br0 --snapshot words", 1, "words: snapshot: invalid character 'h' looking for beginning of value; it must hold JSON"},
		{"a page that cannot be written", "simulate --seeds 500 --out " + file, 1, "--out: mkdir " + file + ": not a directory"},
		{"a demo that cannot be written", "demo --out " + file, 1, "--out: mkdir " + file + ": not a directory"},
		{"a fit in no folder", "fit --trace " + azure + " --kind exact --out " + dir + "/none/fit.json", 1, "--out: " + dir + "/none/fit.json cannot be written: "},
		{"a fit in place of a folder", "fit --trace " + azure + " --kind exact --out " + dir, 1, "--out: " + dir + " is a folder; name a file"},
		{"a log in place of a round", "decide --policy br0 --snapshot " + log, 1, log + " holds more than one round, as a decision log does; give one of its lines"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			status, out, errs := evenkeel(t, dir, strings.Fields(tt.line)...)
			require.Equal(t, tt.status, status, out+errs)
			require.Contains(t, errs, tt.says)
			require.Empty(t, out)
			require.NotContains(t, errs, "fitting")
		})
	}
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, left, 4, "a look at what can be written leaves nothing behind")
}

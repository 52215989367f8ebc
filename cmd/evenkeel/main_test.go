package main

import (
	"bytes"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"evenkeel/bench/lab/refengine"
	"evenkeel/dispatcher/policy"
)

// asEvenkeel makes the test binary be evenkeel itself, for tests that need a
// process to send signals to.
const asEvenkeel = "EVENKEEL_TEST_AS_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asEvenkeel) != "" {
		main()
	}
	os.Exit(m.Run())
}

// line runs a command line in this process.
func line(args ...string) (status int, out, errs string) {
	var o, e bytes.Buffer
	status = run(args, streams{&o, &e})
	return status, o.String(), e.String()
}

func TestAWrongCommandLineEndsWith2AndSaysWhereToLook(t *testing.T) {
	for _, tc := range []struct {
		name, line string
		says       []string
	}{
		{"an unknown command", "server", []string{"unexpected argument server", "evenkeel --help lists the commands"}},
		{"an unknown flag of evenkeel", "--fast", []string{"unknown flag --fast", "evenkeel --help"}},
		{"an unknown flag of a command", "serve --polcy br0", []string{"unknown flag --polcy, did you mean \"--policy\"?", "evenkeel serve --help"}},
		{"a flag without its value", "decide --policy", []string{"--policy", "evenkeel decide --help"}},
		{"a missing flag", "check", []string{"--config", "evenkeel check --help"}},
		{"a shell nobody knows", "completion tcsh", []string{"bash", "zsh", "fish", "evenkeel completion --help"}},
		{"a missing argument", "vectors", []string{"<path>", "evenkeel vectors --help"}},
		{"a word too many", "version now", []string{"unexpected argument now", "evenkeel version --help"}},
		{"a command that needs another word", "keys", []string{"new", "evenkeel keys --help"}},
		{"a number that is none", "serve --port ninety", []string{"--port", "evenkeel serve --help"}},
		{"a choice that is none", "engine --role router", []string{"--role", "prefill", "evenkeel engine --help"}},
		{"a fault nobody knows", "engine --fault {\"fault\":\"explode\"}", []string{"--fault", "no fault \"explode\"", "evenkeel engine --help"}},
		{"a fault with a key nobody knows", "engine --fault {\"fault\":\"hang\",\"ater_tokens\":1}", []string{"--fault", "ater_tokens"}},
		{"a fault that is no JSON", "engine --fault hang", []string{"--fault hang"}},
		{"an engine that cannot be", "engine --slots 0 --kv-tokens 5", []string{"KV tokens is 5", "evenkeel engine --help"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			status, out, errs := line(strings.Fields(tc.line)...)
			require.Equal(t, 2, status, errs)
			require.Empty(t, out)
			for _, want := range tc.says {
				require.Contains(t, errs, want)
			}
		})
	}
}

func TestTheHelpShowsAFaultAsTheFlagTakesIt(t *testing.T) {
	_, out, _ := line("engine", "--help")
	_, rest, ok := strings.Cut(strings.Join(strings.Fields(out), " "), "one fault rule, such as ")
	require.True(t, ok, "the help of --fault")
	rule, _, _ := strings.Cut(rest, ". The flag")
	cfg, err := (&engineCmd{Fault: []string{rule}, Role: "both", Listen: "127.0.0.1:0", DPMode: "external", Connector: "nixl-pull",
		KVEventsEncoding: "array"}).config()
	require.NoError(t, err)
	require.Len(t, cfg.Faults, 1)
}

func TestHelp(t *testing.T) {
	for _, tc := range []struct {
		command string
		says    []string
	}{
		{"", []string{"serve", "check", "demo", "decide", "vectors", "engine", "load", "keys new", "version"}},
		{"serve", append([]string{
			"--config", "--admin", "--request-log", "--log-level", "--[no-]self-test", "--host", "--port", "--prefiller-hosts=HOST ...",
			"--prefiller-ports=PORT ...",
			"--decoder-hosts=HOST ...", "--decoder-ports=PORT ...", "--aggregated-hosts=HOST ...", "--aggregated-ports=PORT ...",
			"--aggregated-data-parallel-size",
			"--max-retries", "--retry-delay", "--slots", "--connector", "SIGTERM",
		}, policy.Names()...)},
		{"init", []string{"--probe=[ROLE=]ADDR ...", "--out", "--prefiller-hosts", "--slots", "OPENAI_API_KEY"}},
		{"check", []string{"--config", "--probe", "--json"}},
		{"decide", append([]string{"--snapshot", "--policy", "--json"}, policy.Names()...)},
		{"vectors", []string{"<path>"}},
		{"engine", append([]string{"--role", "--listen", "--dp-size", "--slots", "--step-trace", "--fault", "bootstrap_port"}, refengine.FaultNames()...)},
		{"load", []string{"--url", "--trace", "--rate", "--concurrency", "--json"}},
		{"demo", append([]string{"--trace", "--requests", "--workers", "--slots", "--policies", "--out", "--json"}, policy.Names()...)},
		{"top", []string{"--admin", "--token-file", "--once", "80 columns"}},
		{"completion", []string{"bash", "zsh", "fish", "source <("}},
		{"keys", []string{"keys new"}},
		{"keys new", []string{"--name", "--trusted"}},
		{"version", []string{"Print the version"}},
	} {
		t.Run("evenkeel "+tc.command, func(t *testing.T) {
			status, out, errs := line(append(strings.Fields(tc.command), "--help")...)
			require.Equal(t, 0, status)
			require.Empty(t, errs)
			require.Contains(t, out, "Usage: evenkeel "+tc.command)
			for _, want := range tc.says {
				require.Contains(t, out, want)
			}
		})
	}
	status, out, _ := line()
	require.Equal(t, 0, status)
	require.Contains(t, out, "Usage: evenkeel <command>", "evenkeel alone says what there is")
}

// Who reads help reads sentences.
func TestHelpIsWholeSentences(t *testing.T) {
	var cli commands
	parser, err := kong.New(&cli, helpVariables())
	require.NoError(t, err)
	sentence := regexp.MustCompile(`(?s)^([A-Z]|\w+ (is|has|holds|compares) |sglang: ).*\.$`)
	n := 0
	require.NoError(t, kong.Visit(parser.Model, func(node kong.Visitable, next kong.Next) error {
		switch node := node.(type) {
		case *kong.Node:
			if node.Type == kong.CommandNode && !node.Hidden {
				require.Regexp(t, sentence, node.Help, node.FullPath())
				n++
			}
		case *kong.Flag:
			if !node.Hidden && node.Name != "help" {
				require.Regexp(t, sentence, node.Help, "--%s", node.Name)
				require.Greater(t, len(strings.Fields(node.Help)), 2, "--%s", node.Name)
				n++
			}
		}
		return next(nil)
	}))
	require.Greater(t, n, 150)
}

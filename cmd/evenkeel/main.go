// Command evenkeel is the proxy between clients and prefill and decode engines. It also has tools
// to test the proxy and to compare
// policies: reference engines, load, demo, simulator and others.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"

	"evenkeel/bench/lab/refengine"
	"evenkeel/bench/lab/trace"
	"evenkeel/bench/sim/regions"
	prefillpolicy "evenkeel/prefill/policy"
)

// commands describes the whole command line. The code of each subcommand is in a file of its own.
type commands struct {
	Serve    serveCmd    `cmd:"" help:"Run the proxy."`
	Init     initCmd     `cmd:"" help:"Write a first config file, from flags or from the answers of engines that run."`
	Check    checkCmd    `cmd:"" help:"Check a config file, and with --probe the engines that it names."`
	Survey   surveyCmd   `cmd:"" help:"Estimate what evenkeel could gain in front of engines that serve already, or measure it with --trial; it changes nothing."`
	Demo     demoCmd     `cmd:"" help:"Run reference engines, the proxy and load in one process, and compare policies."`
	Simulate simulateCmd `cmd:"" help:"Replay a trace through the simulator and compare policies, or replay a decision log."`
	Decide   decideCmd   `cmd:"" help:"Run one round of a policy on a recorded snapshot, and explain its decision."`
	Vectors  vectorsCmd  `cmd:"" help:"Run golden vectors: recorded inputs, each with the right outcome."`
	Fit      fitCmd      `cmd:"" help:"Fit a predictor to a trace or a request log; fit ttft and fit step fit the time of prefills and of steps."`
	Engine   engineCmd   `cmd:"" help:"Run a reference engine, which behaves like vLLM or SGLang but needs no GPU."`
	Load     loadCmd     `cmd:"" help:"Send load to a server, and check every stream token by token."`
	Top      topCmd      `cmd:"" help:"Show a running proxy in the terminal: ranks, pool, prefill engines and decisions."`
	Keys     keysCmd     `cmd:"" help:"Make API keys for keys_file."`
	Version  versionCmd  `cmd:"" help:"Print the version, the commit and the version of Go."`

	Completion completionCmd `cmd:"" help:"Print a script that lets a shell complete evenkeel's commands and flags."`
	Complete   completeCmd   `cmd:"" hidden:""`
	Man        manCmd        `cmd:"" hidden:""`
}

func main() {
	os.Exit(run(os.Args[1:], streams{os.Stdout, os.Stderr}))
}

// run parses and executes a command line. It returns the exit status: 0 if the work is done, 1 if
// the work failed, 2 if the command line is wrong.
func run(args []string, std streams) int {
	var cli commands
	helpPrinted := false // kong has printed a help text, and has then called the function of kong.Exit
	parser, err := kong.New(&cli,
		kong.Name("evenkeel"),
		kong.Description("evenkeel is a proxy in front of the engines of a large model. It keeps their data-parallel ranks level. `evenkeel "+
			"demo` shows this on a real trace, `evenkeel help COMMAND` explains a command, and `evenkeel --version` prints the version."),
		kong.Writers(std.out, std.err),
		kong.Exit(func(int) { helpPrinted = true }),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
		kong.ExplicitGroups([]kong.Group{
			{Key: "ascend", Title: "In place of a file, the flags of vllm-ascend's example proxy (lists are separated by spaces):"},
			{Key: "engines", Title: "Together with those flags, these tell more about the engines:"},
		}),
		helpVariables(),
	)
	if err != nil {
		fmt.Fprintln(std.err, "evenkeel:", err)
		return 2
	}
	args = expandShortForms(parser.Model.Node, args)
	ctx, err := parser.Parse(spreadLists(args, listFlags(parser.Model.Node, args)))
	if helpPrinted { // err has no meaning then
		return 0
	}
	if err != nil {
		printParseError(std.err, parser.Model.Node, args, err)
		return 2
	}
	err = ctx.Run(std)
	if err == nil {
		return 0
	}
	if errors.Is(err, errFailed) { // the command has printed the reason
		return 1
	}
	fmt.Fprintf(std.err, "evenkeel %s: %v%s\n", commandName(ctx.Command()), err, relativePathHint(err))
	if usage := (usageError{}); errors.As(err, &usage) {
		printHelpHint(std.err, ctx.Command())
		return 2
	}
	return 1
}

// printParseError prints what is wrong with a command line, and which command line shows what is
// right.
func printParseError(w io.Writer, root *kong.Node, args []string, err error) {
	fmt.Fprintf(w, "evenkeel: %v%s%s\n", err, configFlagHint(args), longFlagHint(root, args))
	var parseErr *kong.ParseError
	// If there is a command, it is valid, but something after it is wrong.
	hasCommand := errors.As(err, &parseErr) && parseErr.Context != nil && parseErr.Context.Command() != ""
	if hasCommand {
		printHelpHint(w, parseErr.Context.Command())
	} else {
		fmt.Fprintln(w, "evenkeel --help lists the commands")
	}
}

// expandShortForms returns a command line without short forms: -v becomes version, help COMMAND
// becomes COMMAND --help, and an empty line becomes --help. A line that begins with a flag of serve
// gets the command serve in front. args itself does not change.
func expandShortForms(root *kong.Node, args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "help": // evenkeel help COMMAND
		return slices.Concat(args[1:], []string{"--help"})
	case slices.Contains([]string{"--version", "-version", "-V", "-v"}, args[0]):
		return []string{"version"}
	case isServeFlag(root, args[0]): // the command line of vllm-ascend's example proxy, with only the program's name replaced
		return slices.Concat([]string{"serve"}, args)
	}
	return args
}

// configFlagHint returns a hint for a user who has named a config file without --config; empty:
// that is not the mistake.
func configFlagHint(args []string) string {
	takesConfig := len(args) == 2 && (args[0] == "serve" || args[0] == "check")
	if !takesConfig || strings.HasPrefix(args[1], "-") {
		return ""
	}
	return fmt.Sprintf("; a config file is given as --config %s", args[1])
}

// longFlagHint returns a hint for a user who has written a long flag with one dash, as Go's own
// programs allow; empty: that is not the mistake. kong reads such a word as several flags of one
// letter.
func longFlagHint(root *kong.Node, args []string) string {
	command := subcommandOf(root, args[0])
	if command == nil {
		return ""
	}
	for _, word := range args[1:] {
		name, _, _ := strings.Cut("-"+word, "=") // the flag that the user probably means
		isLong := strings.HasPrefix(name, "--") && len(name) > len("--x")
		if isLong && findFlag(command, name) != nil {
			return fmt.Sprintf("; a long flag has two dashes: %s", name)
		}
	}
	return ""
}

// isServeFlag says whether a word is a flag of serve, and not a flag of evenkeel itself.
func isServeFlag(root *kong.Node, word string) bool {
	name, _, _ := strings.Cut(word, "=")
	return strings.HasPrefix(name, "--") && findFlag(root, name) == nil && findFlag(subcommandOf(root, "serve"), name) != nil
}

// printHelpHint prints which command line shows the help of a command.
func printHelpHint(w io.Writer, command string) {
	fmt.Fprintf(w, "evenkeel %s --help lists what it takes\n", commandName(command))
}

// commandName returns the name of a command, such as "keys new", without the arguments that kong
// appends to it.
func commandName(command string) string {
	name, _, _ := strings.Cut(command, " <")
	return name
}

// helpVariables returns an option that fills in the variables of flags' help texts, such as
// ${policies}. kong.Vars could do this too, but kong looks for variables in all its Vars anew for
// each of three hundred flags: with these long lists, that is two thirds of the time until a
// command begins.
func helpVariables() kong.Option {
	values := strings.NewReplacer(
		"${policies}", policyNames(),
		"${decodepolicies}", defaultDecodePolicies,
		"${aggregatedpolicies}", defaultAggregatedPolicies,
		"${lawslots}", strconv.Itoa(lawSlots),
		"${demofactor}", strconv.Itoa(demoSpeedup),
		"${prefillpolicies}", strings.Join(prefillpolicy.Names(), ", "),
		"${faults}", strings.Join(slices.Concat(refengine.FaultNames(), refengine.BoundFaultNames(), refengine.GroupFaultNames()), ", "),
		"${synths}", strings.Join(trace.SynthNames(), ", "),
		"${geopresets}", strings.Join(regions.Presets(), ", "),
		"${geopolicies}", strings.Join(regions.Arms(), ", "),
		"${geoscenarios}", strings.Join(regions.Names(), ", "),
		"${geodefault}", defaultGeoPolicies,
		"${aggregateddemo}", aggregatedDefaults(),
	)
	return kong.PostBuild(func(k *kong.Kong) error {
		return kong.Visit(k.Model.Node, func(node kong.Visitable, next kong.Next) error {
			if flag, ok := node.(*kong.Flag); ok {
				flag.Help = values.Replace(flag.Help)
			}
			return next(nil)
		})
	})
}

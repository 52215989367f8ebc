// Command evenkeel is the stateful proxy between prefill and decode engines,
// with what judges it: reference engines, load, demo and vectors.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/alecthomas/kong"

	"evenkeel/bench/refengine"
)

// commands is the whole command line; one file a subcommand.
type commands struct {
	Serve   serveCmd   `cmd:"" help:"Run the proxy."`
	Check   checkCmd   `cmd:"" help:"Check a config file, and with --probe the engines it names."`
	Demo    demoCmd    `cmd:"" help:"Run reference engines, proxy and load in one process and compare policies."`
	Decide  decideCmd  `cmd:"" help:"Run one round of a policy on a dumped snapshot and say why."`
	Vectors vectorsCmd `cmd:"" help:"Run golden vectors."`
	Engine  engineCmd  `cmd:"" help:"Run a reference engine."`
	Load    loadCmd    `cmd:"" help:"Send load and check every stream token by token."`
	Keys    keysCmd    `cmd:"" help:"Make API keys for keys_file."`
	Version versionCmd `cmd:"" help:"Print version, commit and Go."`
}

// streams are what a subcommand writes to: results to out, progress to err.
type streams struct {
	out, err io.Writer
}

// errFailed ends with exit status 1 when everything was said already.
var errFailed = errors.New("failed")

func main() {
	os.Exit(run(os.Args[1:], streams{os.Stdout, os.Stderr}))
}

// run parses and executes a command line and returns the exit status: 1 where
// the work failed, 2 where the command line is wrong.
func run(args []string, std streams) int {
	var cli commands
	parser, err := kong.New(&cli,
		kong.Name("evenkeel"),
		kong.Description("The proxy between prefill and decode engines that keeps data-parallel ranks level. `evenkeel demo` shows it."),
		kong.Writers(std.out, std.err),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
		kong.Vars{"policies": policyNames(), "faults": strings.Join(refengine.FaultNames(), ", ")},
	)
	if err != nil {
		fmt.Fprintln(std.err, "evenkeel:", err)
		return 2
	}
	if len(args) == 0 {
		args = []string{"--help"}
	}
	ctx, err := parser.Parse(spreadLists(args, listFlags(serveCmd{})))
	if err != nil {
		fmt.Fprintf(std.err, "evenkeel: %v\n", err)
		var pe *kong.ParseError
		if errors.As(err, &pe) && pe.Context != nil && pe.Context.Command() != "" {
			fmt.Fprintf(std.err, "evenkeel %s --help lists what it takes\n", firstWord(pe.Context.Command()))
		} else {
			fmt.Fprintln(std.err, "evenkeel --help lists the commands")
		}
		return 2
	}
	err = ctx.Run(std)
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFailed):
	default:
		fmt.Fprintf(std.err, "evenkeel %s: %v\n", firstWord(ctx.Command()), err)
	}
	return 1
}

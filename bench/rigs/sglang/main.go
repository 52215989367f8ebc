// Command sglang compares answers of SGLang's own HTTP server with those that come through evenkeel
// in front of such
// servers: POST /generate and /abort_request, and LoRA adapters at each endpoint, alone and by a pair. A server is
// SGLang's own but for its model and its KV transfer (python/stub.py), so that it runs without a
// GPU; its tokens follow from the adapter and the prompt. It installs what it needs into a cache
// folder, and prints a table.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"time"

	"evenkeel/bench/rigs/asked"
	"evenkeel/bench/rigs/testbed"
)

func main() { testbed.Main("sglang", testbed.Judged(run)) }

type options struct {
	testbed.Options
	cache string
	port  int
	row   *regexp.Regexp
}

func parseFlags(args []string, out io.Writer) (o options, err error) {
	flags := o.Flags("sglang")
	flags.SetOutput(out)
	flags.StringVar(&o.cache, "cache", "", "folder for SGLang; empty: evenkeel/sglang in the user's cache folder")
	flags.IntVar(&o.port, "port", 27000, "the first of the 10 ports that are used")
	row := flags.String("row", "", "a regular expression: only the rows whose names match it run")
	if err := testbed.Parse(flags, args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("there is an argument too many: %s", flags.Arg(0))
	}
	o.row, err = regexp.Compile(*row)
	return o, err
}

// run is the command; ok says that no row failed.
func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	o, err := parseFlags(args, out)
	if err != nil {
		return false, err
	}
	env, model, err := install(ctx, o.cache, out)
	if err != nil {
		return false, err
	}
	started := time.Now()
	w, err := newSite(ctx, o, env, model)
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, w.Close(err == nil && ok)) }()
	fmt.Fprintf(out, "the servers started in %.0f s\n\n", time.Since(started).Seconds())
	fmt.Fprintf(out, "SGLang %s without a model, asked directly and through evenkeel.\n\n", version)
	failed, rows := 0, 0
	fmt.Fprintf(out, "| request | alone | alone, stream | pair | pair, stream |\n|---|---|---|---|---|\n")
	for _, s := range shapes {
		if !o.row.MatchString(s.name) || ctx.Err() != nil {
			continue
		}
		l := w.shape(ctx, s.name, s.body, s.not)
		fmt.Fprintf(out, "| %s |", l.name)
		for _, c := range l.cells {
			rows++
			if !c.same {
				failed++
				c.said = "DIFFERS: " + c.said
			}
			fmt.Fprintf(out, " %s |", asked.Cell(c.said))
		}
		fmt.Fprintln(out)
	}
	fmt.Fprintf(out, "\n| scene | | seen |\n|---|---|---|\n")
	for _, s := range scenes {
		if !o.row.MatchString(s.name) || ctx.Err() != nil {
			continue
		}
		rows++
		said, err := s.run(ctx, w)
		verdict := "pass"
		if err != nil {
			failed++
			verdict, said = "FAIL", err.Error()
		}
		fmt.Fprintf(out, "| %s | %s | %s |\n", s.name, verdict, asked.Cell(said))
	}
	if rows == 0 {
		return false, fmt.Errorf("no row is called %q", o.row)
	}
	fmt.Fprintf(out, "\n%d comparisons, %d differ.\n", rows, failed)
	return failed == 0, ctx.Err()
}

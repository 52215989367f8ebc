// Command real runs evenkeel in front of real engines: vLLM on a CPU with its NIXL
// connector, one prefill engine, two decode engines, and a plain engine that
// does both and says what an answer should be. Everything runs on this machine
// and on loopback. It installs what it needs into a cache folder, starts the
// engines that the rows need, and prints a table: pass or fail per row.
//
// It needs Python 3.11 or later with venv, a Python package index, about 9 GB
// of memory and, the first time, 8 GB of disk and some minutes. The row of the
// Node client needs node and npm.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"evenkeel/bench/rigs/pyenv"
	"evenkeel/bench/rigs/testbed"
	"evenkeel/mooncake"
)

func main() {
	testbed.Main("real",
		testbed.Page(testbed.Judged(run), []string{"-out", document}, []string{"-connector", mooncake.NIXLPush, "-out", document}))
}

const document = "docs/results/real.md"

// cacheVariable names the environment variable that moves the cache folder.
const cacheVariable = "EVENKEEL_REAL_CACHE"

// options are the command line's.
type options struct {
	testbed.Options
	cache, out string
	connector  string
	over       string // a version of vLLM; empty: what is installed
	row        *regexp.Regexp
	breaks     string // one of breaks; empty: nothing
	port       int
	record     bool
}

func parse(args []string, out io.Writer) (o options, err error) {
	flags := o.Flags("real")
	flags.SetOutput(out)
	flags.StringVar(&o.cache, "cache", os.Getenv(cacheVariable),
		"folder for vLLM, the model and the clients; empty: evenkeel/real in the user's cache folder")
	flags.StringVar(&o.out, "out", "", "the file in which the connector's table is written anew as well; rows that do not run stay in it")
	flags.IntVar(&o.port, "port", 26000, "the first of the 100 ports that are used")
	flags.BoolVar(&o.record, "record", false, "write the recordings of the engines' answers anew, that tests read, and run no row")
	flags.StringVar(&o.connector, "connector", mooncake.NIXLPull,
		"how the engines hand KV over: "+mooncake.NIXLPull+" or "+mooncake.NIXLPush+"; "+mooncake.None+": they prefill and decode")
	flags.StringVar(&o.over, "over", "",
		"a version of vLLM whose Python files are laid over the installed one, for one that has no package for CPUs yet")
	flags.StringVar(&o.breaks, "break", "",
		"what breaks between evenkeel and its decode engines, so that rows must fail: "+strings.Join(breaks, ", "))
	row := flags.String("row", "", "a regular expression: only the rows whose names match it run")
	if err := testbed.Parse(flags, args); err != nil {
		return o, err
	}
	if flags.NArg() > 0 {
		return o, fmt.Errorf("there is an argument too many: %s", flags.Arg(0))
	}
	if _, ok := connectors[o.connector]; !ok {
		return o, fmt.Errorf("-connector is %q; use %s", o.connector, strings.Join(slices.Sorted(maps.Keys(connectors)), ", "))
	}
	if o.breaks != "" && (!slices.Contains(breaks, o.breaks) || o.out != "") {
		return o, fmt.Errorf("-break is %q; use %s, and no -out, because the page is of what ships", o.breaks, strings.Join(breaks, ", "))
	}
	if o.record && o.connector != mooncake.NIXLPull {
		return o, fmt.Errorf("-record: the recordings are of %s", mooncake.NIXLPull)
	}
	if o.row, err = regexp.Compile(*row); err != nil {
		return o, fmt.Errorf("-row: %w", err)
	}
	env, err := pyenv.At(o.cache, "real")
	o.cache = env.Dir
	return o, err
}

// run is the command; ok says that no row failed.
func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	o, err := parse(args, out)
	if err != nil {
		return false, err
	}
	rows := rowsOf(o.connector)
	chosen := choose(rows, o.row)
	if len(chosen) == 0 {
		return false, fmt.Errorf("no row is called %q; these are there: %s", o.row, names(rows))
	}
	started := time.Now()
	installed, err := install(ctx, o.cache, out)
	if err != nil {
		return false, err
	}
	if o.record {
		return true, record(ctx, o, installed, out)
	}
	w, err := newSite(ctx, o, installed, out)
	if err != nil {
		return false, err
	}
	t := &table{connector: o.connector, part: len(chosen) < len(rows)}
	defer func() { err = errors.Join(err, w.Close(err == nil && !t.failed())) }()
	for i, r := range chosen {
		fmt.Fprintf(out, "%3.0f s  %d/%d  %s\n", time.Since(started).Seconds(), i+1, len(chosen), r.name)
		o := play(ctx, w, r)
		if o.verdict != pass {
			fmt.Fprintf(out, "       %s: %s\n", o.verdict, o.seen)
		}
		if ctx.Err() != nil {
			t.part = true // of a row that was interrupted nothing is known
			break
		}
		t.add(r, o)
	}
	t.took, t.version, t.command = time.Since(started), w.version, command(o)
	t.write(out)
	if t.failed() {
		fmt.Fprintf(out, "\n%s has the configs and logs.\n", w.Dir)
	}
	if o.out != "" {
		err = t.save(o.out)
	}
	return !t.failed(), errors.Join(err, ctx.Err())
}

// command is how this table is made again.
func command(o options) string {
	text := "make real"
	if o.connector == mooncake.None {
		return "make claim NAME=real-aggregated"
	}
	if o.row != nil && o.row.String() != "" {
		text += " ROW='" + o.row.String() + "'"
	}
	if o.connector != mooncake.NIXLPull {
		text += " CONNECTOR=" + o.connector
	}
	return text
}

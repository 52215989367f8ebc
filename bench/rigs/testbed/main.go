package testbed

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

// Main is a command's main: it runs until it ends, or until a signal ends its context. Its exit
// status is that of exitStatus.
func Main(name string, run func(ctx context.Context, args []string, out io.Writer) error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	os.Exit(exitStatus(name, err, os.Stderr))
}

// exitStatus returns the exit status of a command whose run returned err, and writes the error to w
// unless the run has told it already. As for evenkeel itself, the status is 2 if the flags are
// wrong (Parse refused them), and 1 after any other error.
func exitStatus(name string, err error, w io.Writer) int {
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return 0
	}
	if !errors.Is(err, errBreach) {
		fmt.Fprintln(w, name+":", err)
	}
	if wrong := (flagError{}); errors.As(err, &wrong) {
		return 2
	}
	return 1
}

// flagError is an error of the flag package: the command line is wrong.
type flagError struct{ error }

func (e flagError) Unwrap() error { return e.error }

// Parse parses a command's flags. Each command that Main runs calls it in place of the flag set's
// own Parse.
func Parse(flags *flag.FlagSet, args []string) error {
	if err := flags.Parse(args); err != nil {
		return flagError{err}
	}
	return nil
}

// Page is for Main: without arguments the command makes its whole page of docs/results. Each part
// is the arguments of one run of it.
func Page(run func(ctx context.Context, args []string, out io.Writer) error, parts ...[]string) func(context.Context, []string,
	io.Writer) error {
	return func(ctx context.Context, args []string, out io.Writer) error {
		if len(args) > 0 {
			return run(ctx, args, out)
		}
		var errs []error
		for _, part := range parts {
			if ctx.Err() == nil { // a part that found less than was claimed does not keep the others from their tables
				errs = append(errs, run(ctx, part, out))
			}
		}
		return errors.Join(errs...)
	}
}

// Parsed is for Page: each part has its arguments parsed, and is run.
func Parsed[O any](parse func(args []string) (O, error), run func(o O, ctx context.Context, out io.Writer) error,
) func(context.Context, []string, io.Writer) error {
	return func(ctx context.Context, args []string, out io.Writer) error {
		o, err := parse(args)
		if err != nil {
			return err
		}
		return run(o, ctx, out)
	}
}

var errBreach = errors.New("something was not held, as was told")

// Judged is for Main: it also exits with 1 where ok says that something was not held.
func Judged(run func(ctx context.Context, args []string, out io.Writer) (ok bool, err error)) func(context.Context, []string,
	io.Writer) error {
	return func(ctx context.Context, args []string, out io.Writer) error {
		ok, err := run(ctx, args, out)
		if err == nil && !ok {
			return errBreach
		}
		return err
	}
}

// Options are what every command that starts the program has flags for.
type Options struct {
	Bin  string // the program; empty: it is built
	Keep string // the folder of a run; empty: a temporary one
}

// Flags are a command's flags, with those of its options.
func (o *Options) Flags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.StringVar(&o.Bin, "bin", "", "the proxy to run; empty: it is built")
	flags.StringVar(&o.Keep, "keep", "", "folder for configs and logs; empty: a temporary one, kept after a breach")
	return flags
}

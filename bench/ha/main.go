// Command ha runs several real proxies, processes of their own, before the same
// engines, under clients that check every token: it kills the owner of a decode
// group, starts it again, ends another by a signal, lets one stand still until its
// groups are another's, cuts one off, and takes the store of leases away from all. It measures how long a group has no owner and
// holds what docs/ha.md promises, by the proxies' books and by what the engines
// saw. A breach is told in full and is exit code 1.
//
// The lease's store is an etcd in this process, and so are the engines.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"evenkeel/bench/process"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ok, err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "ha:", err)
	}
	if err != nil || !ok {
		os.Exit(1)
	}
}

// options are the command line's.
type options struct {
	binary, keep string
	lease, load  time.Duration
	absence      time.Duration // of the store
	clients      int           // of each proxy
}

// run is the command; ok says that nothing was breached.
func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	var o options
	flags := flag.NewFlagSet("ha", flag.ContinueOnError)
	flags.StringVar(&o.binary, "bin", "", "the proxy to run; empty: it is built")
	flags.StringVar(&o.keep, "keep", "", "folder for configs and logs; empty: a temporary one, kept after a breach")
	flags.DurationVar(&o.lease, "lease", 5*time.Second, "ha.lease, whole seconds")
	flags.DurationVar(&o.load, "load", 3*time.Second, "load before and after what a scene does")
	flags.DurationVar(&o.absence, "absence", time.Minute, "how long nobody reaches the store")
	flags.IntVar(&o.clients, "clients", 6, "of each proxy")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	r, err := play(ctx, o)
	if err != nil {
		return false, err
	}
	r.Write(out)
	return len(r.Breaches) == 0, nil
}

// play runs the scenes, one after the other.
func play(ctx context.Context, o options) (r *process.Report, err error) {
	r = &process.Report{Head: fmt.Sprintf("three proxies, two decode groups, `lease: %v`, %d clients each", o.lease, o.clients)}
	w, err := newWorld(ctx, o)
	if err != nil {
		return nil, err
	}
	r.Folder = w.dir
	defer func() { err = errors.Join(err, w.close(err == nil && len(r.Breaches) == 0 && o.keep == "")) }()
	if err := w.start(ctx); err != nil {
		return nil, err
	}
	for _, s := range scenes {
		if err := s.play(ctx, w, r); err != nil {
			return nil, fmt.Errorf("%s: %w; %s has the logs", s.name, err, w.dir)
		}
	}
	return r, nil
}

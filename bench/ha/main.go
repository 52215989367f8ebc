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
	"fmt"
	"io"
	"time"

	"evenkeel/bench/world"
)

func main() { world.Main("ha", world.Judged(run)) }

// options are the command line's.
type options struct {
	world.Options
	lease, load time.Duration
	absence     time.Duration // of the store
	clients     int           // of each proxy
}

// run is the command; ok says that nothing was breached.
func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	var o options
	flags := o.Flags("ha")
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

// play runs the scenes.
func play(ctx context.Context, o options) (r *world.Report, err error) {
	w := &site{options: o}
	if w.World, err = world.New(ctx, "ha", o.Options); err != nil {
		return nil, err
	}
	r = &world.Report{Head: fmt.Sprintf("three proxies, two decode groups, `lease: %v`, %d clients each", o.lease, o.clients), Folder: w.Dir}
	defer func() { err = errors.Join(err, w.Close(err == nil && len(r.Breaches) == 0)) }()
	if err := w.build(); err != nil {
		return r, err
	}
	if err := w.start(ctx); err != nil {
		return r, err
	}
	return r, world.Play(ctx, w, r, scenes)
}

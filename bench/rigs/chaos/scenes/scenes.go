// Package scenes plays what may happen to three proxies that share their work, as
// processes of their own and under clients that check every token: to the owners of
// decode groups (HA), and to regions that forward to each other (Regions).
package scenes

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"time"

	"evenkeel/bench/rigs/testbed"
)

// options are the command lines'.
type options struct {
	testbed.Options
	load    time.Duration // of each scene, or before and after what it does
	absence time.Duration // of the store of leases

	lease   time.Duration // of decode groups
	clients int           // of each of their proxies

	on        string           // what the links of regions are made of
	delays    [3]time.Duration // one way: between us and eu, us and as, eu and as
	loss      float64
	count     int           // requests that are measured, each way
	deadAfter time.Duration // where regions are owned by order
}

var (
	ofHA      = options{lease: 5 * time.Second, load: 3 * time.Second, absence: time.Minute, clients: 6, on: onLoopback}
	ofRegions = options{
		on: "auto", delays: [3]time.Duration{10 * time.Millisecond, 25 * time.Millisecond, 40 * time.Millisecond}, loss: 0.01,
		load: 6 * time.Second, count: 60,
		deadAfter: 5 * time.Second, absence: time.Minute,
	}
)

// kind is what the proxies are to each other.
type kind struct {
	head     func(w *site) string // of the report
	names    [sides]string
	leases   bool                                           // there is a store for them
	build    func(w *site) error                            // makes the engines
	settings func(w *site, p *side) (geo, rest string)      // what a proxy's config has besides the lines of all
	settled  func(ctx context.Context, w *site) (err error) // waits until the proxies have what they should have
	scenes   []testbed.Scene[*site]
}

// common are the flags of both commands.
func (o *options) common(name string) *flag.FlagSet {
	flags := o.Flags(name)
	flags.DurationVar(&o.load, "load", o.load, "how long each scene is under load; in ha before and after what it does")
	flags.DurationVar(&o.absence, "absence", o.absence, "how long nobody reaches the store of leases")
	return flags
}

// HA is the command ha; ok says that nothing was breached.
func HA(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	o := ofHA
	flags := o.common("ha")
	flags.DurationVar(&o.lease, "lease", o.lease, "ha.lease, whole seconds")
	flags.IntVar(&o.clients, "clients", o.clients, "of each proxy")
	if err := testbed.Parse(flags, args); err != nil {
		return false, err
	}
	r, err := play(ctx, o, shard)
	return told(out, r, err)
}

// Regions is the command regions, likewise.
func Regions(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	o := ofRegions
	flags := o.common("regions")
	flags.StringVar(&o.on, "on", o.on, "netns: network namespaces; loopback: TCP relays; auto: the first that this machine permits")
	flags.DurationVar(&o.delays[0], "us-eu", o.delays[0], "delay one way between us and eu")
	flags.DurationVar(&o.delays[1], "us-as", o.delays[1], "between us and as")
	flags.DurationVar(&o.delays[2], "eu-as", o.delays[2], "between eu and as")
	flags.Float64Var(&o.loss, "loss", o.loss, "share of packets lost in the scene with loss")
	flags.IntVar(&o.count, "count", o.count, "requests whose first tokens are measured, each way")
	if err := testbed.Parse(flags, args); err != nil {
		return false, err
	}
	if !slices.Contains([]string{"auto", "netns", onLoopback}, o.on) {
		return false, fmt.Errorf("-on %s: it is auto, netns or loopback", o.on)
	}
	r, err := play(ctx, o, ordered)
	if err != nil {
		return false, err
	}
	o.on = onLoopback // all proxies reach the store that this process runs
	byLease, err := play(ctx, o, leased)
	r.Join("by lease: ", byLease)
	return told(out, r, err)
}

func told(out io.Writer, r *testbed.Report, err error) (ok bool, _ error) {
	if err != nil {
		return false, err
	}
	r.Write(out)
	return len(r.Breaches) == 0, nil
}

// play plays a kind's scenes, one after the other.
func play(ctx context.Context, o options, k kind) (r *testbed.Report, err error) {
	r = &testbed.Report{}
	g, err := newGround(o, r)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	w := &site{options: o, ground: g, kind: k}
	if w.World, err = testbed.New(ctx, "scenes", o.Options); err != nil {
		return r, err
	}
	r.Head, r.Folder = k.head(w), w.Dir
	defer func() { err = errors.Join(err, w.Close(err == nil && len(r.Breaches) == 0)) }()
	if err := w.start(ctx); err != nil {
		return r, err
	}
	return r, testbed.Play(ctx, w, r, k.scenes)
}

// Command regions runs three real proxies, processes of their own with engines
// of their own, that forward to each other over links with delay, and in
// network namespaces with loss: it holds that forwarded answers are those of
// the region itself, byte for byte, measures what forwarding adds to the first
// token, kills a region and cuts a link under load, and brings both back. A
// breach is told in full and is exit code 1.
//
// Namespaces need Linux, root and iproute2; delay and loss are netem's, and
// where the kernel has none the packets pass through this process, by TUN
// devices. Without all that the links are TCP relays on loopback.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"evenkeel/bench/world"
)

func main() { world.Main("regions", world.Judged(run)) }

// options are the command line's.
type options struct {
	world.Options
	on     string           // what the links are made of
	delays [3]time.Duration // one way: between us and eu, us and as, eu and as
	loss   float64
	load   time.Duration // of each scene under load
	count  int           // requests that are measured, each way

	deadAfter time.Duration // ownership by order
	lease     string        // where the etcd of ownership by lease listens; empty: by order
	absence   time.Duration // of that etcd
}

var defaults = options{
	on: "auto", delays: [3]time.Duration{10 * time.Millisecond, 25 * time.Millisecond, 40 * time.Millisecond}, loss: 0.01, load: 6 * time.Second, count: 60,
	deadAfter: 5 * time.Second, absence: time.Minute,
}

// run is the command; ok says that nothing was breached.
func run(ctx context.Context, args []string, out io.Writer) (ok bool, err error) {
	o := defaults
	flags := o.Flags("regions")
	flags.StringVar(&o.on, "on", o.on, "netns: network namespaces; loopback: TCP relays; auto: the first that this machine permits")
	flags.DurationVar(&o.delays[0], "us-eu", o.delays[0], "delay one way between us and eu")
	flags.DurationVar(&o.delays[1], "us-as", o.delays[1], "between us and as")
	flags.DurationVar(&o.delays[2], "eu-as", o.delays[2], "between eu and as")
	flags.Float64Var(&o.loss, "loss", o.loss, "share of packets lost in the scene with loss")
	flags.DurationVar(&o.load, "load", o.load, "how long each scene is under load")
	flags.IntVar(&o.count, "count", o.count, "requests whose first tokens are measured, each way")
	flags.DurationVar(&o.absence, "absence", o.absence, "how long nobody reaches the store of leases")
	if err := flags.Parse(args); err != nil {
		return false, err
	}
	if !slices.Contains([]string{"auto", "netns", "loopback"}, o.on) {
		return false, fmt.Errorf("-on %s: it is auto, netns or loopback", o.on)
	}
	r, err := play(ctx, o, scenes)
	if err != nil {
		return false, err
	}
	leased, err := playLeased(ctx, o)
	if err != nil {
		return false, err
	}
	r.Join("by lease: ", leased)
	r.Write(out)
	return len(r.Breaches) == 0, nil
}

// errForbidden is why this machine has no namespaces for us.
var errForbidden = errors.New("no network namespaces here")

// newGround makes what the regions stand on.
func newGround(o options, r *world.Report) (ground, error) {
	if o.on != "loopback" {
		g, err := newNamespaces(o)
		if err == nil {
			return g, nil
		}
		if o.on == "netns" || !errors.Is(err, errForbidden) {
			return nil, err
		}
		r.Skip("namespaces", err.Error())
	}
	return newLoopback(o)
}

// play runs scenes, one after the other.
func play(ctx context.Context, o options, scenes []world.Scene[*site]) (r *world.Report, err error) {
	r = &world.Report{}
	g, err := newGround(o, r)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, g.close()) }()
	w := &site{options: o, ground: g}
	if w.World, err = world.New(ctx, "regions", o.Options); err != nil {
		return nil, err
	}
	r.Head, r.Folder = "three regions on "+g.words(), w.Dir
	defer func() { err = errors.Join(err, w.Close(err == nil && len(r.Breaches) == 0)) }()
	if err := w.build(); err != nil {
		return r, err
	}
	if err := w.start(ctx); err != nil {
		return r, err
	}
	return r, world.Play(ctx, w, r, scenes)
}

package scenes

import (
	"errors"
	"fmt"
	"os/exec"

	"evenkeel/bench/rigs/testbed"
)

// The proxies, by the names of regions.
const (
	us = iota
	eu
	as
	sides
)

var names = [sides]string{"us", "eu", "as"}

// link numbers the pairs: us-eu, us-as, eu-as.
func link(a, b int) int { return a + b - 1 }

// ground is what the proxies stand on: where their processes run and listen, and
// the links between them.
type ground interface {
	words() string
	place(region int) place
	// command is to run in a region.
	command(region int, binary string, args ...string) *exec.Cmd
	// peer is where one region reaches the listener of another for peers.
	peer(from, to int) string
	// packets says that links carry packets, which can be lost, and that what
	// they delay is told from what this process does.
	packets() bool
	// lose makes every link lose a share of them.
	lose(share float64)
	// cut lets nothing pass between two of them, until it is healed.
	cut(a, b int, cut bool)
	close() error
}

// place is where a region's processes listen, host and port each, as its own
// processes and this one reach them.
type place struct{ clients, admin, peers, prefill, decode string }

const onLoopback = "loopback"

// errForbidden is why this machine has no namespaces for us.
var errForbidden = errors.New("no network namespaces here")

// newGround makes what the proxies stand on.
func newGround(o options, r *testbed.Report) (ground, error) {
	if o.on != onLoopback {
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

// loopback has all sides on one address, and a TCP relay for each direction
// in which one asks another.
type loopback struct {
	places [sides]place
	relays [sides][sides]*testbed.Relay
}

func newLoopback(o options) (_ *loopback, err error) {
	l := &loopback{}
	free := testbed.FreeAddresses(5 * sides)
	for i := range l.places {
		at := free[5*i:]
		l.places[i] = place{clients: at[0], admin: at[1], peers: at[2], prefill: at[3], decode: at[4]}
	}
	for a := range sides {
		for b := range sides {
			if a != b && err == nil {
				l.relays[a][b], err = testbed.NewRelay(l.places[b].peers, o.delays[link(a, b)])
			}
		}
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("loopback: %w", err), l.close())
	}
	return l, nil
}

func (l *loopback) words() string          { return "TCP relays on loopback" }
func (l *loopback) place(region int) place { return l.places[region] }
func (l *loopback) command(_ int, binary string, args ...string) *exec.Cmd {
	return exec.Command(binary, args...)
}
func (l *loopback) peer(from, to int) string { return l.relays[from][to].Address() }
func (l *loopback) packets() bool            { return false }
func (l *loopback) lose(float64)             {} // TCP hides it

func (l *loopback) cut(a, b int, cut bool) {
	l.relays[a][b].Hold(cut)
	l.relays[b][a].Hold(cut)
}

func (l *loopback) close() error {
	for _, row := range l.relays {
		for _, r := range row {
			if r != nil {
				r.Close()
			}
		}
	}
	return nil
}

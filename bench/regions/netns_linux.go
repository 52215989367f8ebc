package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// namespaces has each region in a network namespace with one address of its
// own. This process reaches all of them without delay; two regions reach each
// other over their link alone.
type namespaces struct {
	id     int
	delays [3]time.Duration
	wires  [3]*wire // nil: netem
	loss   float64
	severs [3]bool
}

// newNamespaces needs root and iproute2. What it made is gone after an error.
func newNamespaces(o options) (*namespaces, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%w: they need root", errForbidden)
	}
	for _, tool := range []string{"ip", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			return nil, fmt.Errorf("%w: there is no %s; install iproute2", errForbidden, tool)
		}
	}
	n := &namespaces{id: os.Getpid(), delays: o.delays}
	err := n.build()
	if err == nil {
		return n, nil
	}
	return nil, errors.Join(fmt.Errorf("%w: %w", errForbidden, err), n.close())
}

func (n *namespaces) build() error {
	for i := range regions {
		ns, dev := n.namespace(i), n.device(i)
		err := each(
			"ip netns add "+ns,
			"ip -n "+ns+" link set lo up",
			"ip -n "+ns+" addr add "+n.address(i)+"/32 dev lo",
			"ip link add "+dev+" type veth peer name out netns "+ns,
			"ip addr add "+n.own()+"/32 dev "+dev,
			"ip link set "+dev+" up",
			"ip -n "+ns+" link set out up",
			"ip route add "+n.address(i)+"/32 dev "+dev+" src "+n.own(),
			"ip -n "+ns+" route add "+n.own()+"/32 dev out src "+n.address(i),
		)
		if err != nil {
			return err
		}
	}
	for l, end := range ends {
		if err := n.connect(l, end[0], end[1]); err != nil {
			return err
		}
		for _, to := range [2][2]int{{end[0], end[1]}, {end[1], end[0]}} {
			err := each(
				"ip -n "+n.namespace(to[0])+" link set to-"+names[to[1]]+" up",
				"ip -n "+n.namespace(to[0])+" route add "+n.address(to[1])+"/32 dev to-"+names[to[1]]+" src "+n.address(to[0]),
			)
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// connect makes a link: two ends of a cable with netem on both, or, where the
// kernel has none, two TUN devices and this process between them.
func (n *namespaces) connect(l, a, b int) error {
	err := each("ip -n " + n.namespace(a) + " link add to-" + names[b] + " type veth peer name to-" + names[a] + " netns " + n.namespace(b))
	if err != nil {
		return err
	}
	if err = n.shape(l); err == nil {
		return nil
	}
	if e := each("ip -n " + n.namespace(a) + " link del to-" + names[b]); e != nil {
		return e
	}
	w, e := newWire(fmt.Sprintf("ek%d-%d-", n.id, l), n.delays[l])
	if e != nil {
		return fmt.Errorf("neither netem (%w) nor TUN devices: %w", err, e)
	}
	n.wires[l] = w
	return each(
		"ip link set "+w.names[0]+" netns "+n.namespace(a)+" name to-"+names[b],
		"ip link set "+w.names[1]+" netns "+n.namespace(b)+" name to-"+names[a],
	)
}

// shape makes a link delay and lose as it should now.
func (n *namespaces) shape(l int) error {
	loss := n.loss
	if n.severs[l] {
		loss = 1
	}
	if w := n.wires[l]; w != nil {
		w.lose(loss)
		return nil
	}
	for _, to := range [2][2]int{ends[l], {ends[l][1], ends[l][0]}} {
		rule := fmt.Sprintf("tc -n %s qdisc replace dev to-%s root netem limit 20000 delay %dus", n.namespace(to[0]), names[to[1]], n.delays[l].Microseconds())
		if loss > 0 {
			rule += fmt.Sprintf(" loss %g%%", 100*loss)
		}
		if err := each(rule); err != nil {
			return err
		}
	}
	return nil
}

func (n *namespaces) words() string {
	if n.wires[0] != nil {
		return "network namespaces, packets delayed and lost between TUN devices (this kernel has no netem)"
	}
	return "network namespaces, delay and loss by netem"
}

func (n *namespaces) namespace(region int) string { return fmt.Sprintf("ek%d-%s", n.id, names[region]) }
func (n *namespaces) device(region int) string    { return fmt.Sprintf("ek%d-%s", n.id, names[region]) }

// address is a region's: of the block that is for benchmarks (RFC 2544), four a
// run so that two runs do not meet.
func (n *namespaces) address(region int) string {
	return fmt.Sprintf("198.18.%d.%d", n.id/60%250, 4*(n.id%60)+region+1)
}
func (n *namespaces) own() string { return fmt.Sprintf("198.18.%d.%d", n.id/60%250, 4*(n.id%60)+4) }

func (n *namespaces) place(region int) place {
	at := n.address(region)
	return place{at + ":8000", at + ":9090", at + ":9443", at + ":8100", at + ":8200"}
}

func (n *namespaces) command(region int, binary string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", n.namespace(region), binary}, args...)...) // it becomes the binary
}

func (n *namespaces) peer(_, to int) string { return n.place(to).peers }

func (n *namespaces) packets() bool { return true }

func (n *namespaces) lose(share float64) error {
	n.loss = share
	return errors.Join(n.shape(0), n.shape(1), n.shape(2))
}

func (n *namespaces) cut(a, b int, cut bool) error {
	n.severs[link(a, b)] = cut
	return n.shape(link(a, b))
}

// close removes what was made. The links go with the namespaces.
func (n *namespaces) close() error {
	for _, w := range n.wires {
		if w != nil {
			w.close()
		}
	}
	var errs []error
	for i := range regions {
		if _, err := os.Stat("/var/run/netns/" + n.namespace(i)); err == nil {
			errs = append(errs, each("ip netns del "+n.namespace(i)))
		}
		if _, err := os.Stat("/sys/class/net/" + n.device(i)); err == nil {
			_ = each("ip link del " + n.device(i)) // the kernel may have been faster
		}
	}
	return errors.Join(errs...)
}

// each runs commands until one fails.
func each(commands ...string) error {
	for _, c := range commands {
		words := strings.Fields(c)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", c, err, strings.TrimSpace(string(out)))
		}
	}
	return nil
}

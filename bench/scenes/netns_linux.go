package scenes

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
	wires  [3]*wire
}

// newNamespaces needs root and iproute2. What it made is gone after an error.
func newNamespaces(o options) (*namespaces, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%w: they need root", errForbidden)
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return nil, fmt.Errorf("%w: there is no ip; install iproute2", errForbidden)
	}
	n := &namespaces{id: os.Getpid(), delays: o.delays}
	err := n.build()
	if err == nil {
		return n, nil
	}
	return nil, errors.Join(fmt.Errorf("%w: %w", errForbidden, err), n.close())
}

func (n *namespaces) build() error {
	for i := range sides {
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
	for l, end := range ends { // a link is two TUN devices and this process between them
		w, err := newWire(fmt.Sprintf("ek%d-%d-", n.id, l), n.delays[l])
		if err != nil {
			return err
		}
		n.wires[l] = w
		for i, at := range end {
			ns, to := n.namespace(at), end[1-i]
			err := each(
				"ip link set "+w.names[i]+" netns "+ns+" name to-"+names[to],
				"ip -n "+ns+" link set to-"+names[to]+" up",
				"ip -n "+ns+" route add "+n.address(to)+"/32 dev to-"+names[to]+" src "+n.address(at),
			)
			if err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *namespaces) words() string {
	return "network namespaces, packets delayed and lost between TUN devices"
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

func (n *namespaces) lose(share float64) {
	for _, w := range n.wires {
		w.lose(share)
	}
}

func (n *namespaces) cut(a, b int, cut bool) {
	n.wires[link(a, b)].lose(map[bool]float64{true: 1}[cut])
}

// close removes what was made. The links go with the namespaces.
func (n *namespaces) close() error {
	for _, w := range n.wires {
		if w != nil {
			w.close()
		}
	}
	var errs []error
	for i := range sides {
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

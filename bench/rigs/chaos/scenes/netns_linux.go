package scenes

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"
)

// namespaces has each region in a network namespace with one address of its own, and
// this process as the router between them: each namespace has one TUN device, and so
// has the machine. This process reaches all of them without delay; two regions reach
// each other over their link alone.
type namespaces struct {
	id int
	*router
}

// newNamespaces needs root and iproute2. What it made is gone after an error.
func newNamespaces(o options) (*namespaces, error) {
	if os.Geteuid() != 0 {
		return nil, fmt.Errorf("%w: they need root", errForbidden)
	}
	if _, err := exec.LookPath("ip"); err != nil {
		return nil, fmt.Errorf("%w: there is no ip; install iproute2", errForbidden)
	}
	n := &namespaces{id: os.Getpid()}
	err := n.build(o.delays)
	if err == nil {
		return n, nil
	}
	return nil, errors.Join(fmt.Errorf("%w: %w", errForbidden, err), n.close())
}

func (n *namespaces) build(delays [3]time.Duration) (err error) {
	if n.router, err = newRouter(n.name, delays); err != nil {
		return err
	}
	for i := range sides + 1 {
		name, in := n.name(i), "ip"
		if i < sides {
			in = "ip -n " + name
			err = each("ip netns add "+name, "ip link set "+name+" netns "+name, in+" link set lo up")
		}
		if err == nil {
			err = each(in+" addr add "+n.address(i)+"/29 dev "+name, in+" link set "+name+" up")
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (n *namespaces) words() string {
	return "network namespaces, packets delayed and lost between TUN devices"
}

// name is that of a region's namespace and of the device in it, or of the machine's device.
func (n *namespaces) name(i int) string { return fmt.Sprintf("ek%d-%d", n.id, i) }

// address is a region's, or the machine's: of the block that is for benchmarks
// (RFC 2544), eight a run so that two runs do not meet.
func (n *namespaces) address(i int) string {
	return fmt.Sprintf("198.18.%d.%d", n.id/30%250, 8*(n.id%30)+i+1)
}

func (n *namespaces) place(region int) place {
	at := n.address(region)
	return place{clients: at + ":8000", admin: at + ":9090", peers: at + ":9443", prefill: at + ":8100", decode: at + ":8200"}
}

func (n *namespaces) command(region int, binary string, args ...string) *exec.Cmd {
	return exec.Command("ip", append([]string{"netns", "exec", n.name(region), binary}, args...)...) // it becomes the binary
}

func (n *namespaces) peer(_, to int) string { return n.place(to).peers }

func (n *namespaces) packets() bool { return true }

func (n *namespaces) lose(share float64) {
	for i := range n.links {
		n.links[i].lose(share)
	}
}

func (n *namespaces) cut(a, b int, cut bool) {
	n.links[link(a, b)].lose(map[bool]float64{true: 1}[cut])
}

// close removes what was made. The devices go with the router.
func (n *namespaces) close() error {
	n.router.close()
	var errs []error
	for i := range sides {
		if _, err := os.Stat("/var/run/netns/" + n.name(i)); err == nil {
			errs = append(errs, each("ip netns del "+n.name(i)))
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

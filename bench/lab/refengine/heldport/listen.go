package heldport

import (
	"fmt"
	"net"
	"strconv"
)

// From returns n addresses with one port after the other; port 0 stays 0. Without
// an address it returns none.
func From(address string, n int, what string) (addrs []string, err error) {
	if address == "" {
		return nil, nil
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("refengine: %s: %w", what, err)
	}
	first, err := net.LookupPort("tcp", port)
	if err != nil {
		return nil, fmt.Errorf("refengine: %s %q: %w", what, address, err)
	}
	for i := range n {
		p := first
		if p != 0 {
			p += i
		}
		addrs = append(addrs, net.JoinHostPort(host, strconv.Itoa(p)))
	}
	return addrs, nil
}

// Listen listens at addresses, and replaces each port 0 by the real port. After an error it
// returns the listeners before the one that failed.
func Listen(addrs []string) (list []net.Listener, err error) {
	for i, addr := range addrs {
		ln, err := net.Listen("tcp", addr)
		if err != nil {
			return list, err
		}
		list = append(list, ln)
		addrs[i] = ln.Addr().String()
	}
	return list, nil
}

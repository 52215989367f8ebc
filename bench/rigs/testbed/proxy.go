package testbed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
)

// Proxy is evenkeel as operators run it: a process, its config file, its listeners.
type Proxy struct {
	Name           string
	Clients, Peers string // addresses of these listeners
	Admin
	*Process                                               // nil before its first start
	Command  func(binary string, args ...string) *exec.Cmd // that starts it
	world    *World
}

// Proxies names some, at addresses that nobody listens on.
func (w *World) Proxies(names ...string) (list []*Proxy) {
	free := FreeAddresses(3 * len(names))
	for i, name := range names {
		list = append(list, w.ProxyAt(name, free[3*i], w.At(free[3*i+1]), free[3*i+2]))
	}
	return list
}

// ProxyAt names one whose listeners are at these addresses.
func (w *World) ProxyAt(name, clients string, admin Admin, peers string) *Proxy {
	return &Proxy{Name: name, Clients: clients, Admin: admin, Peers: peers, Command: exec.Command, world: w}
}

// URL is where clients ask.
func (p *Proxy) URL() string { return "http://" + p.Clients }

// Config is the name of the config file.
func (p *Proxy) Config() string { return p.Name + ".yaml" }

// Serve starts the proxy, for the first time or again, with more flags.
func (p *Proxy) Serve(flags ...string) (err error) {
	args := append([]string{"serve", "--config", p.world.File(p.Config())}, flags...)
	p.Process, err = p.world.Start(p.Name, p.Command(p.world.Binary, args...))
	return err
}

// ServeWith writes the config file, starts the proxy and waits until it is ready.
func (p *Proxy) ServeWith(ctx context.Context, config string, flags ...string) error {
	if err := p.world.Write(p.Config(), config); err != nil {
		return err
	}
	if err := p.Serve(flags...); err != nil {
		return err
	}
	return p.Ready(ctx)
}

// Ready waits until the proxy is ready.
func (p *Proxy) Ready(ctx context.Context) error {
	if err := p.Answers(ctx, patience, "http://"+p.Address+"/readyz"); err != nil {
		said, _ := os.ReadFile(p.world.File(p.Name + ".log")) // without it the error says enough
		return fmt.Errorf("%w: %s", err, said)
	}
	return nil
}

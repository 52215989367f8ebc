package engine

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
)

// Moved says that the name of an engine has other addresses than before. Its zero value says that it has not.
type Moved struct {
	From string    `json:"from"` // the addresses, separated by commas
	To   string    `json:"to"`
	At   time.Time `json:"at"` // when the change was seen
}

// lookupTimeout is how long it may take to look up a name.
const lookupTimeout = time.Second

// locate looks up the addresses of the engine's name, before the engine is checked over a new connection. If the last
// look-up gave none of these addresses, the kept-alive connections lead to a host that the name no longer means, so they
// are closed.
func (w *watch) locate(ctx context.Context) {
	c, host := w.m.cfg.Client, w.in.Target.URL.Hostname()
	if _, err := netip.ParseAddr(host); err == nil || c.opts.Lookup == nil { // it is an address, or names are not looked up
		return
	}
	ctx, stop := context.WithTimeout(ctx, min(lookupTimeout, w.m.cfg.Timeout))
	defer stop()
	found, err := c.opts.Lookup(ctx, host)
	if err != nil || len(found) == 0 { // if the failure lasts, new connections fail, too
		return
	}
	slices.SortFunc(found, netip.Addr.Compare)
	before := w.addrs
	w.addrs = found
	if len(before) == 0 || slices.ContainsFunc(found, func(a netip.Addr) bool { return slices.Contains(before, a) }) {
		return
	}
	w.unproven = true // until a new connection is answered
	c.idle.drop(w.in.Target.key())
	moved := Moved{From: list(before), To: list(found), At: time.Now()}
	w.m.cfg.Log.Warn("the name of an engine has another address now; it is up only while new connections to that address are answered",
		zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.String("from", moved.From), zap.String("to", moved.To))
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.moved = moved // it is published with the result of the check, because facts read before say nothing about the new host
}

// elsewhere adds to the reason why an engine does not answer that its name has another address, if no new connection
// was answered there yet. It needs m.mu.
func (w *watch) elsewhere(err error) error {
	if m := w.moved; w.unproven {
		return fmt.Errorf("%w; its name has another address now, %s instead of %s, which was seen at %s", err, m.To, m.From,
			m.At.UTC().Format(time.RFC3339))
	}
	return err
}

// list writes addresses in one line, separated by commas.
func list(all []netip.Addr) string {
	words := make([]string, len(all))
	for i, a := range all {
		words[i] = a.Unmap().String()
	}
	return strings.Join(words, ",")
}

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

// Moved says that the name of an engine has other addresses than before; its zero value, that it has not changed.
type Moved struct {
	From string    `json:"from"` // addresses, with commas between them
	To   string    `json:"to"`
	At   time.Time `json:"at"` // when that was seen
}

// lookup is the most that it may take to look a name up.
const lookup = time.Second

// locate looks up where the engine's name leads, before a check over a new connection. If none of the addresses is one of
// before, connections that were kept alive lead to another host, and are closed.
func (w *watch) locate(ctx context.Context) {
	c, host := w.m.cfg.Client, w.in.Target.URL.Hostname()
	if _, err := netip.ParseAddr(host); err == nil || c.opts.Lookup == nil {
		return
	}
	ctx, stop := context.WithTimeout(ctx, min(lookup, w.m.cfg.Timeout))
	defer stop()
	now, err := c.opts.Lookup(ctx, host)
	if err != nil || len(now) == 0 { // if it lasts, no new connection is made either
		return
	}
	slices.SortFunc(now, netip.Addr.Compare)
	before := w.addrs
	w.addrs = now
	if len(before) == 0 || slices.ContainsFunc(now, func(a netip.Addr) bool { return slices.Contains(before, a) }) {
		return
	}
	w.unproven = true
	c.idle.drop(w.in.Target.key())
	moved := Moved{From: list(before), To: list(now), At: time.Now()}
	w.m.cfg.Log.Warn("the name of an engine has another address now; it is up only while new connections to that address are answered",
		zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.String("from", moved.From), zap.String("to", moved.To))
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	w.moved = moved // it is told with what the check finds: facts of before say nothing of this host
}

// elsewhere adds to why an engine does not answer that its name has another address, where it never answered. It needs m.mu.
func (w *watch) elsewhere(err error) error {
	if m := w.moved; w.unproven {
		return fmt.Errorf("%w; its name has another address now, %s instead of %s, which was seen at %s", err, m.To, m.From,
			m.At.UTC().Format(time.RFC3339))
	}
	return err
}

func list(all []netip.Addr) string {
	words := make([]string, len(all))
	for i, a := range all {
		words[i] = a.Unmap().String()
	}
	return strings.Join(words, ",")
}

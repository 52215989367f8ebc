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

// Moved says that the name of an engine resolves to other addresses than before; the zero value: no change was seen.
type Moved struct {
	From string    `json:"from"` // the old addresses, separated by commas
	To   string    `json:"to"`
	At   time.Time `json:"at"` // when a look-up first showed the change
}

// lookupTimeout bounds one look-up of an engine's name, so that a slow resolver does not delay health checks for long.
const lookupTimeout = time.Second

// checkAddress looks up the addresses of the engine's name, before the engine is checked over a new
// connection. If the engine has moved, idle connections lead to the old host, and are closed.
func (w *watch) checkAddress(ctx context.Context, f *facts) {
	c, host := w.m.cfg.Client, w.in.Target.URL.Hostname()
	if _, err := netip.ParseAddr(host); err == nil || c.opts.Lookup == nil { // host is an address already, or names are not looked up
		return
	}
	ctx, stop := context.WithTimeout(ctx, min(lookupTimeout, w.m.cfg.Timeout))
	defer stop()
	found, err := c.opts.Lookup(ctx, host)
	if err != nil || len(found) == 0 { // ignored: if the failure lasts, new connections fail, too
		return
	}
	if f.resolve(found, time.Now()) {
		c.idle.closeHost(w.in.Target.key())
		w.log.Warn("the name of an engine has another address now; it is up only while new connections to that address are answered",
			zap.String("role", w.in.Role), zap.String("from", f.moved.From), zap.String("to", f.moved.To))
	}
}

// resolve records to which addresses the engine's name resolves. The engine has moved if none of
// them was among those of the previous look-up; else the old host may still have the name.
func (f *facts) resolve(found []netip.Addr, now time.Time) (moved bool) {
	slices.SortFunc(found, netip.Addr.Compare)
	before := f.addrs
	f.addrs = found
	if len(before) == 0 || slices.ContainsFunc(found, func(a netip.Addr) bool { return slices.Contains(before, a) }) {
		return false
	}
	f.moved, f.unproven = Moved{From: joinAddresses(before), To: joinAddresses(found), At: now}, true
	return true
}

// addMoveNote adds to err that the engine's name has another address, if the engine has not
// answered at the new address yet.
func (f *facts) addMoveNote(err error) error {
	if !f.unproven {
		return err
	}
	return fmt.Errorf("%w; its name has another address now, %s instead of %s, which was seen at %s", err, f.moved.To, f.moved.From,
		f.moved.At.UTC().Format(time.RFC3339))
}

// joinAddresses returns the addresses as text, separated by commas.
func joinAddresses(all []netip.Addr) string {
	texts := make([]string, len(all))
	for i, a := range all {
		texts[i] = a.Unmap().String()
	}
	return strings.Join(texts, ",")
}

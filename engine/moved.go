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

// checkAddress looks up the addresses of the engine's name, before the engine is checked over a new connection. If none of them
// was among the addresses of the previous look-up, the engine has moved. checkAddress then closes the idle connections, because they lead
// to the old host.
func (w *watch) checkAddress(ctx context.Context) {
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
	slices.SortFunc(found, netip.Addr.Compare)
	before := w.addrs
	w.addrs = found
	overlap := slices.ContainsFunc(found, func(a netip.Addr) bool { return slices.Contains(before, a) })
	if len(before) == 0 || overlap { // the first look-up, or the old host may still have the name
		return
	}
	w.addressUnproven = true // stays true until the engine answers over a new connection
	c.idle.closeHost(w.in.Target.key())
	moved := Moved{From: joinAddresses(before), To: joinAddresses(found), At: time.Now()}
	w.m.cfg.Log.Warn("the name of an engine has another address now; it is up only while new connections to that address are answered",
		zap.String("engine", w.in.ID), zap.String("role", w.in.Role), zap.String("from", moved.From), zap.String("to", moved.To))
	w.m.mu.Lock()
	defer w.m.mu.Unlock()
	// Operators see this only when setStatus copies it into the status, after the check. Until then the facts in the status, such as the
	// version, are those of the old host, and must not appear together with the new address.
	w.moved = moved
}

// addMoveNote adds to err that the engine's name has another address, if the engine has not answered at the new
// address yet. The caller holds m.mu.
func (w *watch) addMoveNote(err error) error {
	if !w.addressUnproven {
		return err
	}
	m := w.moved
	return fmt.Errorf("%w; its name has another address now, %s instead of %s, which was seen at %s", err, m.To, m.From,
		m.At.UTC().Format(time.RFC3339))
}

// joinAddresses returns the addresses as text, separated by commas.
func joinAddresses(all []netip.Addr) string {
	texts := make([]string, len(all))
	for i, a := range all {
		texts[i] = a.Unmap().String()
	}
	return strings.Join(texts, ",")
}

package engine

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Moved says that the name of an engine resolves to other addresses than before; the zero value: no
// change was seen.
type Moved struct {
	From string    `json:"from"` // the old addresses, separated by commas
	To   string    `json:"to"`
	At   time.Time `json:"at"` // when a look-up first showed the change
}

// address is where an engine is, by the look-ups of its name.
type address struct {
	all      []netip.Addr // at the last look-up
	moved    Moved        // the last change of all
	unproven bool         // the engine has not answered over a new connection since then
}

// resolve records to which addresses the engine's name resolves. The engine has moved if none of
// them was among those of the previous look-up; else the old host may still have the name.
func (a *address) resolve(found []netip.Addr, now time.Time) (moved bool) {
	slices.SortFunc(found, netip.Addr.Compare)
	before := a.all
	a.all = found
	if len(before) == 0 || slices.ContainsFunc(found, func(one netip.Addr) bool { return slices.Contains(before, one) }) {
		return false
	}
	a.moved, a.unproven = Moved{From: joinAddresses(before), To: joinAddresses(found), At: now}, true
	return true
}

// addMoveNote adds to err that the engine's name has another address, if the engine has not
// answered at the new address yet.
func (a *address) addMoveNote(err error) error {
	if !a.unproven {
		return err
	}
	return fmt.Errorf("%w; its name has another address now, %s instead of %s, which was seen at %s",
		err, a.moved.To, a.moved.From, a.moved.At.UTC().Format(time.RFC3339))
}

// joinAddresses returns the addresses as text, separated by commas.
func joinAddresses(all []netip.Addr) string {
	texts := make([]string, len(all))
	for i, a := range all {
		texts[i] = a.Unmap().String()
	}
	return strings.Join(texts, ",")
}

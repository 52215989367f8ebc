package service

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The timer of a deadline may have gone off already when an operator takes the
// drain back or sets another.
func TestADeadlineThatIsNotTheDrainsEndsNothing(t *testing.T) {
	at := time.Now()
	s := New(Host{Context: t.Context()})
	defer s.Close()
	require.False(t, s.isCurrent(at), "it does not drain")
	s.draining, s.limit = true, at
	require.True(t, s.isCurrent(at))
	s.limit = at.Add(time.Second)
	require.False(t, s.isCurrent(at), "it has another deadline")
}

// The timer of a grace may have gone off already, too.
func TestAGraceThatIsNotTheDrainsRefusesNothing(t *testing.T) {
	began := time.Now()
	s := New(Host{Context: t.Context()})
	defer s.Close()
	s.refuseAfter(began)
	require.False(t, s.Refusing(), "it does not drain")
	s.draining, s.since = true, began.Add(time.Second)
	s.refuseAfter(began)
	require.False(t, s.Refusing(), "this drain began later")
	s.refuseAfter(s.since)
	require.True(t, s.Refusing())
}

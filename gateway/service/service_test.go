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

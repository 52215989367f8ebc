package service

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
)

// The timer of a deadline may have gone off already when an operator takes the
// drain back or sets another.
func TestADeadlineThatIsNotTheDrainsEndsNothing(t *testing.T) {
	at, ended := time.Now(), 0
	s := New(Deps{Context: t.Context(), Log: zap.NewNop(), EndAll: func() int { ended++; return 0 }})
	defer s.Close()
	s.endAt(at)
	require.Zero(t, ended, "it does not drain")
	s.draining, s.limit = true, at.Add(time.Second)
	s.endAt(at)
	require.Zero(t, ended, "it has another deadline")
	require.False(t, s.Refusing())
	s.limit = at
	s.endAt(at)
	require.Equal(t, 1, ended)
	require.Error(t, s.Context().Err())
	s.Undrain()
	s.endAt(at)
	require.Equal(t, 1, ended, "an operator has taken the drain back")
	require.NoError(t, s.Context().Err())
	require.False(t, s.Refusing())
}

// The timer of a grace may have gone off already, too.
func TestAGraceThatIsNotTheDrainsRefusesNothing(t *testing.T) {
	began := time.Now()
	s := New(Deps{Context: t.Context()})
	defer s.Close()
	s.refuseAfter(began)
	require.False(t, s.Refusing(), "it does not drain")
	s.draining, s.since = true, began.Add(time.Second)
	s.refuseAfter(began)
	require.False(t, s.Refusing(), "this drain began later")
	s.refuseAfter(s.since)
	require.True(t, s.Refusing())
}

// A shutdown by a signal cannot be stopped: the listener of clients closes, and other proxies take
// over.
func TestAProxyThatEndsIsNotTakenBackIntoService(t *testing.T) {
	for name, end := range map[string]func(*Service){
		"in the grace":                   func(s *Service) { s.DrainForExit() },
		"while streams may still finish": (*Service).RefuseForExit,
	} {
		t.Run(name, func(t *testing.T) {
			s := New(Deps{Context: t.Context(), Log: zap.NewNop(), Grace: func() time.Duration { return time.Minute }})
			defer s.Close()
			end(s)
			refuses := s.Refusing()
			s.Undrain()
			require.True(t, s.Draining())
			require.Equal(t, refuses, s.Refusing())
		})
	}
}
